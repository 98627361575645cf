"""Errors in the shape of the MindIE engine (MindIE protocol page §4.4)."""

import json

from aiohttp import web

_TYPES = {
    400: "Bad Request",
    404: "NotFoundError",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}


class Refused(Exception):
    """A request that ends in an error answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def invalid(text: str) -> Refused:
    """A body that the engine does not take: 422."""
    return Refused(422, text)


def error_response(status: int, text: str) -> web.Response:
    """`{"error":text,"error_type":type}` with the type that belongs to the status."""
    body = json.dumps({"error": text, "error_type": _TYPES.get(status, "Generation Error")}, separators=(",", ":"))
    return web.Response(status=status, body=body.encode(), content_type="application/json")


def too_large(limit_bytes: int) -> web.Response:
    """413 for a body above the limit."""
    text = f"Request body too large. Maximum allowed size is {limit_bytes >> 20}MB."
    return web.Response(
        status=413, body=json.dumps({"message": text}, separators=(",", ":")).encode(), content_type="application/json"
    )
