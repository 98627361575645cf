"""A reply that is passed on piece by piece: the caller's hold on it."""

import asyncio
from collections.abc import Callable

from coordinator.core.gather import Gatherer
from coordinator.core.instance import Address

from .connection import Connection
from .errors import KEY_REFUSED, TransportError, key_refused
from .reader import ReplyReader
from .reply import Headers
from .request import Call
from .sink import ReplySink


class Stream:
    """One streamed reply. All calls are idempotent, and none does anything once the reply has ended."""

    __slots__ = ("_claim", "_closed", "_connection", "_gatherer", "_paused", "_retry")

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._claim: ReplyReader | None = None
        self._closed = False
        self._gatherer: Gatherer | None = None
        self._paused = False
        self._retry: asyncio.Task[None] | None = None

    def pause(self) -> None:
        """Stop reading from the engine; what was read already still comes. A loss may show only after `resume`."""
        self._paused = True
        if self._connection is not None and self._claim is not None:
            self._connection.pause(self._claim)

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._connection is not None and self._claim is not None:
            self._connection.resume(self._claim)

    def gather_in(self, gatherer: Gatherer) -> None:
        """Tell it when several pieces come in one read, so that they can go on in one write; the sink takes each."""
        self._gatherer = gatherer
        if self._claim is not None and self._claim.sink is not None:
            self._claim.gatherer = gatherer

    def close(self) -> None:
        """End the leg: no further call reaches the sink. The connection is closed unless the reply has ended."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._connection is not None and self._claim is not None:
            self._connection.abandon(self._claim)
        self._connection = self._claim = self._gatherer = None

    # --- for the client

    def run(self, connection: Connection, call: Call, sink: ReplySink) -> None:
        """Write the request on this connection; raises TransportError if it is closed already."""
        self._claim = connection.begin(call, sink)
        self._claim.gatherer = self._gatherer
        self._connection = connection
        if self._paused:
            connection.pause(self._claim)

    def hand_over(self, sink: ReplySink) -> None:
        """Let another sink take the rest of the reply."""
        if self._claim is not None and self._claim.sink is not None:
            self._claim.sink = sink

    def retry(self, task: asyncio.Task[None]) -> None:
        """Take note of the task that looks for another connection: `close` cancels it."""
        self._connection = self._claim = None
        self._retry = task

    @property
    def closed(self) -> bool:
        """Whether the caller has closed it."""
        return self._closed


class UntilHead(ReplySink):
    """Sink of a request until its reply's head, at which the caller's sink takes over.

    Args:
        stream: the caller's hold.
        sink: the caller's sink.
        address: where to.
    """

    __slots__ = ("_address", "_sink", "_stream")

    def __init__(self, stream: Stream, sink: ReplySink, address: Address) -> None:
        self._stream = stream
        self._sink = sink
        self._address = address

    def head(self, status: int, headers: Headers) -> None:
        """Leave."""
        self._stream.hand_over(self._sink)
        self._sink.head(status, headers)

    def data(self, data: bytes, now_s: float) -> None:
        """Passed on, although no data comes before the head."""
        self._sink.data(data, now_s)

    def end(self, now_s: float) -> None:
        """Passed on, although no end comes before the head."""
        self._sink.end(now_s)

    def lost(self, error: TransportError) -> None:
        """Passed on."""
        self._sink.lost(error)


class WithKey(UntilHead):
    """For a request that carries a key of ours: a reply that refuses the key is lost."""

    __slots__ = ()

    def head(self, status: int, headers: Headers) -> None:
        """Leave, or end the reply: what it says is not for the client."""
        if status in KEY_REFUSED:
            self._stream.close()
            self._sink.lost(key_refused(status, self._address.netloc))
        else:
            super().head(status, headers)


class SecondChance(UntilHead):
    """For a request on a reused connection: a stale connection is replaced, once.

    Args:
        stream: as `UntilHead`, like sink and address.
        call: the request, to be written again.
        sink: see above.
        address: see above.
        retry: starts a task, owned by the client, that writes the request on a new connection.
    """

    __slots__ = ("_call", "_retry")

    def __init__(self, stream: Stream, call: Call, sink: ReplySink, address: Address, retry: "Retry") -> None:
        super().__init__(stream, sink, address)
        self._call = call
        self._retry = retry

    def lost(self, error: TransportError) -> None:
        """Try again if the connection was closed before the reply began."""
        if error.unsent:
            task = self._retry(self._address, self._stream, self._call, self._sink)
            task.add_done_callback(self._ended)
            self._stream.retry(task)
        else:
            self._sink.lost(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Cancelled by the stream's owner, who knows, or by the client's end; it may not even have begun."""
        if task.cancelled() and not self._stream.closed:
            self._sink.lost(TransportError("closed", "the client was closed", unsent=True))


Retry = Callable[[Address, Stream, Call, ReplySink], asyncio.Task[None]]
