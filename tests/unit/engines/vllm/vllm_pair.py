"""A vLLM prefill and decode instance on loopback, strict about the protocol, and what a request needs around them."""

import asyncio
import contextlib
import json
import logging
import math
import time

from held_ports import HeldPorts

from coordinator.api.families import FAMILIES
from coordinator.core.ids import WireIds
from coordinator.core.instance import Address, Instance, Role
from coordinator.core.out import Out
from coordinator.core.request import Deadlines, Request
from coordinator.engines.context import EngineContext
from coordinator.engines.vllm import VllmEngine
from coordinator.observability.metrics import Metrics
from coordinator.transport.client import HttpClient

GUARD_S = 20.0
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"


class Server:
    """One HTTP server; `answer` deals with a request and may be replaced."""

    role = Role.PREFILL

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.seen = []
        self.writers = set()
        self.aborted = 0
        self.health = 200

    async def listen(self, port=0):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def close(self):
        """Refuse connections from here on; nobody else gets the port before `World.aclose`."""
        if self.server.is_serving():
            self.server.close()
            self.world.ports.take(self.port)
        for writer in tuple(self.writers):
            writer.transport.abort()

    def instance(self, **options):
        address = Address("127.0.0.1", self.port)
        return Instance(self.name, self.role, address, "vllm", group=self.world.group, options=options)

    @property
    def bodies(self):
        return [body for _, body in self.seen]

    async def _serve(self, reader, writer):
        self.writers.add(writer)
        leaving = Leaving(reader, self)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines[1:-2])
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if lines[0].startswith("GET"):
                    await self._information(lines[0].split()[1], writer)
                    continue
                self.seen.append((headers, json.loads(raw)))
                self.world.changed.set()
                leaving.work = asyncio.create_task(self.answer(headers, json.loads(raw), writer))
                with contextlib.suppress(asyncio.CancelledError):
                    await leaving.work
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()
            self.world.changed.set()

    async def _information(self, path, writer):
        if path == "/health":
            await reply(writer, {}, self.health)
        else:
            self.world.model_calls += 1
            await reply(writer, {"data": [{"id": "the-model"}]}, self.world.models_status)


class Leaving:
    """Stops the work on a request when its client closes the connection, as engines do."""

    def __init__(self, reader, server):
        self.server = server
        self.work = None
        self.feed_eof = reader.feed_eof
        self.set_exception = reader.set_exception
        reader.feed_eof = self.ended
        reader.set_exception = self.broke

    def ended(self):
        self.feed_eof()
        self.stop()

    def broke(self, error):
        self.set_exception(error)
        self.stop()

    def stop(self):
        if self.work is not None and not self.work.done():
            self.server.aborted += 1
            self.work.cancel()
        self.server.world.changed.set()


class Prefill(Server):
    """Validates the clamp, keeps a record's KV until it is fetched."""

    def __init__(self, world, name="p0"):
        super().__init__(world, name)
        self.gate = asyncio.Event()
        self.gate.set()
        self.extra = {}
        self.records = True
        self.finish = "length"

    async def answer(self, headers, body, writer):
        await self.gate.wait()
        problem = clamp_problem(body)
        if problem:
            await reply(writer, {"error": {"message": problem}}, 400)
            return
        record = None
        if self.records:
            record = {"remote_block_ids": [[len(self.seen)]], "remote_request_id": headers["x-request-id"], "s": 2**62}
            self.world.pin(headers["x-request-id"], record, writer)
        choice = {"index": 0, "text": "A", "finish_reason": self.finish}
        await reply(writer, {"choices": [choice], "kv_transfer_params": record, **self.extra})


class Decode(Server):
    """Takes a record once only, under the id that prefill knows.

    Closed, `door` keeps a request from being looked at, and `gate` from being answered.
    """

    role = Role.DECODE

    def __init__(self, world, name="d0"):
        super().__init__(world, name)
        self.door = asyncio.Event()
        self.door.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.status = 200
        self.events = None
        self.extra = {}
        self.cut = False

    async def answer(self, headers, body, writer):
        await self.door.wait()
        if self.status == 200:
            problem = self.world.fetch(headers["x-request-id"], body.get("kv_transfer_params"))
            if problem:
                await reply(writer, {"error": {"message": problem}}, 400)
                return
        stream = body.get("stream") and self.status == 200
        if stream:  # engines open a stream before they have anything to say
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.gate.wait()
        if self.status != 200:
            await reply(writer, {"error": {"message": f"says {self.status}"}}, self.status)
        elif stream:
            await self._stream(body, writer)
        else:
            count = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
            choices = [{"index": i, "text": f"A{body.get('prompt')}"} for i in range(count)]
            usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
            await reply(writer, {"choices": choices, "usage": usage, **self.extra})

    async def _stream(self, body, writer):
        for event in token_events(body) if self.events is None else self.events:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        if self.cut:
            writer.transport.abort()
        else:
            writer.write(b"0\r\n\r\n")


def token_events(body):
    yield event({"role": "assistant", "content": ""})
    yield event({"content": "A"})
    yield event({"content": "B"}, "length")
    if (body.get("stream_options") or {}).get("include_usage"):
        details = {"cached_tokens": 9}
        yield sse({"choices": [], "usage": {"prompt_tokens": 10, "prompt_tokens_details": details}})
    yield DONE


