"""How each address is spoken to: with which certificates, and with which key."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.core.instance import Address


@dataclass(frozen=True, slots=True)
class Peer:
    """How one is spoken to.

    Attributes:
        context: for https; None: certificates are checked against the system's authorities.
        server_name: the name that its certificate must have; None: the host of its address.
        key: what it gets as bearer token, in place of any credentials that a request carries; empty: nothing.
    """

    context: ssl.SSLContext | None = None
    server_name: str | None = None
    key: bytes = b""


NOBODY: Final = Peer()


class Peers:
    """Finds out how an address is spoken to.

    Args:
        default: for those that have nothing of their own.
    """

    def __init__(self, default: Peer = NOBODY) -> None:
        self._default = default
        self._of: dict[Address, Peer] = {}
        self._others: set[Address] = set()

    def of(self, address: Address) -> Peer:
        """How an address is spoken to. Hot."""
        return self._of.get(address, self._default)

    def take(self, default: Peer, of: Mapping[Address, Peer]) -> None:
        """Take these in place of those before; connections that are open live on."""
        self._default = default
        self._of = {**of, **{address: Peer(default.context, default.server_name) for address in self._others}}

    def no_engine(self, address: Address) -> None:
        """Give an address no engine's key: something else is there."""
        self._others.add(address)
        self._of[address] = Peer(self._default.context, self._default.server_name)
