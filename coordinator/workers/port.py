"""One data port for several processes."""

import contextlib
import socket


class ReservedPort:
    """Holds a port without listening on it, so that every worker gets the same one and nobody else gets it between.

    Attributes:
        port: the real one; 0 asks the system for any.

    Raises:
        OSError: the host is unknown, or somebody listens there, be it another coordinator that shares its port too.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self._sockets: list[socket.socket] = []
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        try:
            for family, address in addresses:
                self._reserve(family, address, alone=len(addresses) == 1)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give it back."""
        while self._sockets:
            self._sockets.pop().close()

    def _reserve(self, family: int, address: tuple[object, ...], *, alone: bool) -> None:
        at = (address[0], self.port, *address[2:])
        if self.port:
            # SO_REUSEPORT would let us in beside whoever shares the port already
            with contextlib.closing(_bound(family, at, alone=alone, shared=False)):
                pass
        sock = _bound(family, at, alone=alone, shared=True)
        self._sockets.append(sock)
        self.port = sock.getsockname()[1]


def _bound(family: int, address: tuple[object, ...], *, alone: bool, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
