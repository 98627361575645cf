"""A dispatcher with the engine over fake workers."""

import asyncio
import json
import time

from client_side import Client
from disagg_workers import FakeWorker
from engine_world import BY_NAME, GUARD_S, Watcher, context, held, instance, request, scheduler, until

from coordinator.core.errors import EngineFailed
from coordinator.core.view import ClusterView
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay

COMPLETIONS = "/v1/completions"


class Members:
    """Remembers who is charged."""

    view = ClusterView(1)

    def __init__(self):
        self.charged = []

    def charge(self, instance, error):
        self.charged.append((instance.id, error.reason, error.connecting))

    def credit(self, instance):
        pass


class World:
    """So many fake workers, an engine and a dispatcher; closed and checked at the end of the block."""

    def __init__(
        self, prefills=1, decodes=1, *, hybrids=0, attempts=3, settings=None, options=None, workers=None, **more
    ):
        numbers = {"p": prefills, "d": decodes, "h": hybrids}
        self.names = [f"{role}{i}" for role, number in numbers.items() for i in range(number)]
        self.workers = {name: FakeWorker() for name in self.names} | (workers or {})
        self.options = options or {}
        self.context = context(settings=settings or {}, **more)
        self.engine = DisaggpbEngine(self.context)
        self.attempts = attempts
        self.members = Members()
        self.ahead_s = 0.0  # of the time by which requests' deadlines are judged

    async def __aenter__(self):
        self.instances = {}
        for name in self.names:
            await self.workers[name].listen()
            made = instance(name, self.workers[name].address, engine="disaggpb", options=self.options.get(name, {}))
            self.instances[name] = made
            self.engine.attach(made, Watcher())
        self.scheduler = scheduler(*self.instances.values(), max_queue=100)
        limits = DispatchLimits(max_attempts=self.attempts)
        self.dispatcher = Dispatcher(
            self.scheduler, self.members, {"disaggpb": self.engine}, self.context.metrics, limits,
            clock=lambda: time.monotonic() + self.ahead_s,
        )  # fmt: skip
        return self

    async def __aexit__(self, kind, *_):
        try:
            if kind is None:
                await self.leaves_nothing()
        finally:
            await self.engine.aclose()
            await self.context.client.aclose()
            for worker in self.workers.values():
                await worker.aclose()

    def worker(self, name):
        return self.workers[name]

    async def dies(self, name):
        """Stop a worker, and wait until gRPC has seen that its connection has ended: that takes it a moment."""
        await self.workers[name].server.stop(None)
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    await self.engine.probe(self.instances[name])
                except EngineFailed as error:
                    if error.connecting:
                        return

    def every(self, role):
        """All workers of a role, by the first letter of their names."""
        return [self.workers[name] for name in self.names if name[0] == role]

    def script(self, prefill=None, decode=None):
        for worker in self.workers.values():
            worker.prefill, worker.decode = prefill or worker.prefill, decode or worker.decode

    def start(self, ids=(5, 6, 7), *, api="disaggpb", path=COMPLETIONS, body=None, deadlines=None, **fields):
        """Start a request; its task ends in what the front door would see. `deadlines`: as `engine_world.request`'s."""
        given = {"token_ids": list(ids), **fields} if body is None else body
        data = json.dumps(given).encode()
        asked = request(api=api, path=path, body=data, **(deadlines or {}))
        family = BY_NAME[api]
        asked = _with_ask(asked, family.parse(path, data))
        client = Client(target=path, body=data, arrived_s=asked.arrived_s)
        client.record = RequestRecord(id=asked.id, api=api, path=path)
        client.relay = Relay(
            client.exchange, family, self.context.metrics.for_api(api), client.record,
            limit_bytes=1 << 20, tell_route=False,
        )  # fmt: skip
        client.task = asyncio.create_task(self.dispatcher.run(asked, client.relay, client.record), name="request")
        return client

    async def run(self, *args, **more):
        """Run a request to its end; `error` is what it ended in."""
        client = self.start(*args, **more)
        await ended(client)
        return client

    def calls(self, method=None):
        """(worker's name, call) of every call, by workers."""
        return [
            (name, call) for name in self.names for call in self.workers[name].calls if method in (None, call.method)
        ]

    async def leaves_nothing(self):
        """No load, no memory, no call."""
        assert held(self.scheduler) == {}
        assert self.dispatcher.live == 0
        budget = self.engine.budget
        assert (budget.reserved_bytes, budget.buffered_bytes, budget.waiting) == (0, 0, 0)
        for _, call in self.calls():
            async with asyncio.timeout(GUARD_S):
                await call.left.wait()
        await until(lambda: not any(each.partings for each in self.engine._workers.values()))


def _with_ask(asked, ask):
    return type(asked)(**{name: getattr(asked, name) for name in asked.__slots__} | {"ask": ask})


async def ended(client):
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([client.task])
    client.error = "cancelled" if client.task.cancelled() else client.task.exception()
    if client.error not in (None, "cancelled"):
        client.relay.fail(client.error)


def tokens_of(client):
    """What a client of disaggpb's own API got: token ids, and the finish reason."""
    body = client.body
    if not body.startswith((b"data:", b"event:")):
        whole = json.loads(body)
        return whole["token_ids"], whole["finish_reason"]
    ids, reason = [], None
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: "):
            told = json.loads(event[6:])
            ids += [told["token_id"]] if "token_id" in told else []
            reason = told.get("finish_reason", reason)
    return ids, reason
