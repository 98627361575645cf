"""The xllm engine, without etcd, behind a dispatcher over simulated instances."""

import asyncio
import functools
import json
import tempfile
from pathlib import Path

from client_side import Client
from engine_world import BY_NAME, CHAT, Watcher, context, instance, request, scheduler, until
from pair_on_simulators import PATHS, Members, World
from xllm_pair import settings as engine_settings

from coordinator.core.errors import RequestError
from coordinator.core.instance import Address
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.xllm import XllmEngine
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay
from coordinator.tokens import Tokenizers
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing
from instances.xllm.vocabulary import write_tokenizer


@functools.cache
def tokenizers():
    """The simulators' own, made once for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="xllm-simulators-"))
    write_tokenizer(folder)
    made = Tokenizers(folder)
    made.load([folder])
    return made


class XllmWorld(World):
    """As `World`.

    Args:
        engine: settings of the engine.
        options: of the simulators besides their settings.
        settings: of the simulators.
    """

    def __init__(self, *, prefill=1, decode=1, timing=None, attempts=2, engine=None, options=None, **settings):
        self.name = "xllm"
        self.context = context(settings=engine_settings(**(engine or {})), tokenizers=tokenizers())
        self.engine = XllmEngine(self.context)
        self.attempts = attempts
        self.members = Members()
        self.counts = ["prefill"] * prefill + ["decode"] * decode
        self.given = {"engine": self.name, "model": "m", "timing": timing or Timing(), **(options or {})}
        self.settings = settings
        self.watchers = {}

    async def __aenter__(self):
        await self.engine._inbound.listen()
        told = {**self.settings, "service": self.engine._inbound.address}
        self.fleet = Fleet([Options(role=role, settings=told, **self.given) for role in self.counts])
        await self.fleet.__aenter__()
        self.prefills = [self._instance(f"p{at}", each) for at, each in enumerate(self.fleet.prefill)]
        self.decodes = [self._instance(f"d{at}", each) for at, each in enumerate(self.fleet.decode)]
        for each in (*self.prefills, *self.decodes):
            self.watchers[each.id] = Watcher()
            self.engine.attach(each, self.watchers[each.id])
            await self.engine.probe(each)
        await until(lambda: all(watcher.up for watcher in self.watchers.values()))
        self.scheduler = scheduler(*self.prefills, *self.decodes, max_queue=1000)
        engines, limits = {self.name: self.engine}, DispatchLimits(max_attempts=self.attempts)
        self.dispatcher = Dispatcher(self.scheduler, self.members, engines, self.context.metrics, limits)
        return self

    def _instance(self, name, simulated):
        given = {"rpc_address": f"127.0.0.1:{simulated.engine.pd_port}", "cluster_ids": (len(self.watchers) + 1,),
                 "addrs": ("127.0.0.1",), "ports": (1,)}  # fmt: skip
        return instance(name, Address("127.0.0.1", simulated.port), engine=self.name, options=given)

    def start(self, text, *, path=CHAT, stream=True, tokens=8, deadlines=None, **more):
        """Send a request; `deadlines`: as those of `engine_world.request`."""
        body = json.dumps(PATHS[path](text, tokens) | {"stream": stream} | more).encode()
        asked = request(path=path, body=body, stream=stream, **(deadlines or {}))
        client = Client(path, body, arrived_s=asked.arrived_s)
        client.record = RequestRecord(id=asked.id, api="openai", path=path)
        client.relay = relay = Relay(
            client.exchange, BY_NAME["openai"], self.context.metrics.for_api("openai"), client.record,
            limit_bytes=1 << 20, tell_route=False,
        )  # fmt: skip
        client.task = asyncio.create_task(self._run(asked, relay, client.record), name="request")
        return client

    async def _run(self, asked, relay, record):
        try:
            await self.dispatcher.run(asked, relay, record)
        except RequestError as error:
            relay.fail(error)
            raise

    async def unlinked(self):
        """As `leaves_nothing`, once the links are undone: until then decode keeps KV whose first token never came."""
        for prefill in self.prefills:
            await self.engine.detach(prefill)
        await self.leaves_nothing()

    def decode_state(self):
        """What decode instances have counted, all together."""
        counted = [each.engine.state() for each in self.fleet.decode]
        return {key: sum(one.get(key, 0) for one in counted) for key in counted[0] if isinstance(counted[0][key], int)}

    @property
    def aborts(self):
        """Why simulated processes died."""
        return [why for each in self.fleet.instances for why in each.engine.aborts]
