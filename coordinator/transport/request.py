"""A request as bytes (RFC 9112 §3)."""

import functools
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

SAFE_TARGET = "".join(map(chr, range(0x21, 0x7F)))
WITH_LENGTH = frozenset({b"POST", b"PUT", b"PATCH"})
SMALL_BODY_BYTES = 65536
REMEMBERED_CHARS = 256
BREAKS_FRAMING = "a request line or header holds a character that would break the framing"


class Call(NamedTuple):
    """One request, ready to be written, and what must be known to read its reply.

    Attributes:
        bodiless: the reply has no body whatever it says (HEAD).
        keep: the connection is used again although the reply says `Connection: close`.
        max_head_bytes: limit of the reply's status line and headers.
    """

    head: bytes
    body: bytes
    bodiless: bool
    keep: bool = False
    max_head_bytes: int = 65536


def encode_call(
    method: bytes, target: str, host: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> tuple[bytes, bytes]:
    """Serialise a request into the two pieces to write; the second is empty where the body is small enough to join.

    Args:
        method: as on the wire, in capitals.
        target: path and query; characters outside ASCII are sent percent-encoded.
        host: value of the `Host` header.
        headers: without `host`, framing and hop-by-hop headers.
        body: `content-length` is set for it, and for any POST, PUT and PATCH.

    Raises:
        ValueError: a CR, LF or NUL in any part, or a space in the target: it would be read as something else.
    """
    start = (_known_start if len(target) < REMEMBERED_CHARS else _start)(method, target, host)
    lines = [b"%b: %b" % header for header in headers]
    if body or method in WITH_LENGTH:
        lines.append(b"content-length: %d" % len(body))
    lines += b"", b""
    breaks = len(lines) - 1
    block = b"\r\n".join(lines)
    if block.count(b"\r") != breaks or block.count(b"\n") != breaks or b"\0" in block:
        raise ValueError(BREAKS_FRAMING)
    if len(body) < SMALL_BODY_BYTES:
        return start + block + body, b""
    return start + block, body


def _start(method: bytes, target: str, host: bytes) -> bytes:
    """The request line and the `Host` header."""
    if not target.isascii():
        target = quote(target, safe=SAFE_TARGET)
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target.encode("ascii"), host)
    if start.count(b"\r") != 2 or start.count(b"\n") != 2 or b"\0" in start or " " in target:
        raise ValueError(BREAKS_FRAMING)
    return start


_known_start = functools.lru_cache(1024)(_start)
