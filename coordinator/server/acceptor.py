"""Accepting connections, and not going mad when there is no room for them."""

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Callable

_BACKLOG = 4096
_ACCEPTS_PER_EVENT = 64
_RETRY_S = 0.5
_WARN_EVERY_S = 10.0


class Acceptor:
    """Listening sockets of a server.

    While there is no room (by the owner's count, or because the system has no descriptor or memory left) it does not
    listen to the sockets at all: clients wait in the backlog, at no cost.

    Args:
        has_room: asked before each accept.
        take: gets each accepted socket, non-blocking, and owns it from then on.
        log: gets one warning per 10 s while the system is short of something.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        has_room: Callable[[], bool],
        take: Callable[[socket.socket], None],
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self._has_room = has_room
        self._take = take
        self._log = log
        self._clock = clock
        self._sockets: list[socket.socket] = []
        self._listening = False
        self._retry: asyncio.TimerHandle | None = None
        self._warned_s = -math.inf

    async def open(self, host: str, port: int, *, reuse_port: bool) -> int:
        """Listen on every address of a host; returns the port, which is the system's choice for 0.

        Raises:
            OSError: the host is unknown, or an address cannot be bound; nothing is left open.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        try:
            for family, address in addresses:
                sock = _bound(family, (address[0], port, *address[2:]), alone=len(addresses) == 1, shared=reuse_port)
                self._sockets.append(sock)
                port = sock.getsockname()[1]
                sock.listen(_BACKLOG)
        except OSError:
            self.close()
            raise
        self.resume()
        return port

    def resume(self) -> None:
        """There may be room again: listen (again)."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._listening and self._sockets:
            self._listening = True
            loop = asyncio.get_running_loop()
            for sock in self._sockets:
                loop.add_reader(sock, self._accept, sock)

    def close(self) -> None:
        """Stop for good and close the sockets.

        Clients in the backlog are accepted first as far as there is room: closing the socket would reset them, also
        where another process listens on the same port.
        """
        for sock in self._sockets:
            self._accept_rest(sock)
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            loop = asyncio.get_running_loop()
            for sock in self._sockets:
                loop.remove_reader(sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(_ACCEPTS_PER_EVENT):
                if not self._has_room():
                    self._pause()
                    return
                if not self._accept_one(listener):
                    return
        except OSError as error:
            self._wait(error)

    def _accept_rest(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_BACKLOG):
                if not self._has_room() or not self._accept_one(listener):
                    return

    def _accept_one(self, listener: socket.socket) -> bool:
        """Take the next client; False: there is none. Raises OSError when the system is short of something."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            return True  # this client has left already
        sock.settimeout(0)
        self._take(sock)
        return True

    def _wait(self, error: OSError) -> None:
        """Let clients wait until a connection is closed, or half a second."""
        self._pause()
        self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self.resume)
        now_s = self._clock()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            what = errno.errorcode.get(error.errno or 0, "unknown error")
            hint = ": raise the limit of open files" if error.errno == errno.EMFILE else ""
            self._log.warning("no connection can be accepted, clients wait: %s%s", what, hint)


def _bound(family: int, address: tuple[object, ...], *, alone: bool, shared: bool) -> socket.socket:
    """A bound, non-blocking TCP socket.

    What it accepts inherits TCP_NODELAY: each token goes out at once. An IPv6 wildcard that is bound alone serves IPv4,
    too.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
