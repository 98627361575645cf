"""A request that ends in an error."""

import json
from typing import Any

from aiohttp import web


class Refused(Exception):
    """An error answer, or an error event if the answer is a stream that began.

    Attributes:
        param: the field that is to blame, where the engine says so.
    """

    def __init__(self, status: int, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.param = param


def invalid(text: str, param: str | None = None) -> Refused:
    """A body that the engine does not take: 400."""
    return Refused(400, text, param)


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates of split characters show as question marks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(status=status, body=dump(value), content_type="application/json")


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object; numbers keep every digit. Raises Refused (400).

    Both engines refuse a body that is not declared as JSON, and neither expands a compressed one.
    """
    if request.content_type != "application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    if "Content-Encoding" in request.headers:
        raise invalid("JSON decode error")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise invalid("JSON decode error") from None
    if not isinstance(body, dict):
        raise invalid("Input should be a valid dictionary")
    return body
