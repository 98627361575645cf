"""The disaggpb engine behind a dispatcher over simulated workers, which know what KV a prompt must have."""

import asyncio
import json
import tempfile
from functools import cache
from pathlib import Path

from client_side import Client
from engine_world import BY_NAME, Watcher, context, held, instance, request, scheduler, until
from msgspec.structs import replace
from pair_on_simulators import Members, World

from coordinator.core.instance import Address
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay
from coordinator.tokens import Tokenizers
from instances.disaggpb.vocabulary import write_tokenizer
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

LOST = "<KV-LOST>"


@cache
def tokenizers():
    """The simulators' tokenizer, loaded once for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="disaggpb-sim-tokenizer-"))
    write_tokenizer(folder)
    made = Tokenizers(folder)
    made.load([folder])
    return made


class DisaggWorld(World):
    """As `World`.

    Args:
        engine: settings of the engine.
        settings: of the simulators.
    """

    def __init__(self, *, prefill=1, decode=1, timing=None, attempts=2, engine=None, max_message_bytes=-1, **settings):
        self.name = "disaggpb"
        self.context = context(settings=engine or {}, tokenizers=tokenizers())
        self.engine = DisaggpbEngine(self.context)
        self.attempts = attempts
        self.members = Members()
        settings["max_message_bytes"] = max_message_bytes
        roles = ["prefill"] * prefill + ["decode"] * decode
        self.fleet = Fleet(
            [
                Options(engine=self.name, role=role, model="m", timing=timing or Timing(), settings=settings)
                for role in roles
            ]
        )

    async def __aenter__(self):
        await self.fleet.__aenter__()
        self.prefills = [self._instance(f"p{at}", each) for at, each in enumerate(self.fleet.prefill)]
        self.decodes = [self._instance(f"d{at}", each) for at, each in enumerate(self.fleet.decode)]
        for each in (*self.prefills, *self.decodes):
            self.engine.attach(each, Watcher())
            await self.engine.probe(each)
        self.scheduler = scheduler(*self.prefills, *self.decodes, max_queue=1000)
        limits = DispatchLimits(max_attempts=self.attempts)
        self.dispatcher = Dispatcher(
            self.scheduler, self.members, {self.name: self.engine}, self.context.metrics, limits
        )
        return self

    def _instance(self, name, simulated):
        return instance(name, Address("127.0.0.1", simulated.port), engine=self.name)

    async def own(self, ids, *, stream=True, **more):
        """A request of disaggpb's own API, to its end."""
        body = json.dumps({"token_ids": ids, "stream": stream} | more).encode()
        asked = request(path="/v1/completions", body=body, stream=stream, api="disaggpb")
        asked = replace(asked, ask=BY_NAME["disaggpb"].parse(asked.path, body))
        client = Client(asked.path, body, arrived_s=asked.arrived_s)
        client.record = RequestRecord(id=asked.id, api="disaggpb", path=asked.path)
        relay = Relay(
            client.exchange, BY_NAME["disaggpb"], self.context.metrics.for_api("disaggpb"), client.record,
            limit_bytes=1 << 20, tell_route=False,
        )  # fmt: skip
        client.task = asyncio.create_task(self.dispatcher.run(asked, relay, client.record), name="request")
        await self.ended(client)
        return client

    def calls(self, role):
        """What workers of a role were asked, each worker's in order: (worker's number, request as JSON)."""
        found = self.fleet.prefill if role == "prefill" else self.fleet.decode
        return [
            (at, json.loads(record.body))
            for at, each in enumerate(found)
            for record in each.records
            if record.method == "GRPC" and "Health" not in record.path
        ]

    async def leaves_nothing(self, within_s=10.0):
        """No load, no memory, no KV in any worker's books, no call."""
        budget = self.engine.budget
        assert (budget.reserved_bytes, budget.buffered_bytes, budget.waiting) == (0, 0, 0)
        assert await self.fleet.kv_empty(within_s), [each.ledger.snapshot()["held"] for each in self.fleet.instances]
        assert held(self.scheduler) == {}
        assert self.dispatcher.live == 0
        await until(lambda: not any(each.live for each in self.fleet.instances), within_s)
