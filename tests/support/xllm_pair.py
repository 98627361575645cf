"""An xLLM prefill and decode instance on loopback: strict about what they are asked, pushing what a test says."""

import asyncio
import functools
import itertools
import json
import tempfile
from pathlib import Path

from engine_world import GUARD_S, Out, Placed, Watcher, context, instance, request, until
from fake_instances import FakeInstance
from token_folders import write_folder

from coordinator.engines.xllm import XllmEngine
from coordinator.engines.xllm.settings import read_settings
from coordinator.tokens import Tokenizers
from coordinator.wire.protobuf.brpc_pb2 import RpcMeta
from coordinator.wire.protobuf.xllm_pb2 import (
    DisaggStreamGeneration,
    DisaggStreamGenerations,
    HeartbeatRequest,
    InstanceID,
    InstanceIDs,
    InstanceMetaInfo,
    Status,
    StatusSet,
)
from coordinator.wire.prpc import PrpcParser, encode_frame

COMPLETIONS = "/xllm.proto.XllmAPIService/Completions"
LINK, UNLINK = "/xllm.proto.DisaggPDService/LinkInstance", "/xllm.proto.DisaggPDService/UnlinkInstance"
SERVICE = "xllm_service.proto.XllmRpcService"


@functools.cache
def tokenizers():
    """One with a chat template, made once for all tests."""
    folder = write_folder(Path(tempfile.mkdtemp(prefix="xllm-tokenizer-")))
    made = Tokenizers(folder)
    made.load([folder])
    return made


def settings(**more):
    return read_settings({"rpc_port": 0, **more})


def output(text="", index=0, finish="", ids=None, logprobs=()):
    """One SequenceOutput as keywords; a token id for each character."""
    made = [ord(c) for c in text] if ids is None else ids
    return {"index": index, "text": text, "token_ids": made, "finish_reason": finish, "logprobs": logprobs}


def generation(wire_id, *outputs, first=False, finished=False, usage=None, status=None, ident="e"):
    told = DisaggStreamGeneration(
        req_id=ident,
        service_req_id=wire_id,
        outputs=outputs,
        finished=finished,
        finished_on_prefill_instance=first,
    )
    if usage is not None:
        told.usage.num_prompt_tokens, told.usage.num_generated_tokens = usage
        told.usage.num_total_tokens = sum(usage)
    if status is not None:
        told.gen_status.status_code, told.gen_status.status_msg = status
    return told


class Channel:
    """An instance's connection to the coordinator; replies may come in any order."""

    def __init__(self, address):
        self.address = address
        self.parser = PrpcParser()
        self.numbers = itertools.count(1)
        self.waiting = {}
        self.writer = None
        self.reading = None

    async def connect(self):
        host, _, port = self.address.rpartition(":")
        reader, self.writer = await asyncio.open_connection(host, int(port))
        self.reading = asyncio.create_task(self.read(reader), name="xllm channel")
        return self

    async def read(self, reader):
        while data := await reader.read(65536):
            for frame in self.parser.feed(data):
                self.waiting.pop(frame.meta.correlation_id).set_result(frame)
        for future in self.waiting.values():
            future.set_exception(ConnectionError("closed"))

    async def call(self, method, message):
        number = next(self.numbers)
        meta = RpcMeta(correlation_id=number)
        meta.request.service_name, meta.request.method_name = SERVICE, method
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        self.writer.write(encode_frame(meta, message.SerializeToString()))
        async with asyncio.timeout(GUARD_S):
            return await future

    async def push(self, *generations):
        """Generations; returns what each is answered, and fails as an engine would on a wrong number of answers."""
        frame = await self.call("Generations", DisaggStreamGenerations(gens=generations))
        assert frame.meta.response.error_code == 0, frame.meta.response.error_text
        answers = [one.ok for one in StatusSet.FromString(frame.payload).all_status]
        assert len(answers) == len(generations), "the engine's process aborts"
        return answers

    async def beat(self, name, incarnation="", waiting=0, usage=0.0, stored=(), removed=()):
        told = HeartbeatRequest(name=name, incarnation_id=incarnation)
        told.load_metrics.waiting_requests_num, told.load_metrics.gpu_cache_usage_perc = waiting, usage
        told.cache_event.stored_cache.extend(stored)
        told.cache_event.removed_cache.extend(removed)
        return Status.FromString((await self.call("Heartbeat", told)).payload).ok

    async def info(self, name):
        return InstanceMetaInfo.FromString((await self.call("GetInstanceInfo", InstanceID(name=name))).payload)

    async def names(self, method):
        return list(InstanceIDs.FromString((await self.call(method, InstanceID())).payload).names)

    async def aclose(self):
        if self.writer is not None:
            self.writer.close()
            self.reading.cancel()
            await asyncio.gather(self.reading, return_exceptions=True)


