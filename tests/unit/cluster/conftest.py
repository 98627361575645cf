"""A loop that skips waiting, and an engine that does what it is told."""

import asyncio
import logging
import selectors
from collections import defaultdict

import pytest

from coordinator.cluster import Cluster, HealthSettings
from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Address, Instance, Role


class SkippingSelector(selectors.DefaultSelector):
    """Instead of waiting it says how long it would have waited."""

    def __init__(self):
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise AssertionError("the loop would wait for ever")
        self.skipped_s += timeout
        return super().select(0)


class TimeTravel(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, then jumps to the next timer."""

    def __init__(self):
        self._skipping = SkippingSelector()
        super().__init__(self._skipping)

    def time(self):
        return self._skipping.skipped_s


@pytest.fixture
def run():
    """Run a coroutine function in skipped time: minutes pass at once."""

    def runner(main):
        with asyncio.Runner(loop_factory=TimeTravel) as r:
            return r.run(main())

    return runner


class Engine:
    """Records calls; `replies[id]` is what the next checks do (the last one for ever)."""

    def __init__(self):
        self.links = True  # whether attach opens links at once
        self.watchers = {}
        self.calls = []
        self.replies = defaultdict(lambda: [None])
        self.check_times = defaultdict(list)
        self.detaching = None

    def options(self, given):
        return given

    def attach(self, instance, watcher):
        self.calls.append(("attach", instance.id))
        self.watchers[instance.id] = watcher
        if self.links is True:
            watcher.linked()
        elif self.links is False:
            watcher.unlinked("link is not open yet")
        else:
            raise self.links

    async def detach(self, instance):
        if self.detaching is not None:
            await self.detaching.wait()
        self.calls.append(("detach", instance.id))

    async def probe(self, instance):
        self.check_times[instance.id].append(asyncio.get_running_loop().time())
        queue = self.replies[instance.id]
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        if reply == "hang":
            await asyncio.Event().wait()
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Rig:
    """A cluster with a scripted engine, adjustable load and a record of views."""

    def __init__(self, settings):
        self.engine = Engine()
        self.load = defaultdict(int)
        self.views = []
        self.cluster = Cluster(
            {"vllm": self.engine, "other": self.engine},
            settings,
            in_flight=lambda instance: self.load[instance.id],
            log=logging.getLogger("coordinator.cluster"),
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self.cluster.subscribe(self.views.append)

    def state(self, ident):
        return next((row["state"] for row in self.cluster.describe() if row["id"] == ident), None)

    def row(self, ident):
        return next(row for row in self.cluster.describe() if row["id"] == ident)

    def ready(self):
        return [i.id for i in self.cluster.view.ready]

    def suspect(self):
        return [i.id for i in self.cluster.view.suspect]


@pytest.fixture
def rig():
    def make(**settings):
        given = {"interval_s": 10.0, "timeout_s": 3.0, "fail_after": 3, "recover_after": 2}
        return Rig(HealthSettings(**{**given, **settings}))

    return make


@pytest.fixture
def make():
    """An instance: `make("p1")` is a prefill, `make("d1")` a decode, `make("h1")` a hybrid."""

    def instance(ident, host=None, **more):
        role = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}[ident[0]]
        return Instance(ident, role, Address(host or f"{ident}.test", 8000), more.pop("engine", "vllm"), **more)

    return instance


@pytest.fixture
def failed():
    """A failure to report: `failed()` of a request, `failed(connecting=True)` of a connection."""

    def error(reason="reset", **more):
        return EngineFailed(Side.DECODE, "d1", reason, **more)

    return error
