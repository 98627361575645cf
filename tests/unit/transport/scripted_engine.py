"""An engine that does what a test says, and a sink that remembers."""

import asyncio
import socket
import struct

from coordinator.core.instance import Address
from coordinator.transport.sink import ReplySink

GUARD_S = 20.0


class Peer(asyncio.Protocol):
    """The engine's end of one connection."""

    def __init__(self, engine):
        self.engine = engine
        self.buffer = b""
        self.requests = []
        self.closed = asyncio.get_running_loop().create_future()  # ends when the client has closed

    def connection_made(self, transport):
        self.transport = transport
        self.engine.peers.append(self)
        self.engine.changed.set()
        if self.engine.on_connect is not None:
            self.engine.on_connect(self)

    def data_received(self, data):
        self.buffer += data
        while (request := self._cut_request()) is not None:
            self.requests.append(request)
            self.engine.requests.append(request)
            self.engine.changed.set()
            self.engine.script(self, request)

    def _cut_request(self):
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return None
        self.buffer = rest[length:]
        return head + b"\r\n\r\n" + rest[:length]

    def eof_received(self):
        self._client_left()

    def connection_lost(self, error):
        self._client_left()

    def _client_left(self):
        if not self.closed.done():
            self.closed.set_result(None)
        self.engine.changed.set()

    def send(self, data):
        self.transport.write(data)

    def fin(self):
        self.transport.close()

    def rst(self):
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Engine:
    """A server that does what a test's script says, request by request."""

    def __init__(self):
        self.peers = []
        self.requests = []
        self.changed = asyncio.Event()
        self.on_connect = None

    def script(self, peer, request):
        peer.send(whole(b"ok"))

    async def listen(self, host="127.0.0.1", **options):
        self.server = await asyncio.get_running_loop().create_server(
            lambda: Peer(self), host, 0, backlog=1024, **options
        )
        self.address = Address(host, self.server.sockets[0].getsockname()[1], tls="ssl" in options)
        return self

    async def until(self, condition):
        """Wait until the condition holds; it is looked at after each connect, request and close."""
        async with asyncio.timeout(GUARD_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def aclose(self):
        self.server.close()
        for peer in self.peers:
            peer.transport.abort()
        for peer in self.peers:
            await peer.closed
        await turns(3)


def whole(body, *, status=200, extra=b""):
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), extra, body)


def chunked(*pieces, extra=b"", end=True):
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n%b%b" % (extra, body, b"0\r\n\r\n" if end else b"")


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Home:
    """Where a connection lives: counts how often it is put back."""

    def __init__(self):
        self.kept = 0

    def put(self, connection, now_s):
        self.kept += 1
        return True

    def left(self, connection):
        pass

    def gone(self, connection):
        pass


class Notes(ReplySink):
    """A sink that writes down what it is told, and lets a test wait for it."""

    def __init__(self):
        self.heads = []
        self.pieces = []
        self.times = []
        self.ends = 0
        self.errors = []
        self.changed = asyncio.Event()

    @property
    def body(self):
        return b"".join(self.pieces)

    def head(self, status, headers):
        self.heads.append((status, headers))
        self.changed.set()

    def data(self, data, now_s):
        assert self.heads
        self.pieces.append(data)
        self.times.append(now_s)
        self.changed.set()

    def end(self, now_s):
        assert self.heads
        self.ends += 1
        self.changed.set()

    def lost(self, error):
        self.errors.append(error)
        self.changed.set()

    # as the reader of a link

    def feed(self, data, now_s):
        self.pieces.append(data)
        self.times.append(now_s)
        self.changed.set()

    def closed(self, error):
        self.errors.append(error)
        self.changed.set()

    @property
    def over(self):
        return self.ends + len(self.errors)

    async def until(self, condition):
        async with asyncio.timeout(GUARD_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()
