"""Headers of calls to engines that speak plain HTTP."""

import functools

from coordinator.core.request import Headers, Request
from coordinator.transport.request import HeaderBlock

JSON_TYPE = (b"content-type", b"application/json")


def engine_headers(request: Request, wire_id: str) -> Headers:
    """The client's end-to-end headers with our own id, and JSON whatever the client called it.

    Engines refuse a body that is not called JSON; what clients send there never matters to us.
    """
    return (*_typed(request.headers), (b"x-request-id", wire_id.encode()))


def engine_block(request: Request, wire_id: str) -> HeaderBlock:
    """The same, written down."""
    return HeaderBlock(((b"x-request-id", wire_id.encode()),), _written(request.headers))


def _typed(headers: Headers) -> Headers:
    return (*(header for header in headers if header[0] != b"content-type"), JSON_TYPE)


@functools.lru_cache(256)  # clients send the same ones again and again
def _written(headers: Headers) -> HeaderBlock:
    return HeaderBlock(_typed(headers))
