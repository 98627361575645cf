"""The server's side of connections: which protocol they speak, and calls over baidu_std."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from instances.faults import Chosen
from instances.tasks import Tasks
from instances.xllm.errors import ELIMIT, EREQUEST, RpcError
from instances.xllm.frames import MAGIC, BadFrame, BadPayload, Frame, Reader, failure, reply
from instances.xllm.wire import Wire

_MOST_CALLS = 10_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call over baidu_std. `port`: of ours, that it came in by; `connection`: that it came over."""

    service: str
    method: str
    message: bytes
    port: int
    connection: "RpcConnection"
    correlation_id: int

    def answer(self, message: bytes, chosen: Chosen) -> None:
        """Answer that it went well."""
        self.connection.send(reply(self.correlation_id, message, gzip="gzip" in chosen), chosen)

    def fail(self, error: RpcError, chosen: Chosen) -> None:
        """Answer with an error."""
        self.connection.send(failure(self.correlation_id, error.code, error.text), chosen)


Serve = Callable[[Call], Awaitable[None]]


class Connections:
    """All connections of one instance that do not speak HTTP (yet).

    Args:
        tasks: owner of the calls.
        serve: answers one call; it must not raise.
    """

    def __init__(self, tasks: Tasks, serve: Serve) -> None:
        self.tasks = tasks
        self.serve = serve
        self.open: set[asyncio.Transport] = set()
        self.bad_frames = 0

    def accept(self, http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol for a new connection; `http` makes the one for HTTP."""
        return _Undecided(self, http)


class _Undecided(asyncio.Protocol):
    """A connection whose first bytes decide what it speaks, as with a brpc server."""

    def __init__(self, connections: Connections, http: Callable[[], asyncio.Protocol]) -> None:
        self._connections = connections
        self._http = http
        self._transport: asyncio.Transport | None = None
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self._connections.open.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's interface
        if self._transport is not None:
            self._connections.open.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._seen += data
        if len(self._seen) < len(MAGIC) and MAGIC.startswith(self._seen):
            return
        is_rpc = self._seen.startswith(MAGIC)
        if not is_rpc:
            self._connections.open.discard(self._transport)  # HTTP keeps its own account
        protocol = RpcConnection(self._connections) if is_rpc else self._http()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._seen)


class RpcConnection(asyncio.Protocol):
    """A connection that speaks baidu_std; calls run side by side, each is answered when it is done."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._reader = Reader()
        self._wire: Wire | None = None
        self._calls = 0
        self.peer = "gone"
        self.port = 0

    @property
    def transport(self) -> asyncio.Transport:
        """The connection itself."""
        assert self._wire is not None
        return self._wire.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._wire = Wire(cast("asyncio.Transport", transport))  # uvloop's is not a subclass
        host, port = transport.get_extra_info("peername")[:2]
        self.peer = f"{host}:{port}"
        self.port = transport.get_extra_info("sockname")[1]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's interface
        """The connection is gone."""
        self._connections.open.discard(self.transport)

    def send(self, frame: Frame, chosen: Chosen) -> None:
        """Send a frame; nothing happens if the peer has left."""
        if self._wire is not None:
            self._wire.send(frame, chosen)

    def data_received(self, data: bytes) -> None:
        """Bytes of frames, cut anywhere."""
        try:
            for frame in self._reader.feed(data):
                self._begin(frame)
        except BadFrame:
            self._connections.bad_frames += 1
            self.transport.close()

    def _begin(self, frame: Frame) -> None:
        meta, nothing = frame.meta, Chosen()
        if not meta.HasField("request"):
            self._connections.bad_frames += 1
            self.transport.close()
            return
        try:
            message = frame.message()
        except BadPayload as bad:
            self.send(failure(meta.correlation_id, EREQUEST, str(bad)), nothing)
            return
        if self._calls >= _MOST_CALLS:
            self.send(failure(meta.correlation_id, ELIMIT, "too many calls"), nothing)
            return
        names = meta.request.service_name, meta.request.method_name
        call = Call(*names, message, self.port, self, meta.correlation_id)
        self._connections.tasks.spawn(self._serve(call), f"call {names[1]} from {self.peer}")

    async def _serve(self, call: Call) -> None:
        self._calls += 1
        try:
            await self._connections.serve(call)
        finally:
            self._calls -= 1
