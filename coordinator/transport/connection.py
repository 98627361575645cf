"""One connection to an engine: writes one request at a time and drives a sink with its reply.

The way of a byte is: socket callback, httptools, `ReplySink.data`; no task, no await, and no copy but httptools' own.
A long request body goes out slice by slice: the kernel's, and above all TLS's, work on it is not done in one go.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from coordinator.core.body import Buffer, LongBody
from coordinator.core.instance import Address
from coordinator.wire.head_memory import HeadMemory

from .acks import Acknowledgements
from .errors import TransportError, loss_error
from .reader import Known, ReplyReader
from .request import Call
from .sink import ReplySink

STALE_S = 0.5
SLICE_BYTES = 262144


class Home(Protocol):
    """Where a connection lives while no request uses it."""

    def put(self, connection: "Connection", now_s: float) -> bool:
        """Take the connection back for the next request; False: it must be closed."""
        ...

    def left(self, connection: "Connection") -> None:
        """Take note that a connection is about to close: it is not to be used again."""
        ...

    def gone(self, connection: "Connection") -> None:
        """Take note that a connection is closed."""
        ...


class Connection(asyncio.Protocol):
    """An HTTP/1.1 client connection.

    `begin` gives out the reader of the reply, and this is the claim on the connection too: it ends with the reply, so
    that a late `abandon` or `pause` cannot hit the request that uses the connection next.
    """

    __slots__ = (
        "_acknowledgements",
        "_choked",
        "_clock",
        "_home",
        "_keep",
        "_last",
        "_paused",
        "_reader",
        "_reused",
        "_sent_s",
        "_transport",
        "_unsent",
        "address",
        "idle_since_s",
    )

    def __init__(self, address: Address, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.idle_since_s = 0.0
        self._home = home
        self._clock = clock
        self._last: HeadMemory[Known] = HeadMemory()
        self._transport: asyncio.Transport | None = None
        self._reader: ReplyReader | None = None
        self._keep = False
        self._paused = False
        self._reused = False
        self._choked = False
        self._unsent: list[list[Buffer]] = []  # the next slice last
        self._sent_s = 0.0
        self._acknowledgements: Acknowledgements | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    # --- for the request that uses it

    def begin(self, call: Call, sink: ReplySink) -> ReplyReader:
        """Write a request and send its reply to `sink`, which is not called before this returns.

        Returns:
            The claim on the connection, for the calls below.

        Raises:
            TransportError: `closed`, `unsent`: the connection went away before anything was written.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise TransportError("closed", f"{self.address.netloc}: closed before the request", unsent=True)
        self._reader = ReplyReader(sink, bodiless=call.bodiless, max_head_bytes=call.max_head_bytes, last=self._last)
        self._keep = call.keep
        self._acknowledgements = Acknowledgements(transport) if call.flowing else None
        self._sent_s = self._clock()
        body = call.body
        if not body:
            transport.write(call.head)
        elif isinstance(body, bytes) and len(body) <= SLICE_BYTES:
            transport.writelines((call.head, body))
        else:
            parts = body if isinstance(body, LongBody) else LongBody((body,))
            self._unsent = list(parts.slices(SLICE_BYTES))[::-1]
            self._unsent[-1].insert(0, call.head)
            self._send_on()
        return self._reader

    def abandon(self, claim: ReplyReader) -> None:
        """Close the connection and tell nobody, if the reply is still on its way."""
        if claim is self._reader:
            self._detach()
            self.close()

    def expire(self, claim: ReplyReader) -> None:
        """End the reply with `timeout`, if it is still on its way."""
        if claim is self._reader:
            self._fail(TransportError("timeout", f"{self.address.netloc}: no whole reply in time"))

    def pause(self, claim: ReplyReader) -> None:
        """Stop reading; what was read already still reaches the sink. A loss may be noticed only after `resume`."""
        if claim is self._reader and not self._paused and self.usable:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self, claim: ReplyReader) -> None:
        """Read on."""
        if claim is self._reader:
            self._read_on()

    def give_up(self) -> None:
        """Nobody waits for it to be connected any more: uvloop closes such a transport and does not say so here."""
        self._transport = None

    # --- for its home

    def close(self) -> None:
        """Close at once; what is not written yet is dropped."""
        self._unsent = []
        self._home.left(self)
        if self._transport is not None:
            self._transport.abort()

    def shut(self, why: str) -> None:
        """Close at once; a request that uses the connection ends with `closed`."""
        self._fail(TransportError("closed", why))

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport  # type: ignore[assignment]  # TLS transports of uvloop are no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        reader = self._reader
        if reader is None:  # nobody has asked: what comes next would not be the reply to the next request
            self.close()
            return
        now_s = self._clock()
        if self._acknowledgements is not None:
            self._acknowledgements.note(now_s)
        try:
            raised = reader.feed(data, now_s)
            if raised is not None:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "sink of a reply failed", "exception": raised}
                )
            if reader is self._reader:  # else the sink has closed the stream
                self._look_at(reader)
        finally:
            if reader.holding:
                reader.flush()

    def pause_writing(self) -> None:
        """Called by the transport when the engine takes a request more slowly than it is written."""
        self._choked = True

    def resume_writing(self) -> None:
        """Called by the transport when that is over."""
        self._choked = False
        self._send_on()

    def eof_received(self) -> None:
        """Called by the loop, which closes the connection afterwards."""
        reader = self._reader
        if reader is None:
            self.close()
            return
        reader.close()
        self._look_at(reader)
        if reader is self._reader:
            self._fail(self._loss(None))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop, last of all."""
        self._fail(self._loss(error))
        self._transport = None
        self._home.gone(self)

    # --- inside

    def _send_on(self) -> None:
        """Write the next slice of a long body, if there is one; the others follow in later turns of the loop."""
        unsent, transport = self._unsent, self._transport
        if not unsent or transport is None or transport.is_closing():
            return
        transport.writelines(unsent.pop())
        if unsent and not self._choked:
            asyncio.get_running_loop().call_soon(self._send_on)

    def _look_at(self, reader: ReplyReader) -> None:
        if reader.fault is not None:
            reader.fault.detail = f"{self.address.netloc}: {reader.fault.detail}"
            self._fail(reader.fault)
        elif reader.complete:
            self._finish(reader)

    def _finish(self, reader: ReplyReader) -> None:
        """Part from a complete reply before its sink knows, so that the next request can use the connection."""
        sink = self._detach()
        self._read_on()
        self._reused = True
        now_s = self._clock()
        if not (self._can_stay(reader) and self._home.put(self, now_s)):
            self.close()
        if sink is not None:
            sink.end(now_s)

    def _can_stay(self, reader: ReplyReader) -> bool:
        """Whether another request may follow; not after a reply to a request that is only half sent."""
        stays = (reader.keeps_open or self._keep) and reader.in_step and not reader.until_close
        transport = self._transport
        stays = stays and not self._unsent
        return stays and transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def _fail(self, error: TransportError) -> None:
        sink = self._detach()
        self.close()
        if sink is not None:
            sink.lost(error)

    def _detach(self) -> ReplySink | None:
        """End the claim; returns the sink that is still to be told, if any."""
        reader = self._reader
        if reader is None:
            return None
        self._reader = self._acknowledgements = None
        return reader.release()

    def _read_on(self) -> None:
        if self._paused:
            self._paused = False
            if self.usable:
                assert self._transport is not None
                self._transport.resume_reading()

    def _loss(self, error: Exception | None) -> TransportError:
        # what crosses with the peer's close shows at once; a loss after that may be of a request that was at work
        at_once = self._clock() - self._sent_s <= STALE_S
        stale = at_once and self._reused and self._reader is not None and self._reader.untouched
        return loss_error(error, self.address.netloc, unsent=stale)