def event(delta, finish=None):
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def sse(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def clamp_problem(body):
    if body.get("stream"):
        return "prefill is asked for a stream"
    if "stream_options" in body:
        return "stream_options without stream"
    limits = [body[k] for k in ("max_tokens", "max_completion_tokens", "max_output_tokens") if body.get(k) is not None]
    if not limits or set(limits) != {1}:
        return f"limits {limits}"
    if (body.get("min_tokens") or 0) > 1:
        return "min_tokens above the limit"
    if body.get("kv_transfer_params") != HOLD:
        return f"odd kv_transfer_params {body.get('kv_transfer_params')}"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "one record for several prompts"
    return "one record for several sequences" if (body.get("n") or 1) > 1 else ""


async def reply(writer, value, status=200, extra=b""):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
    writer.write(head % (status, len(raw), extra) + raw)
    await writer.drain()


class Placement:
    """Where an attempt runs, and the order of its moments."""

    def __init__(self, prefill, decode):
        self.prefill = prefill
        self.decode = decode
        self.moments = []
        self.wire_ids = []

    def prefill_sent(self, wire_id):
        self.wire_ids.append(wire_id)
        self.moments.append("sent")

    def skip_prefill(self):
        self.moments.append("skipped")

    def prefilled(self, now_s, *, pinned=True):
        if "prefilled" not in self.moments and "skipped" not in self.moments:
            self.moments.append("prefilled")

    def decoding(self, now_s):
        if "decoding" not in self.moments:
            self.moments.append("decoding")


class Sink(Out):
    """An Out that writes everything down, with the rules of one API family."""

    def __init__(self, api="openai"):
        self.family = next(f for f in FAMILIES if f.name == api)
        self.pieces = []
        self.tokens = []
        self.answer = None
        self.ended = False
        self.pacing = []

    @property
    def started(self):
        return bool(self.pieces) or self.answer is not None

    @property
    def text(self):
        return b"".join(self.pieces)

    def piece(self, data, now_s, *, token=True):
        assert not self.ended
        self.pieces.append(data)
        self.tokens.append(token)

    def finish(self, data, now_s, *, token=True, after=b""):
        assert not self.ended
        end = self.family.ends_with
        if end and not (after + data).rstrip().endswith(end.strip()):
            data += end
        self.pieces.append(data)
        self.ended = True

    def only_opens(self, data):
        return self.family.only_opens(data)

    def ends(self, data):
        return self.family.ends(data)

    def paced_by(self, pause, resume):
        self.pacing.append((pause, resume))

    def hold(self):
        pass

    def flush(self):
        pass

    def whole(self, body, now_s, content_type=b"application/json"):
        assert not self.started
        self.answer = body
        self.ended = True


class Watcher:
    def __init__(self):
        self.links = []

    def linked(self):
        self.links.append("up")

    def unlinked(self, reason):
        self.links.append(reason)


class World:
    """A prefill and two decode instances, the engine under test, and the KV between them."""

    group = None

    def __init__(self):
        self.changed = asyncio.Event()
        self.ports = HeldPorts()
        self.pinned = {}
        self.fetched = []
        self.model_calls = 0
        self.models_status = 200
        self.p = Prefill(self)
        self.d = Decode(self)
        self.d1 = Decode(self, "d1")

    async def start(self):
        for server in (self.p, self.d, self.d1):
            await server.listen()
        self.metrics = Metrics([family.name for family in FAMILIES])
        self.client = HttpClient(connect_s=GUARD_S)
        self.log = logging.getLogger("test.vllm")
        self.engine = VllmEngine(EngineContext(self.client, WireIds(), self.metrics, self.log))
        self.engine._releases._pauses_s = (0.0, 0.0, 0.0)
        self.engine._farewells.linger_s = 0.02
        self.engine._farewells.patience_s = 0.02
        self.prefill, self.decode, self.other = (s.instance() for s in (self.p, self.d, self.d1))
        self.watcher = Watcher()
        for instance in (self.prefill, self.decode):
            self.engine.attach(instance, self.watcher)
        return self

    async def aclose(self):
        await self.engine.aclose()
        await self.client.aclose()
        for server in (self.p, self.d, self.d1):
            server.close()
        self.ports.close()
        await self.until(lambda: not (self.p.writers or self.d.writers or self.d1.writers))

    # --- KV

    def pin(self, rid, record, writer):
        assert rid not in self.pinned, "the id was used before"
        self.pinned[rid] = (record, writer)

    def fetch(self, rid, record):
        if record is None:
            return ""
        held, _ = self.pinned.pop(rid, (None, None))
        self.changed.set()
        if held != record:
            return f"no KV under {rid} for {record}"
        self.fetched.append(rid)
        return ""

    @property
    def orphans(self):
        """KV that is pinned although the coordinator has read prefill's answer to its end.

        Where it has left before, it has closed the connection; then the answer and its leaving have crossed.
        """
        return [rid for rid, (_, writer) in self.pinned.items() if writer in self.p.writers]

    # --- requests

    def request(self, path=CHAT, *, api="openai", stream=False, headers=(), raw=None, **body):
        if path == CHAT and "messages" not in body:
            body["messages"] = [{"role": "user", "content": "hi"}]
        if stream:
            body["stream"] = True
        raw = json.dumps(body).encode() if raw is None else raw
        family = next(f for f in FAMILIES if f.name == api)
        now_s = time.monotonic()
        never = Deadlines(math.inf, math.inf, math.inf, math.inf)
        return Request("r", api, path, "", tuple(headers), raw, family.parse(path, raw), now_s, never)

    async def serve(self, request, *, placement=None):
        placement = placement or Placement(self.prefill, self.decode)
        sink = Sink(request.api)
        async with asyncio.timeout(GUARD_S):
            await self.engine.serve(request, placement, sink)
        return sink, placement

    async def until(self, condition):
        async with asyncio.timeout(GUARD_S):
            while not condition():
                self.changed.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self.changed.wait()
                except TimeoutError:
                    pass

    async def settled(self):
        """Every release that is due is over."""
        await self.until(lambda: not self.engine.pinned())

    def count(self, metric, *labels):
        return getattr(self.metrics, metric).labels(*labels).value
