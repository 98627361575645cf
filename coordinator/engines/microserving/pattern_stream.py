"""The answer of one engine for a pattern that reads it chunk by chunk."""

import asyncio
import re
from collections import deque
from collections.abc import Callable

from coordinator.core.errors import EngineFailed, RequestError
from coordinator.core.instance import Instance
from coordinator.core.request import Headers
from coordinator.engines.http_leg import check_whole, failed, refusal, reported, side_of
from coordinator.engines.microserving.leg import OK
from coordinator.engines.microserving.means import Means
from coordinator.engines.whole_answer import WholeAnswer
from coordinator.transport.errors import TransportError
from coordinator.transport.sink import ReplySink
from coordinator.transport.stream import Stream
from coordinator.wire.completion_stream import EventCutter, payload, split_events
from coordinator.wire.events import MAY_BE_ERROR, find_error
from coordinator.wire.microserving import plain_refusal

MAX_WAITING = 256
EVENT_STREAM = b"text/event-stream"
DONE = b"[DONE]"
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')


class Chunks(ReplySink):
    """An async iterator over the JSON of each chunk; the request goes out with the first one that is asked for.

    Args:
        means: whose client opens the connection.
        instance: whom to ask.
        path: where.
        headers: of the request.
        body: of the request.
        reached: told the status of the answer; None: nobody cares.

    Attributes:
        held: nothing is read from the engine for the time being.
    """

    def __init__(
        self,
        means: Means,
        instance: Instance,
        path: str,
        headers: Headers,
        body: bytes,
        reached: Callable[[int], None] | None,
    ) -> None:
        self._means = means
        self._instance = instance
        self._path = path
        self._headers = headers
        self._body = body
        self._reached = reached
        self._stream: Stream | None = None
        self._cutter = EventCutter()
        self._ready: deque[bytes] = deque()
        self._whole: WholeAnswer | None = None
        self._status = 0
        self._answer_headers: Headers = ()
        self._error: RequestError | None = None
        self._over = False
        self._ended = False
        self._paused = False
        self._held = False
        self._wake = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether the client is slow."""
        return self._held

    @held.setter
    def held(self, value: bool) -> None:
        self._held = value
        self._pace()

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> bytes:
        if self._stream is None and not self._over:
            await self._open()
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()  # the dispatcher watches the request's deadlines
        chunk = self._ready.popleft()
        self._pace()
        return chunk

    async def _open(self) -> None:
        try:
            self._stream = await self._means.client.open_stream(
                self._instance.address,
                b"POST",
                self._path,
                self._headers,
                self._body,
                sink=self,
                retry_stale=self._reached is None,
            )
        except TransportError as error:
            self._tell(500)  # nobody is there who would keep anything
            raise failed(self._instance, error) from error

    def close(self) -> None:
        """End the call. One that has not reached its engine yet is closed when it has."""
        self._over = True
        self._wake.set()
        stream = self._stream
        if stream is None:
            return
        if self._status == 0 and self._error is None:
            self._tell(OK)  # this very call frees what is reserved
            self._means.errands.part(stream)
        else:
            stream.close()

    # --- from the socket

    def head(self, status: int, headers: Headers) -> None:
        """Take the status and headers."""
        self._status, self._answer_headers = status, headers
        self._tell(status)
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status != OK or not kind.startswith(EVENT_STREAM):
            self._whole = WholeAnswer()
        if self._over and self._stream is not None:
            self._means.errands.close(self._stream)

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002
        """Take a part of the body."""
        if self._whole is not None:
            if not self._whole.add(data):
                self._fail(EngineFailed(side_of(self._instance), self._instance.id, "reply_too_large"))
            return
        try:
            events = self._cutter.feed(data)
        except ValueError as error:
            self._fail(EngineFailed(side_of(self._instance), self._instance.id, "reply_too_large", detail=str(error)))
            return
        self._take(events)

    def _take(self, events: bytes) -> None:
        if MAY_BE_ERROR in events:
            told = find_error(events)
            if told is not None:
                self._fail(reported(self._instance, told))
                return
        for event in split_events(events):
            body = payload(event)
            if body is not None:
                self._ready.append(body)
                self._ended = self._ended or _FINISHED.search(body) is not None
            elif DONE in event:
                self._ended = True
        self._pace()
        self._wake.set()

    def end(self, now_s: float) -> None:  # noqa: ARG002
        """The body ended by its own framing."""
        if self._whole is not None:
            self._answer(self._whole.body)
        else:
            self._take(self._cutter.rest())
            if not self._ended:
                self._fail(EngineFailed(side_of(self._instance), self._instance.id, "ended_early"))
        self._over = True
        self._wake.set()

    def _answer(self, body: bytes) -> None:
        if self._status != OK:
            self._fail(refusal(self._instance, self._status, self._answer_headers, plain_refusal(body)))
            return
        try:
            check_whole(self._instance, body)
        except RequestError as error:
            self._fail(error)
            return
        self._ready.append(body)

    def lost(self, error: TransportError) -> None:
        """The connection broke."""
        self._tell(500)
        self._fail(failed(self._instance, error))

    # --- inside

    def _tell(self, status: int) -> None:
        if self._reached is not None:
            self._reached(status)

    def _fail(self, error: RequestError) -> None:
        if self._error is None:
            self._error = error
        self._wake.set()

    def _pace(self) -> None:
        """Let the engine wait while the pattern, or the client behind it, is slow."""
        stream = self._stream
        if stream is None or self._over:
            return
        wanted = self._held or len(self._ready) >= MAX_WAITING
        if wanted != self._paused:
            self._paused = wanted
            (stream.pause if wanted else stream.resume)()
