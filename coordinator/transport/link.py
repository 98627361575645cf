"""A standing GET whose body never ends, handed over as raw bytes: MindIE's `GET /dresult`.

Its chunk borders carry meaning there (MindIE protocol page §5.2), so nothing here removes the chunk framing.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from coordinator.core.instance import Address

from .connect import Connector
from .errors import KEY_REFUSED, TransportError, key_refused, loss_error
from .opening import Opening
from .peers import Peers
from .request import encode_call


class LinkReader(Protocol):
    """Where the bytes of a link go. Calls come straight from the socket's callback."""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take body bytes, still chunk-framed, as they were read; `now_s`: monotonic time of the read."""
        ...

    def closed(self, error: TransportError | None) -> None:
        """Take note that the connection is gone; called at most once, and not for `Link.close`.

        `error` is `closed` (the peer ended the connection) or `reset`.
        """
        ...


class Link:
    """An open link."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: "LinkProtocol") -> None:
        self._protocol = protocol

    def close(self) -> None:
        """Close the connection at once; the reader is not called any more. Idempotent."""
        self._protocol.close()


async def open_link(  # noqa: PLR0913  # as HttpClient.fetch
    address: Address,
    target: str,
    headers: Iterable[tuple[bytes, bytes]],
    reader: LinkReader,
    *,
    connect_s: float,
    head_s: float,
    peers: Peers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Link:
    """Send `GET target` on a connection of its own and wait for the head of the reply.

    The reader may be called before this returns, with what came together with the head. Reading is never paused: a
    shared stream must not wait for one slow request. Cancellation closes the connection.

    Args:
        address: where to.
        target: path.
        headers: without `host`.
        reader: gets all bytes after the head.
        connect_s: limit of connecting; 0: none.
        head_s: limit of the wait for the head, after that.
        peers: as for `HttpClient`.
        clock: monotonic time.

    Raises:
        TransportError: no connection, no head in time, or (`bad_reply`) an answer other than 200 with chunked transfer
            coding; the detail then has its status and the first 4 KiB of its body. `key_refused`: see `HttpClient`.
        ValueError: as `HttpClient.fetch`.
    """
    peers = peers or Peers()
    key = peers.of(address).key
    request, _ = encode_call(b"GET", target, address, headers, b"", key)
    connector = Connector(connect_s=connect_s, peers=peers)
    protocol = await connector.open(address, lambda: LinkProtocol(address.netloc, reader, clock, keyed=bool(key)))
    try:
        async with asyncio.timeout(head_s):
            await protocol.ask(request)
    except TimeoutError as error:
        raise protocol.overdue(head_s) from error
    except BaseException:  # cancellation above all; raised again
        protocol.close()
        raise
    return Link(protocol)


class LinkProtocol(asyncio.Protocol):
    """Reads the head, then passes everything on."""

    __slots__ = ("_clock", "_error", "_keyed", "_netloc", "_opened", "_opening", "_reader", "_transport")

    def __init__(self, netloc: str, reader: LinkReader, clock: Callable[[], float], *, keyed: bool) -> None:
        self._netloc = netloc
        self._keyed = keyed
        self._reader: LinkReader | None = reader  # None: nobody is to be told anything any more
        self._clock = clock
        self._opening: Opening | None = Opening()  # None: the link is open
        self._opened: asyncio.Future[None] | None = None
        self._error: TransportError | None = None  # set once the link is lost
        self._transport: asyncio.Transport | None = None

    async def ask(self, request: bytes) -> None:
        """Write the request and wait until the link is open; raises TransportError."""
        if self._error is not None:
            raise self._error
        assert self._transport is not None
        self._opened = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._opened

    def overdue(self, head_s: float) -> TransportError:
        """Give up waiting for the head, or for the body of a refusal; returns what to raise."""
        self._lose(TransportError("timeout", f"{self._netloc}: no head within {head_s:g} s"), cut=True)
        assert self._error is not None
        return self._error

    def close(self) -> None:
        """See `Link.close`."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport  # type: ignore[assignment]  # TLS transports of uvloop are no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._opening is not None:
            data = self._open(self._opening, data)
        if data and self._reader is not None:
            self._reader.feed(data, self._clock())

    def eof_received(self) -> None:
        """Called by the loop, which closes the connection afterwards."""
        self._lose(loss_error(None, self._netloc, unsent=False), cut=True)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop, last of all."""
        self._lose(loss_error(error, self._netloc, unsent=False))
        self._transport = None

    # --- inside

    def _open(self, opening: Opening, data: bytes) -> bytes:
        """Read on towards the end of the head; returns what came after it."""
        rest = opening.feed(data)
        if opening.refusal is not None:
            self._lose(self._refused(opening.refusal))
        elif opening.accepted:
            self._opening = None
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
        return rest

    def _refused(self, why: str) -> TransportError:
        if self._keyed and self._opening is not None and self._opening.status in KEY_REFUSED:
            return key_refused(self._opening.status, self._netloc)
        return TransportError("bad_reply", f"{self._netloc}: {why}")

    def _lose(self, error: TransportError, *, cut: bool = False) -> None:
        """Close and tell, once. `cut`: if a refusal was being read, it says more than `error`."""
        if self._error is not None:
            return
        opening = self._opening
        refusal = opening.cut() if opening is not None and cut else None
        self._error = error if refusal is None else self._refused(refusal)
        reader = self._reader
        self.close()
        if opening is None:
            if reader is not None:
                reader.closed(self._error)
        elif self._opened is not None and not self._opened.done():
            self._opened.set_exception(self._error)
