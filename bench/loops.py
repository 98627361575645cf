"""Fixed pieces of work: the micro-benchmarks time them, the regression check counts their instructions.

Each is built once, by `build` on an event loop, and may be run any number of times with the same effect, while that
loop is not running.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

import msgspec

from bench.whole import Guarded, Site, sglang_reply, vllm_reply
from coordinator.api.families import FAMILIES
from coordinator.core.instance import Address, Capacity, Instance, Role
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.engines.http_leg import StreamLeg
from coordinator.engines.mindie.boxes import Boxes
from coordinator.engines.mindie.envelope import FirstToken
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.policies import Policies, load_policy
from coordinator.relay import Relay
from coordinator.scheduler import Scheduler
from coordinator.security.keys import Key, new_hash, new_key, split_hash
from coordinator.server.date import DateLine
from coordinator.server.exchange import Exchange, Link
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader
from coordinator.transport.reader import ReplyReader
from coordinator.wire.mindie import ResultParser

STREAMS = 200
WIDTH = 16
REQUESTS = 100
MIB = 1 << 20
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
KEY = "pd-01234567-" + "k" * 43
LOGGED = Guarded()
PROMPT = "Why does it help to compute the prompt on one instance and the answer on another? " * 15


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of `run` does so many operations; `scope` stays open as long as the loop lives."""

    run: Callable[[], object]
    operations: int
    scope: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


# --- the yardstick of the yardsticks


class _Cell:
    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[bytes, int] = {}

    def take(self, piece: bytes) -> int:
        end = piece.find(b"\0", 3)
        key = piece[3:end]
        self.seen[key] = self.seen.get(key, 0) + 1
        self.count += 1
        return len(piece) - end


def calibration() -> Loop:
    """Python that has nothing to do with the coordinator: what the others are divided by."""
    pieces = [b"id:%d\0%b" % (number, b"x" * 150) for number in range(STREAMS)]

    def run() -> list[bytes]:
        cell = _Cell()
        return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if cell.take(piece) > 0]

    return Loop(run, STREAMS)


# --- the hot path of a token


def mindie_parser() -> Loop:
    """One decode step of a MindIE instance: a message for each of 200 streams, in one read."""
    step, parser = _decode_step(), ResultParser(MIB)
    return Loop(lambda: parser.feed(step), STREAMS)


def mindie_relay() -> Loop:
    """The same step all the way: parser, boxes, mailbox, relay, exchange, and a transport that does nothing."""
    metrics = Metrics([family.name for family in FAMILIES])
    decode = Instance(id="d0", role=Role.DECODE, address=Address("10.0.0.1", 5000), engine="mindie")
    boxes = Boxes(decode, logging.getLogger("bench"), on_late=lambda: None)
    scope = contextlib.ExitStack()
    for wire_id in _wire_ids():
        scope.enter_context(boxes.registered(wire_id, _open_stream(metrics)))
    step, parser = _decode_step(), ResultParser(MIB)
    now_s = 0.0

    def run() -> None:
        nonlocal now_s
        now_s += 0.01
        boxes.deliver(parser.feed(step), now_s)

    return Loop(run, STREAMS, scope)


def http_relay() -> Loop:
    """A token for each of 200 streams of an HTTP engine: reply parser, leg, relay, exchange."""
    metrics = Metrics([family.name for family in FAMILIES])
    readers = [_open_leg(metrics) for _ in range(STREAMS)]
    chunk = _chunk(EVENT)
    now_s = 0.0

    def run() -> None:
        nonlocal now_s
        now_s += 0.01
        for reader in readers:
            reader.feed(chunk, now_s)

    return Loop(run, STREAMS)


# --- what a request costs once


def request_head() -> Loop:
    """Read a request of a usual client."""
    body, limits = _chat_body(), ServerLimits()
    data = _head("/v1/chat/completions", len(body)) + body

    def run() -> None:
        RequestReader(limits).feed(data)

    return Loop(run, 1)


def parse(family: str, path: str, body: bytes) -> Loop:
    """Read a body as far as an API family needs it."""
    reads = next(one for one in FAMILIES if one.name == family).parse
    return Loop(lambda: reads(path, body), 1)


def schedule() -> Loop:
    """Place a request among 20 and 20 instances that serve 2000 others, and give everything back."""
    options: Mapping[str, object] = {}
    scheduler = Scheduler(
        Policies(load_policy("load_balance", options), load_policy("load_balance", options)), max_queue=0
    )
    scheduler.on_view(ClusterView(1, ready=tuple(_instances(20))))
    sizes = random.Random(7)
    for _ in range(2000):
        scheduler.try_place(_request(sizes.randrange(100, 100_000)))
    sample = [_request(sizes.randrange(100, 100_000)) for _ in range(100)]

    def run() -> None:
        for request in sample:
            lease = scheduler.try_place(request)
            assert lease is not None
            lease.prefilled(0.0)
            lease.decoding(0.0)
            lease.end()

    return Loop(run, len(sample))


def whole(engine: str, reply_of: Callable[[Role], bytes], guarded: Guarded = LOGGED) -> Loop:
    """Answer small requests from the client's bytes to the answer, two instances behind it."""
    body = _chat_body(stream=False)
    site = Site(engine, _head("/v1/chat/completions", len(body)) + body, reply_of, WIDTH, guarded)
    event_loop = asyncio.get_running_loop()
    return Loop(lambda: event_loop.run_until_complete(site.serve(REQUESTS)), REQUESTS)


# --- their parts


def _wire_ids() -> list[bytes]:
    return [b"%d" % (10**18 + number) for number in range(STREAMS)]


