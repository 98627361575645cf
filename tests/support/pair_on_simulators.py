"""A dispatcher with one engine over simulated instances, which check what they get and count the KV that they hold."""

import asyncio
import json

from client_side import Client
from engine_world import BY_NAME, CHAT, GUARD_S, Watcher, context, held, instance, request, scheduler, until

from coordinator.core.instance import Address
from coordinator.core.view import ClusterView
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.table import load_engine
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

COMPLETIONS = "/v1/completions"


def chat_body(text, tokens):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def completion_body(text, tokens):
    return {"model": "m", "prompt": text, "max_tokens": tokens}


PATHS = {CHAT: chat_body, COMPLETIONS: completion_body}


class Members:
    """Remembers who is charged."""

    view = ClusterView(1)

    def __init__(self):
        self.charged = []

    def charge(self, instance, error):
        self.charged.append((instance.id, error.reason))

    def credit(self, instance):
        pass


class World:
    """`prefill` and `decode` instances of one engine behind a dispatcher.

    Args:
        engine: `vllm` or `sglang`.
        settings: of every instance, engine-specific.
    """

    def __init__(self, engine, *, prefill=1, decode=1, timing=None, attempts=2, **settings):
        self.name = engine
        self.context = context()
        self.engine = load_engine(engine)(self.context)
        self.attempts = attempts
        self.members = Members()
        roles = ["prefill"] * prefill + ["decode"] * decode
        self.fleet = Fleet(
            [
                Options(engine=engine, role=role, model="m", timing=timing or Timing(), settings=settings)
                for role in roles
            ]
        )

    async def __aenter__(self):
        await self.fleet.__aenter__()
        self.prefills = [self._instance(f"p{at}", each) for at, each in enumerate(self.fleet.prefill)]
        self.decodes = [self._instance(f"d{at}", each) for at, each in enumerate(self.fleet.decode)]
        for each in (*self.prefills, *self.decodes):
            watcher = Watcher()
            self.engine.attach(each, watcher)
            await self.engine.probe(each)
            assert watcher.up
        self.scheduler = scheduler(*self.prefills, *self.decodes, max_queue=1000)
        engines, limits = {self.name: self.engine}, DispatchLimits(max_attempts=self.attempts)
        self.dispatcher = Dispatcher(self.scheduler, self.members, engines, self.context.metrics, limits)
        return self

    def _instance(self, name, simulated):
        return instance(name, Address("127.0.0.1", simulated.port), engine=self.name)

    async def __aexit__(self, *_):
        await self.engine.aclose()
        await self.context.client.aclose()
        await self.fleet.__aexit__()

    def start(self, text, *, path=CHAT, stream=True, tokens=8, **more):
        """Send a request; what becomes of it is in its `task`."""
        body = json.dumps(PATHS[path](text, tokens) | {"stream": stream} | more).encode()
        asked = request(path=path, body=body, stream=stream)
        client = Client(path, body, arrived_s=asked.arrived_s)
        client.record = RequestRecord(id=asked.id, api="openai", path=path)
        relay = Relay(
            client.exchange, BY_NAME["openai"], self.context.metrics.for_api("openai"), client.record,
            limit_bytes=1 << 20, tell_route=False,
        )  # fmt: skip
        client.task = asyncio.create_task(self.dispatcher.run(asked, relay, client.record), name="request")
        return client

    async def run(self, text, **given):
        """The same, to its end."""
        client = self.start(text, **given)
        await self.ended(client)
        return client

    async def ended(self, *clients):
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([client.task for client in clients])

    def set(self, *faults):
        """Have these faults on all instances that know them."""
        for each in self.fleet.instances:
            each.faults.replace(faults)

    async def leave_between(self, client, turns):
        """Have a client leave so many turns of the loop after prefill's answer, before decode's first output."""
        async with asyncio.timeout(GUARD_S):
            while not any(pinned for _, pinned in held(self.scheduler).values()):  # noqa: ASYNC110  # not one is missed
                await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert b'"content":"' not in client.body.replace(b'"content":""', b""), "decode has spoken already"
        client.task.cancel()
        await self.ended(client)
        assert client.task.cancelled()

    def pinned(self):
        """What `pd_coordinator_kv_pinned_requests` shows, all instances together: leases, and what outlives them."""
        after = self.engine.pinned() if hasattr(self.engine, "pinned") else {}
        return sum(pinned for _, pinned in held(self.scheduler).values()) + sum(after.values())

    @property
    def expired(self):
        """How often KV at a vLLM prefill instance has waited in vain, by the simulators' own books."""
        return sum(each.engine.handoffs.expired for each in self.fleet.prefill)

    async def leaves_nothing(self, within_s=GUARD_S):
        """No load, no pinned KV at the coordinator or in any instance's books, no connection in use."""
        await until(lambda: self.pinned() == 0, within_s)
        assert await self.fleet.kv_empty(within_s), [each.ledger.snapshot()["held"] for each in self.fleet.instances]
        assert held(self.scheduler) == {}
        assert self.dispatcher.live == 0
        client = self.context.client
        await until(lambda: client.open_connections == client.idle_connections)
        await until(lambda: not any(each.live for each in self.fleet.instances))


def text_of(body):
    """The generated text, as a client of the OpenAI family would put it together."""
    if body.startswith(b"{"):
        choice = json.loads(body)["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    values = [json.loads(payload) for payload in payloads(body) if payload != b"[DONE]"]
    choices = [choice for value in values for choice in value["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def payloads(body):
    """The payload of each event; its `data` lines are joined by line ends (WHATWG HTML §9.2.6)."""
    events = body.replace(b"\r\n", b"\n").split(b"\n\n")
    lines = [[line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")] for event in events]
    return [b"\n".join(parts) for parts in lines if parts]
