"""Answers on the wire, with the faults that concern bodies and connections."""

import asyncio
import gzip
import socket
import struct
from collections import deque
from collections.abc import Mapping

from aiohttp import web

from instances.faults import Chosen

_BODY_FAULTS = ("content_type", "gzip", "empty", "cut_after", "reset_after", "split_bytes")
_LINGER_NOTHING = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Close a connection so that the peer sees RST, not FIN."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOTHING)
    transport.abort()


class Pipe:
    """Bytes of one body, past the HTTP library: so that each chunk, cut and byte is where it is meant to be.

    `closed` tells that the connection is gone, whoever closed it.
    """

    def __init__(self, transport: asyncio.Transport, chosen: Chosen | None = None) -> None:
        chosen = chosen or Chosen()
        self.transport = transport
        self._resets = "reset_after" in chosen
        name = "reset_after" if self._resets else "cut_after"
        self._left = int(chosen.number(name)) if name in chosen else None
        self._split = "split_bytes" in chosen
        self._queue: deque[bytes] = deque()
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self.closed or not data:
            return
        if self._left is None:
            self._send(data)
            return
        self._send(data[: self._left])
        self._left -= len(data)
        if self._left <= 0 and not self._queue:
            self._sever()

    def chunk(self, data: bytes) -> None:
        """Send one HTTP chunk (RFC 9112 §7.1); empty data is never sent, it would end the body."""
        if data:
            self.write(chunked(data))

    def apart(self, first: bytes, second: bytes) -> None:
        """Send two pieces as two TCP segments."""
        self.write(first)
        self._queue.append(second)
        self._drained.clear()
        asyncio.get_running_loop().call_later(0.005, self._pump)

    def _send(self, data: bytes) -> None:
        if self._queue or self._split:
            parts = [data[i : i + 1] for i in range(len(data))] if self._split else [data]
            idle = not self._queue
            self._queue.extend(parts)
            if idle and self._queue:
                self._drained.clear()
                self._pump()
        else:
            self.transport.write(data)

    def _pump(self) -> None:
        # one piece per turn of the loop: the loop hands each to the kernel by itself
        if self._queue and not self.closed:
            self.transport.write(self._queue.popleft())
            if self._queue:
                asyncio.get_running_loop().call_soon(self._pump)
                return
        self._queue.clear()
        self._drained.set()
        if self._left is not None and self._left <= 0 and not self.closed:
            self._sever()

    def _sever(self) -> None:
        if self._resets:
            reset(self.transport)
        else:
            self.transport.close()

    async def drained(self) -> None:
        """Wait until everything was handed to the connection."""
        await self._drained.wait()


def chunked(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def wants_faulty_body(chosen: Chosen) -> bool:
    """Whether a fault concerns the body of a plain answer."""
    return any(name in chosen for name in _BODY_FAULTS)


async def faulty(request: web.Request, response: web.Response, chosen: Chosen) -> web.StreamResponse:
    """Send `response` with the body faults that are chosen."""
    raw = response.body
    body = raw if isinstance(raw, bytes | bytearray) else b""
    headers = {key: value for key, value in response.headers.items() if key.lower() != "content-length"}
    if "empty" in chosen:
        body = b""
    if "gzip" in chosen:
        body = gzip.compress(bytes(body))
        headers["Content-Encoding"] = "gzip"
    if (content_type := chosen.get("content_type")) is not None:
        headers["Content-Type"] = content_type.value
    headers["Content-Length"] = str(len(body))
    plain = web.StreamResponse(status=200 if "empty" in chosen else response.status, headers=headers)
    await plain.prepare(request)
    transport = request.transport
    if transport is not None:
        pipe = Pipe(transport, chosen)
        pipe.write(bytes(body))
        await pipe.drained()
    return plain


class EventStream:
    """A chunked event stream as the answer to one request."""

    def __init__(self, response: web.StreamResponse, pipe: Pipe) -> None:
        self.response = response
        self.pipe = pipe

    @classmethod
    async def open(
        cls, request: web.Request, chosen: Chosen, headers: Mapping[str, str] | None = None
    ) -> "EventStream | None":
        """Send the header; None if the peer has left."""
        content_type = chosen.get("content_type")
        response = web.StreamResponse(
            headers={"Content-Type": content_type.value if content_type else "text/event-stream", **(headers or {})}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        return None if transport is None else cls(response, Pipe(transport, chosen))
