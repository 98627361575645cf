"""The sockets of an instance that listen, and those that will."""

import asyncio
import socket
import time

_REBIND_S = 5.0
_REBIND_PAUSE_S = 0.005


class OwnSite:
    """A listening socket whose connections an engine accepts."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    async def stop(self) -> None:
        """Close the socket."""
        self._server.close()


def bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: the port is known, connections are refused."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def bound_again(host: str, port: int) -> socket.socket:
    """The same for a port that has just been closed, which may take a moment to show; raises OSError after 5 s."""
    until_s = time.monotonic() + _REBIND_S
    while True:
        try:
            return bound(host, port)
        except OSError:
            if time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_REBIND_PAUSE_S)
