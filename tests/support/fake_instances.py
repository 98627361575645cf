"""Fake engine instances on loopback: each request goes to a coroutine that a test writes."""

import asyncio
import json
import socket
import struct
from collections import Counter

from held_ports import HeldPorts

from coordinator.core.instance import Address

GUARD_S = 10.0
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Call:
    """One request that a fake instance got, and the means to answer it."""

    def __init__(self, peer, method, target, headers, body):
        self.peer = peer
        self.method, self.target, self.headers, self.body = method, target, headers, body

    def header(self, name):
        found = [value for key, value in self.headers if key == name]
        assert len(found) <= 1, f"{name} is there twice"
        return found[0] if found else None

    @property
    def wire_id(self):
        return self.header("req-id")

    def reply(self, body=b"{}", status=200, *headers):
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
        self.send(b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, extra, len(body), body))

    def open_stream(self):
        self.send(EVENT_STREAM)

    def chunk(self, data):
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self):
        self.send(b"0\r\n\r\n")

    def send(self, data):
        if not self.peer.gone.is_set():
            self.peer.transport.write(data)

    def fin(self):
        self.peer.transport.close()

    def rst(self):
        if not self.peer.gone.is_set():
            sock = self.peer.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.peer.transport.abort()

    async def left(self):
        """Wait until the coordinator has closed the connection."""
        async with asyncio.timeout(GUARD_S):
            await self.peer.gone.wait()


class Peer(asyncio.Protocol):
    """The instance's end of one connection."""

    def __init__(self, fake):
        self.fake = fake
        self.buffer = b""
        self.gone = asyncio.Event()

    def connection_made(self, transport):
        self.transport = transport
        self.fake.peers.add(self)
        self.fake.accepted += 1
        if self.fake.deaf:
            transport.abort()

    def data_received(self, data):
        self.buffer += data
        while (call := self._cut()) is not None:
            self.fake.took(call)

    def _cut(self):
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
        length = int(dict(headers).get("content-length", 0))
        if len(rest) < length:
            return None
        self.buffer = rest[length:]
        method, target, _ = first.split(" ")
        return Call(self, method, target, headers, rest[:length])

    def connection_lost(self, error):
        self.gone.set()
        self.fake.peers.discard(self)


class FakeInstance:
    """A server whose `infer` answers requests; it counts stops by request id."""

    def __init__(self):
        self.peers = set()
        self.accepted = 0
        self.deaf = False
        self.calls = []
        self.stops = Counter()
        self.stop_models = set()
        self._tasks = set()
        self._held = HeldPorts()

    async def listen(self, port=0):
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: Peer(self), "127.0.0.1", port, backlog=512)
        self.address = Address("127.0.0.1", self.server.sockets[0].getsockname()[1])
        return self

    async def refuse(self):
        """Close the port: connections are refused from here on, for nobody else gets it."""
        self._close()
        self._held.take(self.address.port)

    def _close(self):
        self.server.close()
        for peer in list(self.peers):
            peer.transport.abort()

    async def aclose(self):
        self._close()
        self._held.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self.peers):
            await peer.gone.wait()

    def took(self, call):
        task = asyncio.get_running_loop().create_task(self._answer(call), name="fake instance")
        self._tasks.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task):
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a script failed", "exception": task.exception()}
            )

    async def _answer(self, call):
        if call.target.endswith("/stopInfer"):
            self.stops[json.loads(call.body)["id"]] += 1
            self.stop_models.add(call.target.split("/")[3])
            await self.stopping(call)
        elif call.target in ("/v1/models", "/health"):
            call.reply(b'{"object":"list","data":[{"id":"m"}]}')
        else:
            await self.other(call)

    async def stopping(self, call):
        call.reply(call.body)

    async def other(self, call):
        self.calls.append(call)
        await self.infer(call)

    async def infer(self, call):
        call.reply()


class FakeDecode(FakeInstance):
    """A MindIE decode instance: one result stream, on which tests say things."""

    def __init__(self):
        super().__init__()
        self.links = []
        self.link = None
        self.opening = self.open_link

    async def other(self, call):
        if call.target == "/dresult":
            self.links.append(call)
            await self.opening(call)
        else:
            await super().other(call)

    async def open_link(self, call):
        call.open_stream()
        self.link = call

    def say(self, wire_id, keyword, body):
        self.link.chunk(frame(wire_id, keyword, body))


def frame(wire_id, keyword, body):
    """One message of a result stream (MindIE protocol page §5.2)."""
    return b"reqId:%b\0%b:%b\0" % (wire_id.encode(), keyword.encode(), body)


def envelope(wire_id, output=None, *, stream=True, last=None):
    """Prefill's reply (MindIE protocol page §4.3)."""
    told = {"reqId": wire_id, "isStream": stream}
    if last is not None:
        told["isLastResp"] = last
    if output is not None:
        told["output"] = output
    return json.dumps(told, separators=(",", ":")).encode()
