"""A dispatcher over a real scheduler and a real relay, with an engine that a test scripts."""

import asyncio
import types

from client_side import Client
from engine_world import BY_NAME, GUARD_S, held, instance, request, scheduler

from coordinator.core.ports import COMPLETED, Answer, Resume
from coordinator.core.view import ClusterView
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.relay import Relay

LAST = b'data: {"choices":[{"index":0,"delta":{"content":"z"},"finish_reason":"stop"}]}\n\n'
A = b'data: {"choices":[{"index":0,"delta":{"content":"A"},"finish_reason":null}]}\n\n'
BODY = b'{"model":"m","messages":"2,1,2,3","stream":true}'


class Clock:
    """Monotonic time that a test moves."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Attempt:
    """One call of `serve`, for scripts and for looking at afterwards."""

    def __init__(self, request, placement, out):
        self.request, self.placement, self.out = request, placement, out
        self.pair = (placement.prefill.id, placement.decode.id)
        self.cancelled = False


class ScriptedEngine:
    """Each attempt runs the next script, the last one again and again."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.attempts = []
        self.calls = []
        self.call_error = None
        self.wire_ids = iter(range(1, 1000))

    async def serve(self, request, placement, out):
        attempt = Attempt(request, placement, out)
        script = self.scripts[min(len(self.attempts), len(self.scripts) - 1)]
        self.attempts.append(attempt)
        placement.prefill_sent(request.wire_id or str(next(self.wire_ids)))
        try:
            return await script(attempt)
        except asyncio.CancelledError:
            attempt.cancelled = True
            raise

    async def call(self, request, instance):
        self.calls.append((request, instance))
        if self.call_error is not None:
            raise self.call_error
        return Answer(200, b"application/json", b"{}")


class FakeCluster:
    """Notes whom it is told about."""

    def __init__(self, *ready):
        self.view = ClusterView(1, ready=ready)
        self.charged = []
        self.credited = []

    def charge(self, instance, error):
        self.charged.append((instance.id, error.reason))

    def credit(self, instance):
        self.credited.append(instance.id)


class World:
    def __init__(self, *scripts, prefills=2, decodes=2, hybrids=0, max_queue=10, instances=(), **limits):
        self.instances = list(instances) or [
            *(instance(f"p{i}") for i in range(prefills)),
            *(instance(f"d{i}") for i in range(decodes)),
            *(instance(f"h{i}") for i in range(hybrids)),
        ]
        self.engine = ScriptedEngine(*scripts)
        self.clock = Clock()
        self.scheduler = scheduler(*self.instances, max_queue=max_queue, clock=self.clock)
        self.cluster = FakeCluster(*self.instances)
        self.metrics = Metrics(list(BY_NAME))
        self.dispatcher = Dispatcher(
            self.scheduler, self.cluster, {"mindie": self.engine}, self.metrics, DispatchLimits(**limits), self.clock
        )

    def start(self, asked=None, **given):
        """Start a request; returns what became of it so far."""
        asked = asked or request(**({"arrived_s": self.clock.now_s} | given))
        client = Client(body=asked.body, arrived_s=asked.arrived_s)
        record = RequestRecord(id=asked.id, api=asked.api, path=asked.path)
        relay = Relay(
            client.exchange, BY_NAME[asked.api], self.metrics.for_api(asked.api), record,
            limit_bytes=1000, tell_route=False,
        )  # fmt: skip
        task = asyncio.create_task(self.dispatcher.run(asked, relay, record), name="request")
        return types.SimpleNamespace(task=task, client=client, record=record, relay=relay, asked=asked)

    async def run(self, asked=None, **given):
        """Run a request to its end; `error` is what it ended in."""
        started = self.start(asked, **given)
        started.error = await ended(started.task)
        assert self.dispatcher.live == 0
        assert held(self.scheduler) == {}
        return started

    def attempts_by_reason(self):
        return {labels[0]: cell[0] for labels, cell in self.metrics.attempts.snapshot().items() if cell[0]}

    @property
    def pairs(self):
        return [attempt.pair for attempt in self.engine.attempts]


async def ended(task):
    """The error that a task ended in; `cancelled`; or None."""
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([task])
    return "cancelled" if task.cancelled() else task.exception()


# --- scripts


async def good(attempt):
    attempt.placement.prefilled(1001.0)
    attempt.placement.decoding(1002.0)
    if attempt.request.ask.stream:
        attempt.out.piece(A, 1001.0)
        attempt.out.finish(LAST, 1002.0)
    else:
        attempt.out.whole(b"{}", 1002.0)
    return COMPLETED


async def hang(attempt):
    await asyncio.Event().wait()


def fails(error, *, after=0):
    """Fail with `error(attempt)`, after so many pieces."""

    async def script(attempt):
        for _ in range(after):
            attempt.out.piece(A, 1001.0)
        raise error(attempt)

    return script


def gives_back(pieces=1, body=BODY, wire_id="77"):
    async def script(attempt):
        for _ in range(pieces):
            attempt.out.piece(A, 1001.0)
        return Resume(body, wire_id)

    return script
