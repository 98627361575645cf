"""A small service for simulated xLLM instances: it knows them, and writes down what they tell it."""

import asyncio
import itertools
from collections import Counter, defaultdict

import aiohttp

from instances.faults import Chosen
from instances.options import Options
from instances.run import Fleet
from instances.xllm import frames, vocabulary
from instances.xllm.channel import Channel
from instances.xllm.proto.engine_pb2 import (
    ChatRequest,
    CompletionRequest,
    DisaggStreamGenerations,
    Empty,
    InstanceClusterInfo,
    Status,
    StatusSet,
)
from instances.xllm.proto.service_pb2 import HeartbeatRequest, InstanceID, InstanceMetaInfo
from instances.xllm.proto.service_pb2 import Status as Ok

API, PD, RPC = "xllm.proto.XllmAPIService", "xllm.proto.DisaggPDService", "xllm_service.proto.XllmRpcService"
GUARD_S = 20.0


async def until(condition, guard_s=GUARD_S):
    """Let the loop work until the condition holds."""
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + guard_s
    while not condition():
        assert now_s() < end_s, "it did not come to that"
        await asyncio.sleep(0.002)


class Service:
    """What a coordinator would be.

    Attributes:
        known: instances by name.
        unwanted: service ids for which generations are answered with ok=false.
        delay_s: before Generations are answered.
        mute: whether Generations are never answered; short: whether a status is missing.
    """

    def __init__(self):
        self.known = {}
        self.unwanted = set()
        self.delay_s = 0.0
        self.mute = self.short = False
        self.beats = defaultdict(list)
        self.asked = Counter()
        self.calls = []
        self.gens = defaultdict(list)
        self.raw = bytearray()
        self._tasks = set()
        self._numbers = itertools.count(1)

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        cut = frames.Reader()
        try:
            while data := await reader.read(65536):
                self.raw += data
                for frame in cut.feed(data):
                    answering = asyncio.create_task(self._answer(frame, writer))
                    self._tasks.add(answering)
                    answering.add_done_callback(self._tasks.discard)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, frame, writer):
        service, method = frame.meta.request.service_name, frame.meta.request.method_name
        assert service == RPC
        reply = await getattr(self, method)(frame.message())
        if reply is not None:
            writer.write(frames.reply(frame.meta.correlation_id, reply.SerializeToString()).encode())

    async def Heartbeat(self, data):  # noqa: N802 - the method's name
        beat = HeartbeatRequest.FromString(data)
        self.beats[beat.name].append(beat)
        return Ok(ok=True)

    async def GetInstanceInfo(self, data):  # noqa: N802 - the method's name
        name = InstanceID.FromString(data).name
        self.asked[name] += 1
        return self.known.get(name, InstanceMetaInfo())

    async def Generations(self, data):  # noqa: N802 - the method's name
        message = DisaggStreamGenerations.FromString(data)
        self.calls.append(message)
        statuses = StatusSet()
        for gen in message.gens:
            self.gens[gen.service_req_id].append(gen)
            statuses.all_status.add(ok=gen.service_req_id in self.ids and gen.service_req_id not in self.unwanted)
        if self.mute:
            return None
        await asyncio.sleep(self.delay_s)
        if self.short:
            del statuses.all_status[-1]
        return statuses

    ids = frozenset()

    def new_id(self):
        """An id that generations may carry from now on."""
        made = f"s-{next(self._numbers)}"
        self.ids = self.ids | {made}
        return made

    def text(self, ident, index=0):
        """All text of one sequence; prefill's comes first, whenever it came."""
        gens = sorted(self.gens[ident], key=lambda gen: not gen.finished_on_prefill_instance)
        return "".join(out.text for gen in gens for out in gen.outputs if out.index == index)

    def is_over(self, ident):
        return any(gen.finished or gen.gen_status.status_code for gen in self.gens[ident])

    async def over(self, ident):
        """The generations of a request that has ended."""
        await until(lambda: self.is_over(ident))
        return self.gens[ident]


