"""The URL of an instance: scheme, host, port and nothing else."""

import ipaddress
import re

from coordinator.core.instance import Address

from .errors import Refusal, shown

_DEFAULT_PORT = {"http": 80, "https": 443}
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_NAME_CHARS = 253
_MAX_PORT = 65535
_SHOWN_DIGITS = 20


def parse_url(url: str) -> Address:
    """Read `http[s]://host[:port]`; an IPv6 address stands in brackets (RFC 3986 §3.2.2).

    Raises:
        Refusal: in plain words, where it is anything else.
    """
    if any(char <= " " or char == "\x7f" for char in url):
        raise Refusal("the URL must not hold spaces or control characters")
    scheme, mark, rest = url.partition("://")
    if not mark:
        raise Refusal("the URL must begin with http:// or https://", _with_scheme(url))
    scheme = scheme.lower()
    if scheme not in _DEFAULT_PORT:
        raise Refusal(f"the URL must begin with http:// or https://, not {shown(scheme + '://')}")
    rest = rest.removesuffix("/")
    if "@" in rest:
        raise Refusal("the URL must not hold a user name or password")
    if any(char in rest for char in "/?#\\"):
        raise Refusal("the URL must end after host and port: no path, query or fragment")
    host, port = _split(rest)
    return Address(host, _port(port, _DEFAULT_PORT[scheme]), tls=scheme == "https")


def host_of(text: str) -> str:
    """A bare host: a name, an IPv4 or an IPv6 address (in lower case, compressed; brackets are taken off).

    Raises:
        Refusal: in plain words, where it is none of these.
    """
    if text.startswith("[") and text.endswith("]"):
        return _ipv6(text[1:-1])
    if text.count(":") > 1:
        return _ipv6(text)
    labels = text.removesuffix(".").split(".")
    if len(text) > _MAX_NAME_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise Refusal(f"{shown(text)} is not a host name or an IP address")
    if labels[-1].isdigit():
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise Refusal(f"{shown(text)} is not an IPv4 address") from None
    return text.lower()


def _with_scheme(url: str) -> str | None:
    try:
        host, port = _split(url.removesuffix("/"))
        _port(port, 80)
    except Refusal:
        return None
    return f"did you mean 'http://{url}'?" if host else None


def _split(text: str) -> tuple[str, str | None]:
    """Host and, where there is one, the port's text."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise Refusal("the brackets around the IPv6 address are not closed before the port")
        return _ipv6(host), rest[1:] if rest else None
    if text.count(":") > 1:
        raise Refusal("an IPv6 address stands in brackets, like http://[::1]:9001")
    host, colon, port = text.partition(":")
    if not host:
        raise Refusal("the URL has no host")
    return host_of(host), port if colon else None


def _ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise Refusal(f"{shown(text)} is not an IPv6 address") from None
    if address.scope_id is not None:
        raise Refusal(f"the IPv6 address {shown(text)} must not have a zone")
    return str(address)


def _port(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise Refusal(f"the port {shown(text)} is not a number")
    digits = text[:_SHOWN_DIGITS]
    if not 1 <= int(digits) <= _MAX_PORT:
        raise Refusal(f"the port {digits} is not in 1..{_MAX_PORT}")
    return int(digits)
