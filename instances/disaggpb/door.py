"""One port for gRPC and for control calls: the first bytes of a connection tell which it is.

gRPC connections are passed on to the gRPC server, which listens on a local socket of its own; so they can be counted,
and cut as a network or a dying process cuts them.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

from instances.replies import reset
from instances.tasks import Tasks

_HTTP2 = b"PRI"
_TLS = 0x16  # a handshake record
_ENOUGH = len(_HTTP2)


class _End(asyncio.Protocol):
    """One end of a connection that is passed on; `other` is the opposite end."""

    def __init__(self) -> None:
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are of no common class

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the interface of asyncio
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Door:
    """Accepts connections.

    Args:
        address: name of the gRPC server's local socket, in Linux's abstract namespace.
        tasks: owner of the tasks that connect to it.
    """

    def __init__(self, address: str, tasks: Tasks) -> None:
        self._address = address
        self._tasks = tasks
        self._passed: dict[str, asyncio.Transport] = {}
        self.accepted = 0

    @property
    def connections(self) -> int:
        """Open gRPC connections."""
        return len(self._passed)

    def accept(self, http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol for a new connection."""
        return _Visitor(self, http)

    def pass_on(self, transport: asyncio.Transport, begun: bytes) -> None:
        """Connect a gRPC client with the server; `begun`: what it has sent already."""
        self.accepted += 1
        transport.pause_reading()
        self._tasks.spawn(self._connect(transport, begun), "gRPC connection")

    async def _connect(self, transport: asyncio.Transport, begun: bytes) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        name = f"{self._address}/{self.accepted}"
        near, far = _Near(self, transport, name), _End()
        near.other, far.other = far, near  # the server speaks first
        try:
            sock.bind(f"\0{name}")  # so that the server can tell whose call it is
            sock.connect(f"\0{self._address}")
            await asyncio.get_running_loop().create_unix_connection(lambda: far, sock=sock)
        except OSError:
            sock.close()
            transport.abort()
            return
        self._passed[name] = transport
        transport.set_protocol(near)
        assert far.transport is not None
        far.transport.write(begun)
        if transport.is_closing():
            far.transport.close()
            self.forget(name)
        else:
            transport.resume_reading()

    def forget(self, name: str) -> None:
        """A connection is gone."""
        self._passed.pop(name, None)

    def client(self, peer: str) -> str:
        """Address and port of the client that the server sees as `peer`."""
        transport = self._passed.get(_name(peer))
        address = transport.get_extra_info("peername") if transport is not None else None
        return f"{address[0]}:{address[1]}" if address else "gone"

    def cut(self, peer: str) -> None:
        """Reset one connection."""
        transport = self._passed.get(_name(peer))
        if transport is not None:
            reset(transport)

    def cut_all(self) -> None:
        """Reset every gRPC connection, as when the process dies."""
        for transport in list(self._passed.values()):
            reset(transport)


def _name(peer: str) -> str:
    return unquote(peer.partition(":")[2])


class _Near(_End):
    """The client's end."""

    def __init__(self, door: Door, transport: asyncio.Transport, name: str) -> None:
        super().__init__()
        self._door = door
        self.transport = transport
        self._name = name

    def connection_lost(self, error: Exception | None) -> None:
        self._door.forget(self._name)
        super().connection_lost(error)


class _Visitor(asyncio.Protocol):
    """A connection whose first bytes are still to come."""

    def __init__(self, door: Door, http: Callable[[], asyncio.Protocol]) -> None:
        self._door = door
        self._http = http
        self._begun = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._begun += data
        transport = self._transport
        if transport is None or (len(self._begun) < _ENOUGH and self._begun[0] != _TLS):
            return
        if self._begun[0] == _TLS or self._begun.startswith(_HTTP2):
            self._door.pass_on(transport, self._begun)
            self._begun = b""
            return
        protocol = self._http()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(self._begun)
