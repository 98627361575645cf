"""Opening a connection: names, time limit, TLS, and one error type for all that can go wrong."""

import asyncio
import contextlib
import math
import ssl
from collections.abc import Callable
from typing import TypeVar

from coordinator.core.instance import Address

from .errors import TransportError, connect_error
from .peers import Peers
from .resolve import Resolver

P = TypeVar("P", bound=asyncio.Protocol)


class Connector:
    """Opens TCP and TLS connections.

    Args:
        connect_s: limit of look-up, TCP connect and TLS handshake together; 0: none.
        peers: with which certificates https addresses are spoken to.
    """

    def __init__(self, *, connect_s: float, peers: Peers | None = None, resolver: Resolver | None = None) -> None:
        self._connect_s = connect_s or math.inf
        self._peers = peers or Peers()
        self._context: ssl.SSLContext | None = None
        self._resolver = resolver or Resolver()

    def limit(self, connect_s: float) -> None:
        """Have this limit from here on; 0: none."""
        self._connect_s = connect_s or math.inf

    async def open(self, address: Address, factory: Callable[[], P], remaining_s: float = math.inf) -> P:
        """Connect and return the protocol made by `factory`, of the connection that succeeded.

        Cancellation closes the half-open socket.

        Args:
            address: host and port to connect to.
            factory: makes the protocol; called once per try, for a name may stand for several addresses.
            remaining_s: what is left of the caller's own deadline.

        Raises:
            TransportError: `timeout` where the caller's deadline was the nearer limit, else one of `connect_refused`,
                `connect_timeout`, `connect_failed`, `dns_failed`, `tls_failed`. Always `unsent`.
        """
        limit_s = min(self._connect_s, remaining_s)
        try:
            async with asyncio.timeout(None if limit_s == math.inf else max(limit_s, 0.0)):
                return await self._any_host(address, factory, limit_s)
        except TimeoutError as error:
            self._resolver.forget(address.host)
            if limit_s < self._connect_s:
                raise TransportError("timeout", f"{address.netloc}: while connecting", unsent=True) from error
            raise connect_error(error, f"{address.netloc}: no connection within {limit_s:g} s") from error

    async def _any_host(self, address: Address, factory: Callable[[], P], limit_s: float) -> P:
        """Try the addresses of a name one after the other; each gets its share of the time."""
        try:
            hosts = await self._resolver.resolve(address.host)
        except OSError as error:
            raise TransportError("dns_failed", f"{address.netloc}: {error}", connecting=True, unsent=True) from error
        share_s = limit_s / len(hosts) if limit_s < math.inf else None
        *others, last = hosts
        for host in others:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(share_s):
                    return await self._one_host(address, host, factory)
        try:
            return await self._one_host(address, last, factory)
        except OSError as error:
            self._resolver.forget(address.host)
            raise connect_error(error, address.netloc) from error

    async def _one_host(self, address: Address, host: str, factory: Callable[[], P]) -> P:
        loop = asyncio.get_running_loop()
        if not address.tls:
            return (await loop.create_connection(factory, host, address.port))[1]
        peer = self._peers.of(address)
        context, name = peer.context or self._system(), peer.server_name or address.host
        return (await loop.create_connection(factory, host, address.port, ssl=context, server_hostname=name))[1]

    def _system(self) -> ssl.SSLContext:
        """A context with the system's authorities."""
        if self._context is None:
            self._context = ssl.create_default_context()
        return self._context