class FakeXllm(FakeInstance):
    """One instance; both of its ports are one.

    Attributes:
        links: names that it has a link to.
        unlinked: names that it was told to close its link to, as often as that.
        refuse_links: so many links are refused.
        asked: bodies of the requests that came, by the coordinator's id; they may come in any order.
    """

    def __init__(self):
        super().__init__()
        self.links = []
        self.unlinked = []
        self.peers_told = []
        self.refuse_links = 0
        self.channel = None
        self.asked = {}
        self.sick = False
        self.model = "m"

    @property
    def name(self):
        return self.address.netloc

    async def other(self, call):
        if call.target in (LINK, UNLINK):
            self.link(call, json.loads(call.body))
        else:
            await super().other(call)

    async def _answer(self, call):
        if call.target == "/health":
            call.reply(b"", 503 if self.sick else 200)
        elif call.target == "/v1/models":
            call.reply(json.dumps({"data": [{"id": self.model}]}).encode())
        else:
            await super()._answer(call)

    def link(self, call, peer):
        name = peer["instance_name"]
        if call.target == UNLINK:
            self.unlinked.append(name)
            known = name in self.links
            self.links = [link for link in self.links if link != name]
            call.reply(b'{"ok":true}' if known else b"{}")
        elif self.refuse_links:
            self.refuse_links -= 1
            call.reply(b"{}")
        else:
            self.peers_told.append(peer)
            self.links.append(name)
            call.reply(b'{"ok":true}')

    async def infer(self, call):
        assert call.target == COMPLETIONS
        assert call.header("content-type") == "application/json"
        body = json.loads(call.body)
        assert body["token_ids"], "the process aborts"
        assert body["prompt"]
        assert body["routing"]["decode_name"]
        call.reply(b"{}")
        await self.run(body)

    async def run(self, body):
        self.took_on(body)

    def took_on(self, body):
        self.asked[body["service_request_id"]] = body

    async def connect(self, address):
        if self.channel is None:
            self.channel = await Channel(address).connect()
            await self.channel.call("Hello", Status())  # a server that closes knows those alone that it has accepted
        return self.channel

    async def push(self, *generations):
        return await self.channel.push(*generations)

    async def aclose(self):
        if self.channel is not None:
            await self.channel.aclose()
        await super().aclose()


def xllm(name, fake, **more):
    """An instance of the cluster."""
    given = {"rpc_address": fake.name, "cluster_ids": (1,), "addrs": ("127.0.0.1",), "ports": (7,), "dp_size": 1}
    return instance(name, fake.address, engine="xllm", options=given | more.pop("options", {}), **more)


class Pair:
    """An engine with fakes around it."""

    def __init__(self, prefills=1, decodes=1, **settings_):
        self.counts = prefills, decodes
        self.settings = settings_
        self.watchers = {}
        self.fakes = {}
        self.instances = {}

    async def __aenter__(self):
        self.context = context(settings=settings(**self.settings), tokenizers=tokenizers())
        self.engine = XllmEngine(self.context)
        for letter, count in zip("pd", self.counts, strict=True):
            for number in range(count):
                await self.add(f"{letter}{number}")
        await self.up()
        return self

    async def add(self, name, fake=None, **more):
        fake = fake or await FakeXllm().listen()
        self.fakes[name] = fake
        self.attach(name, xllm(name, fake, **more))
        return fake

    def attach(self, name, made):
        self.instances[name] = made
        self.watchers[name] = Watcher()
        self.engine.attach(made, self.watchers[name])

    async def up(self):
        await until(lambda: all(watcher.up for watcher in self.watchers.values()))
        for fake in self.fakes.values():
            await fake.connect(self.address)

    @property
    def address(self):
        return self.engine._inbound.address

    @property
    def p(self):
        return self.fakes["p0"]

    @property
    def d(self):
        return self.fakes["d0"]

    async def __aexit__(self, *_):
        await self.engine.aclose()
        await self.context.client.aclose()
        for fake in self.fakes.values():
            await fake.aclose()

    def serve(self, prefill="p0", decode="d0", family="openai", **more):
        return Served(self, Placed(self.instances[prefill], self.instances[decode]), family, more)


class Served:
    """One attempt under way."""

    def __init__(self, pair, placed, family, more):
        self.pair, self.placed, self.out = pair, placed, Out(family)
        asked = request(api=family, **more)
        self.task = asyncio.create_task(pair.engine.serve(asked, placed, self.out), name="serve")

    async def body(self):
        """What prefill was asked."""
        fake = next(f for n, f in self.pair.fakes.items() if self.pair.instances[n] is self.placed.prefill)
        await until(lambda: self.placed.names[:1] == ["sent"])
        self.wire_id = self.placed.moments[0][1]
        await until(lambda: self.wire_id in fake.asked)
        return fake.asked[self.wire_id]

    def told(self, *outputs, **more):
        return generation(self.wire_id, *outputs, **more)

    async def result(self):
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait([self.task])
        if self.task.cancelled():
            return "cancelled"
        return self.task.exception() or self.task.result()
