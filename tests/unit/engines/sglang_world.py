"""Strict SGLang instances on loopback: a room is worth something only when both legs have opened it."""

import asyncio
import json

from engine_world import Out, Placed, context, instance
from fake_instances import GUARD_S, FakeInstance

from coordinator.engines.sglang import SglangEngine

DONE = b"data: [DONE]\n\n"


def event(value):
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def token(text, finish=None):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def whole(text):
    return json.dumps({"object": "chat.completion", "choices": [{"message": {"content": text}}]}).encode()


class Room:
    """Where the two legs of one sequence meet."""

    def __init__(self):
        self.opened = set()
        self.decode_here = asyncio.Event()
        self.sent = asyncio.Event()


class Rooms:
    """All rooms; each is opened once by each side, and never again."""

    def __init__(self):
        self.rooms = {}

    def open(self, side, body, host, port):
        said = [body[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")]
        batch = isinstance(said[2], list)
        hosts, ports, ids = said if batch else [[value] for value in said]
        assert set(hosts) == {host}
        assert set(ports) == {port}
        assert len(hosts) == len(ports) == len(ids) == len(set(ids))
        opened = []
        for ident in ids:
            assert type(ident) is int
            assert 0 <= ident < 2**63
            room = self.rooms.setdefault(ident, Room())
            assert side not in room.opened, "a duplicate room crashes the engine"
            room.opened.add(side)
            opened.append(room)
        return opened


class Sglang(FakeInstance):
    """Either side; tests replace `answer` or `script`."""

    side = ""

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.asked = []  # GETs
        self.info = None  # what /get_server_info tells
        self.info_path = "/get_server_info"
        self.health = 200
        self.script = None
        self.arrived = asyncio.Event()

    async def _answer(self, call):
        if call.method == "GET":
            self.asked.append(call.target)
            if call.target == "/v1/models":
                call.reply(b'{"data":[{"id":"m"}]}')
            elif call.target == self.info_path and self.info is not None:
                call.reply(self.info)
            else:
                call.reply(b"", self.health if call.target == "/health" else 404)
            return
        self.calls.append(call)
        self.arrived.set()
        if self.script is not None:
            await self.script(call)
        else:
            await self.infer(call)

    @property
    def bodies(self):
        return [json.loads(call.body) for call in self.calls]

    def _enter(self, call):
        return self.world.rooms.open(self.side, json.loads(call.body), "127.0.0.1", self.world.port)


class Prefill(Sglang):
    """Prefill answers with one token once decode has come to every room."""

    side = "prefill"

    async def infer(self, call):
        rooms = self._enter(call)
        for room in rooms:
            await room.decode_here.wait()
        for room in rooms:
            room.sent.set()
        await self.answer(call)

    async def answer(self, call):
        if json.loads(call.body).get("stream"):
            call.open_stream()
            call.chunk(token("a", "length"))
            call.chunk(DONE)
            call.end()
        else:
            call.reply(whole("a"), 200, ("Content-Type", "application/json"))


class Decode(Sglang):
    """Decode answers once prefill has sent the KV of every room."""

    side = "decode"

    async def infer(self, call):
        for room in self.come(call):
            await room.sent.wait()
        await self.answer(call)

    def come(self, call):
        rooms = self._enter(call)
        for room in rooms:
            room.decode_here.set()
        return rooms

    async def answer(self, call):
        if json.loads(call.body).get("stream"):
            call.open_stream()
            for text, finish in (("a", None), ("b", None), ("c", "stop")):
                call.chunk(token(text, finish))
            call.chunk(DONE)
            call.end()
        else:
            call.reply(whole("abc"), 200, ("Content-Type", "application/json"))


class World:
    """One pair and an engine."""

    port = 8998

    def __init__(self):
        self.rooms = Rooms()
        self.prefill, self.decode = Prefill(self), Decode(self)
        self.context = context()
        self.client = self.context.client
        self.engine = SglangEngine(self.context)

    async def listen(self):
        await self.prefill.listen()
        await self.decode.listen()
        self.p0 = instance("p0", self.prefill.address, engine="sglang")
        self.d0 = instance("d0", self.decode.address, engine="sglang")
        return self

    async def aclose(self):
        await self.engine.aclose()
        await self.client.aclose()
        await self.prefill.aclose()
        await self.decode.aclose()

    def placed(self):
        return Placed(self.p0, self.d0)

    async def serve(self, asked, out=None, placement=None):
        """Serve a request; returns the sink."""
        out = out or Out(asked.api)
        async with asyncio.timeout(GUARD_S):
            await self.engine.serve(asked, placement or self.placed(), out)
        return out

    @property
    def in_use(self):
        return self.client.open_connections - self.client.idle_connections
