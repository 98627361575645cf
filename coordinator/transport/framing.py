"""How the body of a reply is framed and encoded (RFC 9112 §6.3)."""

from typing import NamedTuple

from .reply import Headers

NO_BODY = (204, 304)


class Framing(NamedTuple):
    """What a head says of the body behind it.

    Attributes:
        chunked: it comes in chunks.
        measured: its length is known, and its bytes come as they are.
        until_close: it ends when the connection does (rule 8).
        encoding: its `Content-Encoding` in lower case; `nested` for several; empty where there is no body.
        odd: it has another transfer coding than chunked, and cannot be read.
    """

    chunked: bool
    measured: bool
    until_close: bool
    encoding: bytes
    odd: bool


def framing_of(status: int, headers: Headers, *, bodiless: bool) -> Framing:
    """Read a head, names in lower case. `bodiless`: the request was one whose reply never has a body."""
    bodiless = bodiless or status in NO_BODY
    measured = chunked = odd = False
    encoding = b""
    for name, value in headers:
        if name == b"content-length":
            measured = True
        elif name == b"transfer-encoding":
            chunked = value.lower() == b"chunked"
            odd = odd or not chunked
        elif name == b"content-encoding":
            encoding = b"nested" if encoding else value.lower()
    return Framing(
        chunked=chunked,
        measured=measured and not (chunked or odd or encoding or bodiless),
        until_close=not (bodiless or measured or chunked or odd),
        encoding=b"" if bodiless else encoding,
        odd=odd,
    )
