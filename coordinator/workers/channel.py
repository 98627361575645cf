"""One end of the connection between supervisor and worker: messages with a length before each, in order."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from coordinator.wire.packing import plain

In = TypeVar("In")

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 134217728  # twice what a decode instance may say at once
MAX_PENDING_BYTES = MAX_MESSAGE_BYTES


class Channel(asyncio.Protocol, Generic[In]):
    """Reads and writes messages on a socket; synchronous on both ways.

    Args:
        kinds: the union of messages that may come in.
        take: called with each.
        ended: called once, when the other end is gone, or has stopped reading, or has said what is no message.
    """

    def __init__(self, kinds: object, take: Callable[[In], None], ended: Callable[[], None]) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=plain)
        self._take = take
        self._ended = ended
        self._parts: list[bytes] = []
        self._have_bytes = 0
        self._need_bytes = _LENGTH.size
        self._transport: asyncio.Transport | None = None
        self._over = False
        self._closed = asyncio.Event()

    @classmethod
    async def open(
        cls, sock: socket.socket, kinds: object, take: Callable[[In], None], ended: Callable[[], None]
    ) -> "Channel[In]":
        """Take over one of a pair of connected Unix sockets."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(kinds, take, ended), sock=sock)
        return channel

    def send(self, message: object) -> None:
        """Send a message. An other end that lets too much pile up is given up."""
        transport = self._transport
        if transport is None or self._over:
            return
        data = self._encoder.encode(message)
        transport.write(_LENGTH.pack(len(data)) + data)
        if transport.get_write_buffer_size() > MAX_PENDING_BYTES:
            self._end()

    def close(self) -> None:
        """Close; what was sent still goes out. `ended` is not called."""
        self._over = True
        if self._transport is not None:
            self._transport.close()

    async def aclose(self, within_s: float) -> None:
        """Close, and wait until what was sent has gone out, at most `within_s`."""
        self.close()
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._closed.wait()
        except TimeoutError:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._parts.append(data)
        self._have_bytes += len(data)
        if self._have_bytes < self._need_bytes:
            return
        data = b"".join(self._parts) if len(self._parts) > 1 else data
        at, end = 0, len(data)
        while not self._over:
            if end - at < _LENGTH.size:
                self._need_bytes = _LENGTH.size
                break
            (size,) = _LENGTH.unpack_from(data, at)
            if size > MAX_MESSAGE_BYTES:
                self._end()
                return
            stop = at + _LENGTH.size + size
            if stop > end:
                self._need_bytes = stop - at
                break
            self._read(memoryview(data)[at + _LENGTH.size : stop])
            at = stop
        rest = data[at:]
        self._parts = [rest] if rest else []
        self._have_bytes = len(rest)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by the loop."""
        self._closed.set()
        self._end()

    def _read(self, data: memoryview) -> None:
        try:
            message = self._decoder.decode(data)
        except msgspec.MsgspecError:
            self._end()
            return
        self._take(message)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        if self._transport is not None:
            self._transport.abort()
        self._ended()
