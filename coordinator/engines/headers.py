"""Headers of calls to engines that speak plain HTTP."""

from coordinator.core.request import Headers, Request

JSON_TYPE = (b"content-type", b"application/json")


def engine_headers(request: Request, wire_id: str) -> Headers:
    """The client's end-to-end headers with our own id, and JSON whatever the client called it.

    Engines refuse a body that is not called JSON; what clients send there never matters to us.
    """
    passed = [header for header in request.headers if header[0] != b"content-type"]
    return (*passed, JSON_TYPE, (b"x-request-id", wire_id.encode()))
