"""Errors in the three shapes that MLC's server has (microserving protocol page §7)."""

from typing import Any

from aiohttp import web

from instances.openai.refusal import answer, dump

_DETAIL = frozenset({401, 404, 405})


class Refused(Exception):
    """A call that ends in an error.

    Attributes:
        detail: FastAPI's `detail`, where the body was not valid.
    """

    def __init__(self, status: int, text: str, detail: Any = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.detail = detail


def bad_request(text: str) -> Refused:
    """The engine's own BadRequestError: 400."""
    return Refused(400, text)


def failed(why: str) -> Refused:
    """An exception that nobody handles: 500. `why` stands in the record only."""
    return Refused(500, why)


def error_answer(refused: Refused) -> web.Response:
    """422 and what the router itself refuses: `detail`; 500: plain text; the rest: JSON within a JSON string."""
    if refused.detail is not None:
        return answer({"detail": refused.detail}, refused.status)
    if refused.status in _DETAIL:
        return answer({"detail": refused.text}, refused.status)
    if refused.status == 500:
        return web.Response(status=500, text="Internal Server Error")
    inner = dump({"object": "error", "message": refused.text, "code": refused.status})
    return answer(inner.decode(), refused.status)
