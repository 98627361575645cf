"""What engine protocols over HTTP share: reading refusals, and relaying one instance's ordinary answer as it comes."""

import asyncio
import time

import msgspec

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Instance, Role
from coordinator.core.ports import COMPLETED, Completed, Out, Stages
from coordinator.core.request import Headers, Request
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.stream import Stream
from coordinator.wire.refusal import message_of

MAX_RETRY_AFTER_S = 120
MAX_ERROR_BYTES = 65536
TAIL_BYTES = 1024  # the last events of a stream fit in here
COLON = 0x3A  # begins a comment line of an event stream
EVENT_STREAM = b"text/event-stream"


def side_of(instance: Instance) -> Side:
    """The side to name when this instance is guilty."""
    return Side.PREFILL if instance.role is Role.PREFILL else Side.DECODE


def failed(instance: Instance, error: TransportError) -> EngineFailed:
    """An instance's transport failure as an error of the request."""
    return EngineFailed(side_of(instance), instance.id, error.reason, detail=error.detail, connecting=error.connecting)


def refusal(instance: Instance, status: int, headers: Headers, body: bytes) -> RequestError:
    """An error answer: 4xx is the client's, with the engine's message; anything else is the instance's failure."""
    message = message_of(body, status)
    if 400 <= status < 500:
        return EngineRefused(status, message, retry_after_s=_retry_after_s(headers))
    detail = f"status {status}: {message[:200]}"
    return EngineFailed(side_of(instance), instance.id, "http_5xx" if status >= 500 else "bad_reply", detail=detail)


def _retry_after_s(headers: Headers) -> int | None:
    value = next((v for name, v in headers if name == b"retry-after"), b"")
    return min(int(value), MAX_RETRY_AFTER_S) if value.isdigit() else None


async def relay_plain(
    client: HttpClient, request: Request, headers: Headers, instance: Instance, stages: Stages, out: Out
) -> Completed:
    """Send the client's own request to one instance and its answer back as it comes, byte for byte.

    Raises:
        RequestError: refusals, failures, and an answer that is not whole.
    """
    try:
        if request.ask.stream:
            await _relay_stream(client, request, headers, instance, stages, out)
        else:
            await _relay_whole(client, request, headers, instance, stages, out)
    except TransportError as error:
        raise failed(instance, error) from error
    return COMPLETED


async def _relay_whole(
    client: HttpClient, request: Request, headers: Headers, instance: Instance, stages: Stages, out: Out
) -> None:
    reply = await client.fetch(
        instance.address, b"POST", request.target, headers, request.body, deadline_s=request.deadlines.finished_s
    )
    now_s = time.monotonic()
    if reply.status != 200:
        raise refusal(instance, reply.status, reply.headers, reply.body)
    check_whole(instance, reply)
    stages.prefilled(now_s)
    stages.decoding(now_s)
    out.whole(reply.body, now_s, reply.header(b"content-type") or b"application/json")


def check_whole(instance: Instance, reply: Reply) -> None:
    """Raise EngineFailed for a 200 whose JSON is empty or cut short: no client may take it for an answer."""
    try:
        msgspec.json.decode(reply.body, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineFailed(side_of(instance), instance.id, "bad_reply", detail="answer is no JSON") from error


async def _relay_stream(
    client: HttpClient, request: Request, headers: Headers, instance: Instance, stages: Stages, out: Out
) -> None:
    leg = StreamLeg(instance, stages, out)
    stream = await client.open_stream(instance.address, b"POST", request.target, headers, request.body, sink=leg)
    try:
        leg.started_by(stream)
        await leg.done
    finally:
        stream.close()


class StreamLeg:
    """The sink of one instance's streamed answer: bytes go from the socket's callback straight to the client."""

    def __init__(self, instance: Instance, stages: Stages, out: Out) -> None:
        self._instance = instance
        self._stages = stages
        self._out = out
        self._stream: Stream | None = None
        self._flowing = False
        self._refused: list[bytes] | None = None
        self._refused_bytes = 0
        self._status = 0
        self._headers: Headers = ()
        self._whole: list[bytes] | None = None
        self._tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def started_by(self, stream: Stream) -> None:
        """Learn the stream, to slow it down when the client is slow."""
        self._stream = stream
        self._out.paced_by(stream.pause, stream.resume)

    def head(self, status: int, headers: Headers) -> None:
        """Take the status and headers."""
        self._status, self._headers = status, headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status != 200:
            self._refused = []
        elif not kind.startswith(EVENT_STREAM):
            self._whole = []

    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes; hot."""
        if self._flowing:
            self._tail = data if len(data) >= TAIL_BYTES else self._tail[-TAIL_BYTES:] + data
            self._out.piece(data, now_s, token=data[0] != COLON)
            return
        self._first(data, now_s)

    def _first(self, data: bytes, now_s: float) -> None:
        if self._refused is not None:
            self._refused_bytes += len(data)
            if self._refused_bytes <= MAX_ERROR_BYTES:
                self._refused.append(data)
            else:
                self._fail(refusal(self._instance, self._status, self._headers, b"".join(self._refused)))
        elif self._whole is not None:
            self._whole.append(data)
        else:
            opening = self._out.only_opens(data)
            if not opening:
                self._flowing = True
                self._stages.prefilled(now_s)
                self._stages.decoding(now_s)
            self._tail = self._tail[-TAIL_BYTES:] + data
            self._out.piece(data, now_s, token=not opening)

    def end(self, now_s: float) -> None:
        """The body ended by its own framing."""
        if self._refused is not None:
            self._fail(refusal(self._instance, self._status, self._headers, b"".join(self._refused)))
        elif self._whole is not None:
            self._answer_whole(now_s)
        elif not self._out.ends(self._tail):
            self._fail(EngineFailed(side_of(self._instance), self._instance.id, "ended_early"))
        else:
            self._out.finish(b"", now_s, token=False, after=self._tail)
            self._resolve()

    def _answer_whole(self, now_s: float) -> None:
        """The engine answered a streaming request with one JSON document."""
        body = b"".join(self._whole or ())
        try:
            check_whole(self._instance, Reply(self._status, self._headers, body))
        except EngineFailed as error:
            self._fail(error)
            return
        self._stages.prefilled(now_s)
        self._stages.decoding(now_s)
        self._out.whole(body, now_s)
        self._resolve()

    def lost(self, error: TransportError) -> None:
        """The connection broke before the body ended."""
        self._fail(failed(self._instance, error))

    def _fail(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _resolve(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
