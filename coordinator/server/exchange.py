"""One request on a client's connection, and the means to answer it."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from coordinator.core.errors import RequestError
from coordinator.server.hold import Hold, Wire
from coordinator.server.reader import RequestReader

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = (204, 304)
_JOIN_BYTES = 16384
_LAST_CHUNK = b"0\r\n\r\n"
_SIZED: Final = 2048
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(_SIZED)]
_CRLF: Final = b"\r\n"

HeaderList = Iterable[tuple[bytes, bytes]]


class Link(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport
    peer: str
    date: Callable[[], bytes]
    """The `Date` line of an answer."""

    @property
    def draining(self) -> bool:
        """Whether the connection shall close after this answer."""
        ...

    def answered(self, *, reusable: bool) -> None:
        """The answer is complete."""
        ...

    def torn(self) -> None:
        """The answer is broken off: close so that the client gets what was written."""
        ...

    def reset(self) -> None:
        """Drop the connection with all that is not sent yet."""
        ...


class Exchange:
    """One request, complete or refused, and its answer: `respond` once, or `start`, `write`..., `end`.

    All calls are synchronous and hand at most one piece to the transport; what comes between `hold` and `flush` goes
    out in one write. Once the client has left, or the answer is finished, writes are ignored. Header values of answers
    are trusted but for line breaks.

    Attributes:
        method: as received; empty if the request was too broken to tell.
        target: as received.
        path: the target up to `?`; an absolute-form target is reduced to its path.
        query: what follows `?`.
        headers: lower-case names, order and duplicates kept.
        body: complete and expanded; empty if refused. A handler may empty it, to be the only one to keep it.
        http_10: the client speaks HTTP/1.0: streams end by close.
        peer: the client's IP address.
        arrived_s: monotonic time at which the head was complete.
        refusal: what the server found wrong; the handler says it in the shape its client expects.
        started: something was sent.
        finished: the answer is complete, or broken off by this side.
        gone: the client left before that.
        congested: the client takes its answer more slowly than it is written.
        on_writable: called when that is over.
        kept: what gate and handler have made of the head. The next request on the connection has it if its head is the
            same; its Content-Length may be another one.
    """

    __slots__ = (
        "_chunked", "_head_only", "_hold", "_link", "_plain", "_request", "_reusable", "_transport", "arrived_s",
        "body", "congested", "finished", "gone", "headers", "http_10", "kept", "method", "on_writable", "path", "peer",
        "query", "refusal", "started", "target",
    )  # fmt: skip

    def __init__(self, link: Link, request: RequestReader, body: bytes, refusal: RequestError | None) -> None:
        self.method = request.method
        self.target = request.target
        self.path = request.path
        self.query = request.query
        self.headers = request.headers
        self.body = body
        self.http_10 = request.http_10
        self.peer = link.peer
        self.arrived_s = request.arrived_s
        self.refusal = refusal
        self.started = self.finished = self.gone = self.congested = False
        self.on_writable: Callable[[], None] | None = None
        self._link = link
        self._transport: Wire = link.transport
        self._hold: Hold | None = None
        self._reusable = request.keep_alive and not request.unread
        self._head_only = request.method == "HEAD"
        self._chunked = self._plain = False
        self._request = request
        self.kept = request.kept

    def keep(self, made: object) -> None:
        """Set `kept`."""
        self.kept = self._request.kept = made

    def header(self, name: bytes) -> bytes | None:
        """First value of a header; `name` in lower case."""
        for given, value in self.headers:
            if given == name:
                return value
        return None

    def respond(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a complete answer; a HEAD request gets its head alone.

        Raises:
            ValueError: a header holds a line break; nothing was sent.
            RuntimeError: the request was answered already.
        """
        head = _head(status, headers) + self._link.date()
        if not self._opens():
            return
        self.flush()
        self.finished = True
        self._reusable = reusable = self._reusable and not self._link.draining
        if status not in _BODILESS:
            head += b"Content-Length: %d\r\n" % len(body)
        if not reusable:
            head += b"Connection: close\r\n\r\n"
        elif self.http_10:
            head += b"Connection: keep-alive\r\n\r\n"
        else:
            head += b"\r\n"
        if self._head_only or status in _BODILESS:
            self._transport.write(head)
        elif len(body) < _JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._link.answered(reusable=reusable)

    def start(self, status: int, headers: HeaderList, first: bytes = b"") -> None:
        """Send the head of a stream and its first piece in one write.

        Raises:
            ValueError: a header holds a line break; nothing was sent.
            RuntimeError: the request was answered already.
        """
        head = _head(status, headers) + self._link.date()
        if not self._opens():
            return
        self._reusable = self._reusable and not self.http_10 and not self._link.draining
        if not self.http_10:
            head += b"Transfer-Encoding: chunked\r\n"
        head += b"\r\n" if self._reusable else b"Connection: close\r\n\r\n"
        if self._head_only:
            self._transport.write(head)
        elif self.http_10:
            self._plain = True
            self._transport.write(head + first)
        else:
            self._chunked = True
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(first), first) if first else head)

    def write(self, data: bytes) -> None:
        """Send one piece of a stream; an empty one is skipped.

        Raises:
            RuntimeError: the stream was not started.
        """
        if self._chunked and data:
            size = len(data)
            self._transport.write((_SIZE_LINES[size] if size < _SIZED else b"%x\r\n" % size) + data + _CRLF)
        elif self._plain:
            self._transport.write(data)
        elif not self.started and not self.gone:
            raise RuntimeError("write before start")

    def end(self, data: bytes = b"") -> None:
        """Send the last piece of a stream and its end in one write; without effect on a finished answer.

        Raises:
            RuntimeError: the stream was not started.
        """
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else _LAST_CHUNK)
        elif not self.finished:
            self.write(data)
        if self._closes():
            self.flush()
            self._link.answered(reusable=self._reusable and not self._link.draining)

    def break_off(self, data: bytes = b"") -> None:
        """Send a last piece, then close without the stream's end, so that no client takes the answer for a whole one.

        The close is a FIN, never a reset, which could overtake the piece. A connection without a started answer is just
        closed. Without effect on a finished answer.
        """
        if data and self.started:
            self.write(data)
        if self._closes():
            self.flush()
            self._link.torn()

    def cut(self) -> None:
        """Reset the connection at once; what the client has not taken is dropped. For a client that does not read."""
        if self._closes():
            self._drop()
            self._link.reset()

    def hold(self) -> None:
        """Keep what is written until `flush`, or until the answer is complete or broken off; `cut` drops it."""
        if self._hold is None and not (self.finished or self.gone):
            self._transport = self._hold = Hold(self._link.transport)

    def flush(self) -> None:
        """Write what was kept. May be followed by `congested` at once."""
        hold = self._hold
        if hold is not None:
            self._drop()
            hold.release()

    def buffered_bytes(self) -> int:
        """How much of what was written the client's kernel has not taken yet; what is kept back counts."""
        return self._transport.get_write_buffer_size()

    def left(self) -> None:
        """The client is gone: called by the connection."""
        self.gone = True
        self._drop()
        self._chunked = self._plain = False
        self.on_writable = None

    def _drop(self) -> None:
        self._hold = None
        self._transport = self._link.transport

    def _opens(self) -> bool:
        """Whether an answer may begin."""
        if self.gone:
            return False
        if self.started or self.finished:
            raise RuntimeError("the request was answered already")
        self.started = True
        return True

    def _closes(self) -> bool:
        """Whether an unfinished answer ends with this call."""
        if self.gone or self.finished:
            return False
        self.finished = True
        self._chunked = self._plain = False
        self.on_writable = None
        return True


def _head(status: int, headers: HeaderList) -> bytes:
    """Status line and headers, open for more headers."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
        raise ValueError("a header of the answer holds a line break")
    return (_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status) + block
