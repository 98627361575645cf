"""What engine protocols over HTTP share: reading refusals, and relaying one instance's ordinary answer as it comes."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import Stages
from coordinator.core.request import Headers, Request
from coordinator.engines.whole_answer import MAX_BYTES, WholeAnswer, error_in
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.request import GivenHeaders
from coordinator.transport.sink import ReplySink
from coordinator.transport.stream import Stream
from coordinator.wire.events import MAY_BE_ERROR, ErrorEvent, find_error, is_whole
from coordinator.wire.refusal import message_of

MAX_RETRY_AFTER_S = 120
MAX_ERROR_BYTES = 65536
TAIL_BYTES: Final = 1024  # the last events of a stream fit in here
SMALL_BYTES: Final = 128  # pieces below this are joined, so that two of those kept make a tail
COLON: Final = 0x3A  # begins a comment line of an event stream
EVENT_STREAM = b"text/event-stream"
DONE_EVENT: Final = b"data: [DONE]\n\n"
NEXT_EVENT = b"\n\n"


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


def check_whole(instance: Instance, body: bytes) -> None:
    """Raise for a 200 whose JSON is empty, cut short or an error: no client may take it for an answer."""
    try:
        error = error_in(body)
    except ValueError as problem:
        raise EngineFailed(side_of(instance), instance.id, "bad_reply", detail=str(problem)) from problem
    if error is not None:
        raise reported(instance, error)


def reported(instance: Instance, error: ErrorEvent) -> RequestError:
    """What an engine tells behind a 200, before anything was sent: a refusal where it says 4xx, else its failure."""
    if 400 <= error.code < 500:
        return EngineRefused(error.code, error.message or message_of(b"", error.code))
    failure = EngineFailed(side_of(instance), instance.id, "engine_error", detail=error.message[:300])
    if error.message:
        failure.message = f"the {failure.side} instance failed: {error.message}"
    return failure


async def run_stream(
    client: HttpClient,
    request: Request,
    headers: GivenHeaders,
    leg: "StreamLeg",
    part: Callable[[Stream], None] = Stream.close,
) -> None:
    """Send a request, with these headers, to the leg's instance and let the answer run through the leg to its end.

    Cancellation closes the connection, which ends the request at the engine; `part` is who closes it, at once or soon.

    Raises:
        RequestError: from the leg.
        TransportError: no connection could be made.
    """
    stream = await client.open_stream(leg.instance.address, b"POST", request.target, headers, request.body, sink=leg)
    try:
        leg.started_by(stream)
        await leg.done
    except RequestError:
        leg.let_go()
        raise
    finally:
        part(stream)


class StreamLeg(ReplySink):
    """The sink of one instance's streamed answer: bytes go from the socket's callback straight to the client.

    An error event of the engine is not passed on: the request fails with what it says, and the client is told once.

    Args:
        untyped: the stream is no event stream and has no content type.

    Attributes:
        instance: whose answer it is.
        decoding: whether a token, or a whole answer, has come.
        done: resolves with the end of the answer, or fails with a RequestError.
        sent_s: when the request went out (monotonic).
        status: of the answer, as soon as its head is there; else 0.
    """

    def __init__(self, instance: Instance, stages: Stages, out: Out, *, untyped: bool = False) -> None:
        self.instance = instance
        self.decoding = False
        self.sent_s = 0.0
        self.status = 0
        self._stages = stages
        self._out = out
        self._untyped = untyped
        self._flowing = False
        self._refused: list[bytes] | None = None
        self._refused_bytes = 0
        self._headers: Headers = ()
        self._whole: WholeAnswer | None = None
        self._before = b""
        self._tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def left(self) -> bool:
        """Whether the request went out and its caller left before the answer's end or failure."""
        return self.done.cancelled()

    def let_go(self) -> None:
        """Forget the failure once its waiter has it: its traceback knows who holds this leg, which is a cycle."""
        self.done = asyncio.get_running_loop().create_future()
        self.done.set_result(None)

    def started_by(self, stream: Stream) -> None:
        """Learn the stream, to slow it down when the client is slow, and to pass on at once what it reads at once."""
        self.sent_s = time.monotonic()
        stream.gather_in(self._out)
        self._out.paced_by(stream.pause, stream.resume)

    def head(self, status: int, headers: Headers) -> None:
        """Take the status and headers."""
        self.status, self._headers = status, headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status != 200:
            self._refused = []
        elif not (kind.startswith(EVENT_STREAM) or self._untyped):
            self._whole = WholeAnswer()

    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes; hot."""
        if not self._flowing or data.partition(MAY_BE_ERROR)[1]:  # in less time than `find` or `in`
            self._odd(data, now_s)
            return
        if len(data) < SMALL_BYTES:
            self._tail += data
            if len(self._tail) > TAIL_BYTES:
                self._before, self._tail = self._tail, b""
        else:
            self._before, self._tail = self._tail, data
        if data[0] != COLON and data != DONE_EVENT:
            self._out.piece(data, now_s)
        else:
            self._out.piece(data, now_s, token=False)

    def _odd(self, data: bytes, now_s: float) -> None:
        """Take bytes that come before the first token, that may hold an error, or that are no stream."""
        if self.done.done():
            return
        if self._refused is not None:
            self._refused_bytes += len(data)
            if self._refused_bytes <= MAX_ERROR_BYTES:
                self._refused.append(data)
            else:
                self._fail(refusal(self.instance, self.status, self._headers, b"".join(self._refused)))
        elif self._whole is not None:
            if not self._whole.add(data):
                too_long = f"answer above {MAX_BYTES} bytes"
                self._fail(EngineFailed(side_of(self.instance), self.instance.id, "reply_too_large", detail=too_long))
        else:
            error = None if self._untyped else find_error(data)
            sound = data if error is None else data[: error.at]
            if sound:
                self._pass(sound, now_s)
            if error is not None:
                self._fail(self._reported(error))

    def _pass(self, data: bytes, now_s: float) -> None:
        token = self._flowing or not (data == DONE_EVENT or self._out.only_opens(data))
        if token and not self._flowing:
            self._flowing = True
            self._decodes(now_s)
        self._before, self._tail = self._before[-TAIL_BYTES:] + self._tail, data
        self._out.piece(data, now_s, token=token)

    def _decodes(self, now_s: float) -> None:
        self.decoding = True
        self._stages.prefilled(now_s)
        self._stages.decoding(now_s)

    def _reported(self, error: ErrorEvent) -> RequestError:
        """The engine's error event as an error of the request; a status is of no use to a client that has a part."""
        return reported(self.instance, replace(error, code=0) if self._out.started else error)

    def end(self, now_s: float) -> None:
        """The body ended by its own framing."""
        if self.done.done():
            return
        if self._refused is not None:
            self._fail(refusal(self.instance, self.status, self._headers, b"".join(self._refused)))
        elif self._whole is not None:
            self._answer_whole(now_s)
        else:
            self._end_stream(now_s)

    def _end_stream(self, now_s: float) -> None:
        tail = (self._before + self._tail)[-TAIL_BYTES:]
        error = None if self._untyped or MAY_BE_ERROR not in tail else find_error(tail)
        if error is not None:  # its event came in parts and has passed
            self._fail(self._reported(error))
        elif not (self._flowing and self._out.ends(tail)):
            self._fail(EngineFailed(side_of(self.instance), self.instance.id, "ended_early"))
        else:
            self._out.finish(b"", now_s, token=False, after=tail)
            self._resolve()

    def _answer_whole(self, now_s: float) -> None:
        """The engine answered a streaming request with one JSON document."""
        assert self._whole is not None
        body = self._whole.body
        try:
            check_whole(self.instance, body)
        except RequestError as error:
            self._fail(error)
            return
        self._decodes(now_s)
        self._out.whole(body, now_s)
        self._resolve()

    def lost(self, error: TransportError) -> None:
        """The connection broke before the body ended."""
        self._fail(failed(self.instance, error))

    def _fail(self, error: RequestError) -> None:
        if self.done.done():
            return
        last = self._tail or self._before
        if last and not self._untyped and not is_whole(last) and self._out.started:
            # an event that broke off must not swallow the error event that follows it
            self._out.piece(NEXT_EVENT, 0.0, token=False)
        self._flowing = False
        self.done.set_exception(error)

    def _resolve(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
