"""An HTTP/1.1 client that shows what is on the wire: framing, interim answers, and whether an answer ended properly."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self

from processes import HOST, POLL_S

WAIT_S = 20.0
Headers = Mapping[str, str]


async def eventually(check: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """As `processes.until`, while other tasks go on."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while not (found := await asyncio.to_thread(check)):
        assert loop.time() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return found


class Client:
    """One connection.

    Attributes:
        status, reason, version, headers: of the last answer; header names in lower case, in order.
        body: what has come of the last answer's body.
        complete: whether that answer has ended as its framing demands.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._begin()

    def _begin(self) -> None:
        self.status, self.reason, self.version = 0, "", ""
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.complete = False
        self._left: int | None = None  # bytes of the body that are to come; None: see _chunked
        self._chunked = False
        self._ended = False

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Self:
        """Connect; a small `receive_buffer` makes a client that cannot take much."""
        sock = socket.socket()
        sock.setblocking(False)
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
            limit = 1 << 16 if receive_buffer is None else receive_buffer
            return cls(*await asyncio.open_connection(sock=sock, limit=limit))
        except BaseException:
            sock.close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def ask(
        self, path: str, body: object = None, headers: Headers | None = None, *, method: str = "", version: str = "1.1"
    ) -> None:
        """Send a request with a length; no content type unless one is given."""
        self._begin()
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/{version}", f"Host: {HOST}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines.append(f"Content-Length: {len(data)}")
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    def header(self, name: str) -> str | None:
        """The one value of a header, or None; fails where it comes twice."""
        found = [value for key, value in self.headers if key == name]
        assert len(found) < 2, f"{name} came {len(found)} times"
        return found[0] if found else None

    async def head(self, *, interim: bool = False) -> int:
        """Read up to the end of the head; returns the status. 1xx answers are passed over unless they are wanted."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._head(await self._reader.readuntil(b"\r\n\r\n"))
                if self.status >= 200 or interim:
                    return self.status

    def _head(self, raw: bytes) -> None:
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        self.version, status, self.reason = first.split(" ", 2)
        self.status = int(status)
        self.headers = [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines)]
        self._chunked = self.header("transfer-encoding") == "chunked"
        length = self.header("content-length")
        self._left = int(length) if length is not None else None

    async def piece(self) -> bytes:
        """The next part of the body; empty at its end, proper or not."""
        if self._ended:
            return b""
        try:
            async with asyncio.timeout(WAIT_S):
                data = await (self._read_chunk() if self._chunked else self._read_plain())
        except (asyncio.IncompleteReadError, ConnectionError):
            data = b""
        self.body += data
        self._ended = not data
        return data

    async def _read_chunk(self) -> bytes:
        size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await self._reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        self.complete = size == 0
        return data[:-2]

    async def _read_plain(self) -> bytes:
        if self._left == 0:
            self.complete = True
            return b""
        data = await self._reader.read(65536 if self._left is None else min(65536, self._left))
        if self._left is not None:
            self._left -= len(data)
            self.complete = self._left == 0
        elif not data:
            self.complete = True  # the end of the connection is the end of the body
        return data

    async def rest(self) -> bytes:
        """Read the body to its end; returns all of it."""
        if self.status < 200:
            await self.head()
        while await self.piece():
            pass
        return self.body

    async def closed(self) -> bool:
        """Whether the server closes the connection; what still comes is dropped."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while await self._reader.read(65536):
                    pass
        return True

    async def reset(self) -> None:
        """Leave at once, without a word (RST)."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        await self.leave()

    async def leave(self) -> None:
        """Close the connection (FIN)."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()


async def ask(port: int, path: str, body: object = None, headers: Headers | None = None, *, method: str = "") -> Client:
    """One request on a connection of its own, read to its end."""
    async with await Client.connect(port) as client:
        await client.ask(path, body, headers, method=method)
        await client.head()
        if method != "HEAD":
            await client.rest()
        return client
