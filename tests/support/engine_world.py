"""What engine tests share: instances, requests, a scheduler, a sink that remembers, a watcher."""

import asyncio
import logging
import math
import time

from coordinator.api.families import FAMILIES
from coordinator.core import out as ports
from coordinator.core.ids import WireIds
from coordinator.core.instance import Address, Instance, Role
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.engines.context import EngineContext
from coordinator.observability.metrics import Metrics
from coordinator.policies import Policies, load_policy
from coordinator.scheduler import Scheduler
from coordinator.transport.client import HttpClient

GUARD_S = 10.0
BY_NAME = {family.name: family for family in FAMILIES}
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}
CHAT = "/v1/chat/completions"


def instance(name, address=None, *, engine="mindie", model="m", **more):
    """An instance whose role is the first letter of its id."""
    return Instance(name, ROLES[name[0]], address or Address("127.0.0.1", 9), engine, model=model, **more)


def chat(text="hi", *, stream=True):
    """A chat body."""
    flag = b"true" if stream else b"false"
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}],"stream":%b}' % (text.encode(), flag)


def request(
    *, stream=True, api="openai", path=CHAT, body=None, model="m", wire_id="", ident="client-id", arrived_s=None,
    first_token_s=math.inf, finished_s=math.inf, inter_token_s=math.inf, scheduled_s=math.inf, headers=(),
):  # fmt: skip
    """A request as the front door makes it; deadlines are seconds after its arrival."""
    at_s = time.monotonic() if arrived_s is None else arrived_s
    return Request(
        id=ident,
        api=api,
        path=path,
        query="",
        headers=headers,
        body=chat(stream=stream) if body is None else body,
        ask=Ask(stream=stream, model=model, prompt_bytes=20),
        arrived_s=at_s,
        deadlines=Deadlines(at_s + scheduled_s, at_s + first_token_s, at_s + finished_s, inter_token_s),
        wire_id=wire_id,
    )


def scheduler(*ready, max_queue=10, **more):
    """A scheduler that has seen these instances."""
    made = Scheduler(Policies(load_policy("round_robin"), load_policy("round_robin")), max_queue=max_queue, **more)
    made.on_view(ClusterView(1, ready=tuple(ready)))
    return made


def held(made):
    """Id to (requests, pinned) of every instance with load."""
    return {
        found.id: (load.requests, load.pinned)
        for found, load in made.loads()
        if load.requests or load.pinned or load.blocks or load.tokens
    }


def context(**more):
    """An engine context with a client of its own, which the caller closes."""
    given = {
        "client": HttpClient(connect_s=GUARD_S),
        "ids": WireIds(start=1000),
        "metrics": Metrics([family.name for family in FAMILIES]),
        "log": logging.getLogger("test.engine"),
        "connect_s": GUARD_S,
        "health_timeout_s": GUARD_S,
    }
    return EngineContext(**(given | more))


def count(instrument, *labels):
    """Value of a counter; 0 where the cell was not made."""
    cell = instrument.snapshot().get(labels)
    return cell[0] if cell else 0


def observed(cell):
    """(number, sum in seconds) of a histogram's observations."""
    *buckets, sum_s = cell.values()
    return sum(buckets), sum_s


async def until(condition, guard_s=GUARD_S):
    """Let the loop work until the condition holds."""
    end_s = time.monotonic() + guard_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        await asyncio.sleep(0.001)


async def turns(number=5):
    """Let everything that is ready run."""
    for _ in range(number):
        await asyncio.sleep(0)


class Out(ports.Out):
    """A sink that writes down what it gets, and minds its order: nothing comes after the end."""

    def __init__(self, family="openai"):
        self.family = BY_NAME[family]
        self.events = []
        self.over = False
        self.pace = None
        self.changed = asyncio.Event()

    @property
    def started(self):
        return bool(self.events)

    @property
    def body(self):
        return b"".join(data for _, data, *_ in self.events)

    @property
    def tokens(self):
        return [data for kind, data, token in self.events if token]

    def _note(self, kind, data, token, *, over=False):
        assert not self.over, f"{kind} {data!r} after the end"
        self.over = over
        self.events.append((kind, data, token))
        self.changed.set()

    def piece(self, data, now_s, *, token=True):
        self._note("piece", data, token)

    def finish(self, data, now_s, *, token=True, after=b""):
        ends_with = self.family.ends_with
        if ends_with and not (after + data).endswith(ends_with):
            data += ends_with
        self._note("finish", data, token, over=True)

    def whole(self, body, now_s, content_type=b"application/json"):
        self._note("whole", body, True, over=True)

    def only_opens(self, data):
        return self.family.only_opens(data)

    def ends(self, data):
        return self.family.ends(data)

    def paced_by(self, pause, resume):
        self.pace = (pause, resume)

    def hold(self):
        pass

    def flush(self):
        pass


class Stages:
    """Remembers the moments of an attempt."""

    def __init__(self):
        self.moments = []

    def prefill_sent(self, wire_id):
        self.moments.append(("sent", wire_id))

    def prefilled(self, now_s, *, pinned=True):
        self.moments.append(("prefilled", now_s))

    def decoding(self, now_s):
        self.moments.append(("decoding", now_s))

    @property
    def names(self):
        return [name for name, _ in self.moments]


class Placed(Stages):
    """A placement without a scheduler."""

    def __init__(self, prefill, decode=None):
        super().__init__()
        self.prefill = prefill
        self.decode = decode or prefill
        self.others = []  # decode instances that are left
        self.failures = []

    def another_decode(self, failure):
        if not self.others:
            return False
        self.failures.append(failure)
        self.decode = self.others.pop(0)
        return True

    def skip_prefill(self):
        self.moments.append(("skipped", None))


class Watcher:
    """Remembers what became of an instance's links."""

    def __init__(self):
        self.told = []

    def linked(self):
        self.told.append("linked")

    def unlinked(self, reason):
        self.told.append(reason)

    @property
    def up(self):
        return bool(self.told) and self.told[-1] == "linked"
