"""A request as bytes (RFC 9112 §3)."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

SAFE_TARGET = "".join(map(chr, range(0x21, 0x7F)))
WITH_LENGTH = frozenset({b"POST", b"PUT", b"PATCH"})
SMALL_BODY_BYTES = 65536


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
    if not target.isascii():
        target = quote(target, safe=SAFE_TARGET)
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method, target.encode("ascii"), host)]
    lines += [b"%b: %b" % header for header in headers]
    if body or method in WITH_LENGTH:
        lines.append(b"content-length: %d" % len(body))
    breaks = len(lines)  # one inside the first item, one between each two
    head = b"\r\n".join(lines)
    if head.count(b"\r") != breaks or head.count(b"\n") != breaks or b"\0" in head or " " in target:
        raise ValueError("a request line or header holds a character that would break the framing")
    if len(body) < SMALL_BODY_BYTES:
        return b"%b\r\n\r\n%b" % (head, body), b""
    return head + b"\r\n\r\n", body