def info_of(instance):
    """What the service knows of an instance."""
    engine = instance.engine
    return InstanceMetaInfo(
        name=engine.name,
        rpc_address=f"{instance.host}:{engine.pd_port}",
        cluster_ids=engine.cluster_ids,
        dp_size=engine.settings.dp_size,
        addrs=engine.addrs,
        ports=engine.link_ports,
        incarnation_id=engine.presence.incarnation_id,
        kv_split_size=1,
    )


def cluster_info(instance):
    """What a peer is linked with."""
    info = info_of(instance)
    return InstanceClusterInfo(
        instance_name=info.name, cluster_ids=info.cluster_ids, addrs=info.addrs, ports=info.ports, dp_size=info.dp_size
    )


async def rpc(address, service, method, message, reply=Empty, deadline_s=GUARD_S):
    """One call over baidu_std."""
    channel = Channel(address, Chosen, deadline_s)
    try:
        return await channel.call((service, method), message, reply)
    finally:
        channel.close()


def pd_address(instance):
    return f"{instance.host}:{instance.engine.pd_port}"


class Cluster:
    """A service, prefill and decode instances that it knows, linked."""

    def __init__(self, prefills=1, decodes=1, *, link=True, prefill=None, decode=None, **options):
        self.service = Service()
        self._link = link
        self._made = []
        for role, count, own in (("prefill", prefills, prefill), ("decode", decodes, decode)):
            merged = {**options, **(own or {})}
            settings = {**options.get("settings", {}), **(own or {}).get("settings", {})}
            self._made += [{**merged, "role": role, "settings": settings} for _ in range(count)]

    async def __aenter__(self):
        await self.service.__aenter__()
        address = self.service.address
        self.fleet = Fleet(
            [
                Options(
                    engine="xllm", **{**made, "settings": {"service": address, "heartbeat_s": 0.05, **made["settings"]}}
                )
                for made in self._made
            ]
        )
        await self.fleet.__aenter__()
        for instance in self.fleet.instances:
            self.service.known[instance.engine.name] = info_of(instance)
        if self._link:
            for decode in self.fleet.decode:
                for prefill in self.fleet.prefill:
                    answer = await rpc(pd_address(decode), PD, "LinkInstance", cluster_info(prefill), Status)
                    assert answer.ok
        return self

    async def __aexit__(self, *_):
        await self.fleet.__aexit__()
        await self.service.__aexit__()

    @property
    def prefill(self):
        return self.fleet.prefill[0]

    @property
    def decode(self):
        return self.fleet.decode[0]

    def message(self, prompt, *, kind=CompletionRequest, prefill=None, decode=None, **fields):
        """A request as a service makes it: (its id, the message)."""
        ident = self.service.new_id()
        prefill, decode = prefill or self.prefill, decode or self.decode
        message = kind(model="sim-model", service_request_id=ident, source_xservice_addr=self.service.address, **fields)
        message.routing.prefill_name, message.routing.decode_name = prefill.engine.name, decode.engine.name
        if kind is ChatRequest:
            message.messages.add(role="user", content=prompt)
            prompt = f"user: {prompt}\nassistant:"
        else:
            message.prompt = prompt
        message.token_ids.extend(vocabulary.encode(prompt))
        return ident, message

    async def send(self, prompt, *, kind=CompletionRequest, prefill=None, **fields):
        """Dispatch a request over baidu_std; gives its id."""
        ident, message = self.message(prompt, kind=kind, prefill=prefill, **fields)
        method = "ChatCompletions" if kind is ChatRequest else "Completions"
        await rpc((prefill or self.prefill).engine.name, API, method, message)
        return ident

    async def run(self, prompt, **fields):
        """Dispatch a request and wait for its end; gives its id and its generations."""
        ident = await self.send(prompt, **fields)
        return ident, await self.service.over(ident)

    async def kv_empty(self):
        return await self.fleet.kv_empty(GUARD_S)


async def post(instance, path, body=b"", *, port=None, content_type="application/json", headers=()):
    """POST over HTTP; gives (status, headers, body)."""
    url = f"http://{instance.host}:{port or instance.port}{path}"
    given = {"Content-Type": content_type, **dict(headers)}
    async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=given) as answer:
        return answer.status, answer.headers, await answer.read()
