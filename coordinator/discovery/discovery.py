"""All sources together: started, stopped, exchanged, and what they name brought into the cluster."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster import Cluster
from coordinator.core.instance import Instance

from .membership import Membership
from .source import Source

LOG = logging.getLogger("pd_coordinator.discovery")
REVIVE_S = 5.0  # before a source that broke is tried again
ROUNDS = 100  # of settling; each ends with one source having more or less than before

Readings = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """A source that is to run.

    Attributes:
        given: all that it depends on; one with an equal value runs on when the configuration is read again.
        make: builds it.
    """

    given: object
    make: Callable[[], Source]


class _Reporter:
    """Hands on what a source tells until it is closed (source.Report)."""

    def __init__(self, membership: Membership, discovery: "Discovery") -> None:
        self._membership = membership
        self._discovery = discovery
        self.closed = False

    def found(
        self,
        instances: Sequence[Instance],
        faults: Mapping[str, str],
        trouble: str = "",
        *,
        incomplete: bool = False,
    ) -> None:
        if not self.closed:
            self._discovery.change(lambda: self._membership.found(instances, faults, trouble, incomplete=incomplete))

    def lost(self, reason: str) -> None:
        if not self.closed:
            self._membership.lost(reason)


@dataclass(slots=True)
class _Running:
    given: object
    task: asyncio.Task[None]
    reporter: _Reporter
    membership: Membership


class Discovery:
    """Runs sources; there is one, however many processes serve.

    Args:
        cluster: gets what they name; is asked to tell when others name or drop instances.
        clock: monotonic seconds.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changing = False
        cluster.on_named = self._others_changed

    def apply(self, plans: Mapping[str, Plan]) -> None:
        """Run these sources, by name, and no others; effective at once.

        A source that stays is left alone; one whose plan has changed is replaced while its instances stay until the new
        one has looked; the instances of one that is gone drain and go.
        """
        for name in [name for name in self._running if name not in plans]:
            gone = self._running.pop(name)
            self._end(gone)
            self.change(gone.membership.close)
        for name, plan in plans.items():
            old = self._running.get(name)
            if old is not None and old.given == plan.given:
                continue
            if old is not None:
                self._end(old)
            membership = old.membership if old is not None else Membership(name, self._cluster, LOG, self._clock)
            reporter = _Reporter(membership, self)
            work = self._keep_running(name, plan.make, reporter)
            task = asyncio.get_running_loop().create_task(work, name=f"discovery:{name}")
            self._running[name] = _Running(plan.given, task, reporter, membership)

    async def aclose(self) -> None:
        """Stop all sources; instances stay as they are. Idempotent."""
        for running in self._running.values():
            self._end(running)
        if self._ending:
            await asyncio.wait(self._ending)

    def describe(self) -> list[dict[str, object]]:
        """One row for each source."""
        return [running.membership.describe() for running in self._running.values()]

    def read_up(self) -> Readings:
        """For the gauge: whether each source could be asked the last time."""
        for name, running in self._running.items():
            yield (name,), float(running.membership.up)

    def read_instances(self) -> Readings:
        """For the gauge: members that each source names."""
        for name, running in self._running.items():
            yield (name,), float(len(running.membership.held))

    def change(self, work: Callable[[], None]) -> None:
        """Have a source change the cluster, then let the others see what that means for them."""
        self._changing = True
        try:
            work()
            for _ in range(ROUNDS):
                moved = [running.membership.settle() for running in self._running.values()]
                if not any(moved):
                    break
        finally:
            self._changing = False

    # --- inside

    def _others_changed(self) -> None:
        """Somebody has named or dropped instances; we ourselves, if a change is under way."""
        if not self._changing:
            self.change(lambda: None)

    def _end(self, running: _Running) -> None:
        running.reporter.closed = True
        running.task.cancel()
        self._ending.add(running.task)
        running.task.add_done_callback(self._ending.discard)

    async def _keep_running(self, name: str, make: Callable[[], Source], reporter: _Reporter) -> None:
        while True:
            try:
                await make().run(reporter)
            except Exception:  # the border to sources: a fault of one must not end it for good
                LOG.exception("discovery: %s broke", name)
                reporter.lost("it broke, the log says where")
            await asyncio.sleep(REVIVE_S)
