"""Whose word about a client's address counts, and what it says."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from coordinator.security.keys import RawHeaders

_MAX_HOPS: Final = 20
_MAX_KNOWN: Final = 4096
_FOR = re.compile(rb'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^;,"\s]+))', re.IGNORECASE)

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Finds a client's address behind proxies; for logs alone, nothing is decided by it.

    A header counts only where it comes from a trusted network, and only as far back as trusted proxies have written
    it: the last address that is none of theirs is the client's. Whatever stands before that, the client may have made
    up. Where `X-Forwarded-For` and `Forwarded` (RFC 7239) are both there and differ, one of them is not the proxy's:
    then neither counts.

    Args:
        networks: in CIDR form.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks: tuple[_Network, ...] = tuple(map(ipaddress.ip_network, networks))
        self._known: dict[str, bool] = {}

    def client(self, peer: str, headers: RawHeaders) -> str:
        """The address of the client behind `peer`, which is the connection's own. Hot."""
        if not self._networks or not self._trusts(peer):
            return peer
        chains = {b"x-forwarded-for": list[str](), b"forwarded": list[str]()}
        for name, value in headers:
            if name == b"x-forwarded-for":
                chains[name] += map(_plain, value.split(b","))
            elif name == b"forwarded":
                chains[name] += map(_of_element, _elements(value))
        told = {self._behind(peer, chain) for chain in chains.values() if chain}
        return told.pop() if len(told) == 1 else peer

    def _behind(self, peer: str, chain: list[str]) -> str:
        """Walk back from the nearest hop for as long as each is trusted."""
        client = peer
        for hop in reversed(chain[-_MAX_HOPS:]):
            if not hop:
                break
            client = hop
            if not self._trusts(hop):
                break
        return client

    def _trusts(self, text: str) -> bool:
        known = self._known.get(text)
        if known is not None:
            return known
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        found = self._known[text] = any(address in network for network in self._networks)
        return found


def _elements(value: bytes) -> list[bytes]:
    """The elements of a `Forwarded` value; a comma within quotes parts nothing."""
    return [part.replace(b"\0", b",") for part in _QUOTED.sub(_hide_commas, value).split(b",")]


def _hide_commas(found: re.Match[bytes]) -> bytes:
    return found[0].replace(b",", b"\0")


_QUOTED = re.compile(rb'"[^"]*"')


def _of_element(element: bytes) -> str:
    found = _FOR.search(element)
    return "" if found is None else _plain(found[1] if found[1] is not None else found[2])


def _plain(text: bytes) -> str:
    """An address without its port and brackets, in its usual form; empty for what is none (RFC 7239 §6.2, §6.3)."""
    node = text.strip().decode("latin-1")
    if node.startswith("["):
        node = node[1:].partition("]")[0]
    elif node.count(":") == 1:
        node = node.partition(":")[0]
    try:
        address = ipaddress.ip_address(node)
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