def _decode_step() -> bytes:
    return b"".join(_chunk(b"reqId:%b\0data:%b\0" % (wire_id, EVENT)) for wire_id in _wire_ids())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(path: str, length: int) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1", "host: 127.0.0.1:1025", "user-agent: bench/1", "accept: */*",
        "content-type: application/json", f"authorization: Bearer {KEY}", f"content-length: {length}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


def _keys() -> tuple[Key, ...]:
    """A hundred keys, the last one of them the clients'."""
    given = (*(new_key() for _ in range(99)), KEY)
    return tuple(
        Key(slot, f"team-{slot}", split_hash(new_hash(key))[1], requests_per_minute=1_000_000, max_in_flight=1000)
        for slot, key in enumerate(given)
    )


def _chat_body(*, stream: bool = True) -> bytes:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 128, "stream": stream})


class _Silent:
    """A connection of a client whose bytes go nowhere (server.exchange.Link, with its transport)."""

    peer = "127.0.0.1"
    draining = False

    def __init__(self) -> None:
        self.transport = self
        self.date = DateLine()

    def write(self, data: bytes) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def answered(self, *, reusable: bool) -> None:
        pass

    def torn(self) -> None:
        pass

    def reset(self) -> None:
        pass


class _Unwatched:
    """Moments of an attempt that nobody keeps (core.ports.Stages)."""

    def prefill_sent(self, wire_id: str) -> None:
        pass

    def prefilled(self, now_s: float, *, pinned: bool = True) -> None:
        pass

    def decoding(self, now_s: float) -> None:
        pass


def _open_relay(metrics: Metrics) -> Relay:
    reader = RequestReader(ServerLimits())
    reader.feed(_head("/v1/chat/completions", 2) + b"{}")
    exchange = Exchange(cast("Link", _Silent()), reader, reader.body, None)
    family = FAMILIES[0]
    record = RequestRecord("r", family.name, exchange.path)
    return Relay(exchange, family, metrics.for_api(family.name), record, limit_bytes=MIB, tell_route=False)


def _open_stream(metrics: Metrics) -> Mailbox:
    box = Mailbox("1", "d0", _open_relay(metrics), _Unwatched(), stream=True)
    box.prefilled(FirstToken(EVENT, last=False), 0.0)
    box.data(EVENT, 0.0)
    return box


def _open_leg(metrics: Metrics) -> ReplyReader:
    decode = Instance(id="d0", role=Role.DECODE, address=Address("10.0.0.1", 5000), engine="vllm")
    relay = _open_relay(metrics)
    reader = ReplyReader(StreamLeg(decode, _Unwatched(), relay), bodiless=False, max_head_bytes=32768)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    reader.feed(head + _chunk(EVENT), 0.0)
    reader.gatherer = relay
    return reader


def _instances(each: int) -> list[Instance]:
    return [
        Instance(
            id=f"{role}{number}",
            role=role,
            address=Address("10.0.0.1", port + number),
            engine="mindie",
            capacity=Capacity(max_requests=5000, total_blocks=1_000_000),
        )
        for role, port in ((Role.PREFILL, 1000), (Role.DECODE, 5000))
        for number in range(each)
    ]


def _request(prompt_bytes: int) -> Request:
    return Request(
        id="r",
        api="openai",
        path="/v1/chat/completions",
        query="",
        headers=(),
        body=b"",
        ask=Ask(stream=True, model="m", prompt_bytes=prompt_bytes),
        arrived_s=0.0,
        deadlines=Deadlines(scheduled_s=1e9, first_token_s=1e9, finished_s=1e9, inter_token_s=60),
    )


def _tgi_body() -> bytes:
    return msgspec.json.encode({"inputs": PROMPT, "parameters": {"max_new_tokens": 128}, "stream": True})


def _infer_body() -> bytes:
    return msgspec.json.encode({"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 128}})


LOOPS: Mapping[str, Callable[[], Loop]] = MappingProxyType(
    {
        "calibration": calibration,
        "mindie_parser": mindie_parser,
        "mindie_relay": mindie_relay,
        "http_relay": http_relay,
        "request_head": request_head,
        "parse_openai": lambda: parse("openai", "/v1/chat/completions", _chat_body()),
        "parse_tgi": lambda: parse("tgi", "/generate", _tgi_body()),
        "parse_vllm": lambda: parse("vllm", "/generate", msgspec.json.encode({"prompt": PROMPT, "max_tokens": 128})),
        "parse_triton": lambda: parse(
            "triton", "/v2/models/m/generate", msgspec.json.encode({"id": "1", "text_input": PROMPT})
        ),
        "parse_mindie": lambda: parse("mindie", "/infer", _infer_body()),
        "schedule": schedule,
        "whole_vllm": lambda: whole("vllm", vllm_reply),
        "whole_vllm_quiet": lambda: whole("vllm", vllm_reply, Guarded(log=None)),
        "whole_vllm_keys": lambda: whole("vllm", vllm_reply, Guarded(keys=_keys())),
        "whole_vllm_keys_json": lambda: whole("vllm", vllm_reply, Guarded("json", _keys())),
        "whole_sglang": lambda: whole("sglang", sglang_reply),
    }
)
"""By name, in the order in which they run; the first one is the measure of the others."""


def build(name: str, event_loop: asyncio.AbstractEventLoop) -> Loop:
    """Build a loop; the event loop must not be running, and must stay open for as long as the loop is run."""

    async def built() -> Loop:
        return LOOPS[name]()

    return event_loop.run_until_complete(built())
