"""A request as bytes (RFC 9112 §3)."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

from coordinator.core.body import RequestBody
from coordinator.core.instance import Address

SAFE_TARGET = "".join(map(chr, range(0x21, 0x7F)))
WITH_LENGTH = frozenset({b"POST", b"PUT", b"PATCH"})
SMALL_BODY_BYTES = 65536
REMEMBERED_CHARS = 256
CREDENTIALS = re.compile(rb"^(?:authorization|x-api-key|api-key):[^\r]*\r\n", re.IGNORECASE | re.MULTILINE)
NUL = 0
BREAKS_FRAMING = "a request line or header holds a character that would break the framing"


class Call(NamedTuple):
    """One request, ready to be written, and what must be known to read its reply.

    Attributes:
        bodiless: the reply has no body whatever it says (HEAD).
        keep: the connection is used again although the reply says `Connection: close`.
        max_head_bytes: limit of the reply's status line and headers.
        flowing: the reply comes in many small pieces, each of which the peer sends at once.
    """

    head: bytes
    body: RequestBody
    bodiless: bool
    keep: bool = False
    max_head_bytes: int = 65536
    flowing: bool = False


class HeaderBlock:
    """Headers that are written down once, for several requests.

    Raises:
        ValueError: a CR, LF or NUL in a name or value.
    """

    __slots__ = ("lines",)

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        pairs = [b"%b: %b\r\n" % header for header in headers]
        self.lines = lines = b"".join(pairs)
        if lines.count(b"\r") != len(pairs) or lines.count(b"\n") != len(pairs) or NUL in lines:
            raise ValueError(BREAKS_FRAMING)


GivenHeaders = Iterable[tuple[bytes, bytes]] | HeaderBlock


def encode_call(
    method: bytes, target: str, address: Address, headers: GivenHeaders, body: RequestBody, key: bytes = b""
) -> tuple[bytes, RequestBody]:
    """Serialise a request into the two pieces to write; the second is empty where the body is small enough to join.

    Args:
        method: as on the wire, in capitals.
        target: path and query; characters outside ASCII are sent percent-encoded.
        address: where to, for the `Host` header.
        headers: without `host`, framing and hop-by-hop headers.
        body: `content-length` is set for it, and for any POST, PUT and PATCH.
        key: sent as bearer token, in place of all credentials among the headers; empty: these stay.

    Raises:
        ValueError: a CR, LF or NUL in any part, or a space in the target: it would be read as something else.
    """
    start = (_known_start if len(target) < REMEMBERED_CHARS else _start)(method, target, address)
    block = headers if isinstance(headers, HeaderBlock) else HeaderBlock(headers)
    lines = block.lines if not key else _with_key(block.lines, key)
    size = len(body)
    if not size and method not in WITH_LENGTH:
        return b"%b%b\r\n" % (start, lines), b""
    if size < SMALL_BODY_BYTES:
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (start, lines, size, bytes(body)), b""
    return b"%b%bcontent-length: %d\r\n\r\n" % (start, lines, size), body


def _with_key(lines: bytes, key: bytes) -> bytes:
    return b"%bauthorization: Bearer %b\r\n" % (CREDENTIALS.sub(b"", lines), key)


def _start(method: bytes, target: str, address: Address) -> bytes:
    """The request line and the `Host` header."""
    if not target.isascii():
        target = quote(target, safe=SAFE_TARGET)
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target.encode("ascii"), address.netloc.encode())
    if start.count(b"\r") != 2 or start.count(b"\n") != 2 or NUL in start or " " in target:
        raise ValueError(BREAKS_FRAMING)
    return start


_known_start = functools.lru_cache(1024)(_start)
