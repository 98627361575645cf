"""One connection of a client: requests in order, one handler task at a time."""

import asyncio
import math
from functools import partial
from typing import cast

from coordinator.core.errors import RequestError
from coordinator.server.aftermath import conclude, reset
from coordinator.server.body import Expansion
from coordinator.server.exchange import Exchange
from coordinator.server.last_request import LastRequest
from coordinator.server.reader import RequestReader
from coordinator.server.shared import Shared

_HIGH_WATER_BYTES = _MAX_AHEAD_BYTES = _MUCH_BYTES = 65536
_LOW_WATER_BYTES = 16384
_LINGER_S, _FLUSH_S = 2.0, 10.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# What a connection does with bytes that come in: read a request, keep them for the time after the running request,
# or drop them: the rest of a refused request, or what comes after our FIN.
_READING, _BUSY, _DEAF, _LINGERING, _CLOSING = range(5)


class ClientConnection(asyncio.Protocol):
    """The protocol of one accepted connection.

    A request gets its own task. When the client leaves (a reset, or a FIN: a half-closed connection counts as left),
    the task is cancelled, unless its answer is complete already. The next request starts when the answer is complete,
    even if the task is still at work.

    Attributes:
        deadline_s: monotonic time from which on the owner calls `expire`.
    """

    __slots__ = (
        "_congested", "_deaf_bytes_left", "_exchange", "_expansion", "_kept", "_last", "_paused", "_reader", "_shared",
        "_state", "_task", "_unsent", "date", "deadline_s", "peer", "transport",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, shared: Shared) -> None:
        self.peer = ""
        self.deadline_s = math.inf
        self._shared = shared
        self.date = shared.date
        self._state = _READING
        self._reader: RequestReader | None = None
        self._last = LastRequest()
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._expansion: Expansion | None = None
        self._paused = self._congested = False
        self._deaf_bytes_left = shared.limits.max_body_bytes
        self._kept, self._unsent = b"", 0

    # --- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = stream = cast("asyncio.Transport", transport)  # uvloop's is one by shape, not by descent
        stream.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=_LOW_WATER_BYTES)
        address = stream.get_extra_info("peername")
        self.peer = str(address[0]).removeprefix("::ffff:") if address else ""
        self.deadline_s = self._shared.clock() + self._shared.limits.idle_s
        self._shared.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._state == _READING:
            self._read(data)
        elif self._state == _BUSY:
            self._keep(data)
        else:
            self._drop(data)

    def eof_received(self) -> bool:
        """Called by the loop; the transport flushes and closes unless the answer is worth nothing any more."""
        if self._exchange is not None or self._expansion is not None:
            self._leave()
            self.transport.abort()
        else:
            self._close_state()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by the loop."""
        self._leave()
        self._state = _CLOSING
        self.deadline_s = math.inf
        self._shared.connections.discard(self)
        self._shared.freed()

    def pause_writing(self) -> None:
        """Called by the transport above the high mark."""
        self._congested = True
        if self._exchange is not None:
            self._exchange.congested = True

    def resume_writing(self) -> None:
        """Called by the transport below the low mark."""
        self._congested = False
        exchange = self._exchange
        if exchange is not None:
            exchange.congested = False
            if exchange.on_writable is not None:
                exchange.on_writable()
        elif self._state == _BUSY and self._expansion is None:
            self._next()

    # --- reading

    def _read(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            known = self._last.again(data, self._shared)
            if known is not None:
                self._read_whole(known, b"")
                return
            data = data.lstrip(b"\r\n")  # RFC 9112 §2.2: empty lines before a request line are ignored
            if not data:
                return
            reader = self._reader = RequestReader(self._shared.limits, self._shared.gate)
            self.deadline_s = self._shared.clock() + self._shared.limits.head_s
        rest = reader.feed(data)
        if not reader.has_head:
            return
        now_s = self._shared.clock()
        reader.arrived_s = reader.arrived_s or now_s
        if not reader.complete:
            self.deadline_s = reader.due_s(now_s, len(data))
            if reader.wants_continue:
                reader.wants_continue = False
                self.transport.write(_CONTINUE)
            if len(data) >= _MUCH_BYTES or reader.behind:
                self._rest()
            return
        self._read_whole(reader, rest)

    def _read_whole(self, request: RequestReader, rest: bytes) -> None:
        self._reader = None
        self.deadline_s = math.inf
        self._state = _DEAF if request.unread else _BUSY
        if rest:
            self._keep(rest)
        if (request.coding is not None or request.pieces is not None) and request.refusal is None:
            limit_bytes = self._shared.limits.max_body_bytes
            self._expansion = Expansion(request.coding, request.take(), limit_bytes, partial(self._begin, request))
            self._expansion.begin(self._shared.executor)
            return
        body, request.body = request.body, b""
        if request.plain_head and request is not self._last.what:
            self._last.keep(request)
        self._begin(request, body, request.refusal)

    def _keep(self, data: bytes) -> None:
        """Keep what belongs to later requests; beyond a bound, TCP holds it back."""
        self._kept += data
        if len(self._kept) > _MAX_AHEAD_BYTES:
            self._pause_reading()

    def _drop(self, data: bytes) -> None:
        self._deaf_bytes_left -= len(data)
        if self._deaf_bytes_left < 0:
            self._pause_reading()

    def _pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _rest(self) -> None:
        """Leave the rest of a body to the loop's next turn: it would read up to 8 MB of it in this one."""
        self._pause_reading()
        self._shared.running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self.transport.is_closing():
            return
        if (reader := self._reader) is not None and reader.behind:
            self._read(b"")
            if self._reader is reader and reader.behind:
                return
        if len(self._kept) <= _MAX_AHEAD_BYTES and self._deaf_bytes_left >= 0:
            self._resume_reading()

    def _next(self) -> None:
        """The answer is complete and on its way: read the next request."""
        self._state = _READING
        self._resume_reading()
        if self._kept:
            kept, self._kept = self._kept, b""
            self._read(kept)

    # --- handling

    def _begin(self, request: RequestReader, body: bytes, refusal: RequestError | None) -> None:
        self._expansion = None
        shared = self._shared
        exchange = self._exchange = Exchange(self, request, body, refusal)
        exchange.congested = self._congested
        self._task = task = shared.running_loop().create_task(shared.handler(exchange), name="client request")
        shared.tasks.add(task)
        task.add_done_callback(partial(conclude, shared, exchange))

    def _leave(self) -> None:
        """The client has left: nobody waits for the running request any more."""
        exchange, self._exchange = self._exchange, None
        task, self._task = self._task, None
        if exchange is not None:
            exchange.left()
        if task is not None:
            task.cancel()
        if self._expansion is not None:
            self._expansion.cancel()
            self._expansion = None

    # --- called by the exchange

    @property
    def draining(self) -> bool:
        """Whether the connection shall close after this answer."""
        return self._shared.draining

    def answered(self, *, reusable: bool) -> None:
        """The answer is complete: read the next request, or close."""
        self._exchange = self._task = None
        if not reusable:
            if self._state == _DEAF or self._kept:
                self._linger()
            else:
                self.close()
            return
        self.deadline_s = self._shared.clock() + self._shared.limits.idle_s
        if not self._congested:
            self._next()

    def torn(self) -> None:
        """The answer is broken off: end it by a FIN."""
        self._exchange = self._task = None
        self._linger()

    def reset(self) -> None:
        """Close by a TCP reset, so that the kernel drops what the client did not take, too."""
        self._exchange = self._task = None
        self._close_state()
        reset(self.transport)

    # --- ending

    def _linger(self) -> None:
        """Send FIN, and go on taking what the client sends: closing on unread data would be a reset.

        A reset may destroy the answer before the client has read it (RFC 9112 §9.6).
        """
        if self._shared.encrypted or self.transport.is_closing():
            self.close()  # TLS goes on reading until the client's end of it, for a while
            return
        self._state = _LINGERING
        self._kept = b""
        self.deadline_s = self._shared.clock() + _LINGER_S
        if self._deaf_bytes_left >= 0:
            self._resume_reading()
        self.transport.write_eof()
        self._unsent = self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Close as soon as what was written is sent; an unfinished answer ends torn."""
        self._close_state()
        self.transport.close()

    def _close_state(self) -> None:
        self._state = _CLOSING
        self._reader = None
        self.deadline_s = self._shared.clock() + _FLUSH_S
        self._unsent = self.transport.get_write_buffer_size()

    def close_if_idle(self) -> None:
        """Close unless a request is being read or served."""
        if self._state == _READING and self._reader is None:
            self.close()

    def expire(self, now_s: float) -> None:
        """The deadline has passed: close; give up on a client that takes nothing of what it is still to get."""
        if self._state not in (_LINGERING, _CLOSING):
            self.close()
            return
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:
            self._unsent = unsent
            self.deadline_s = now_s + _FLUSH_S
        else:
            self.transport.abort()
