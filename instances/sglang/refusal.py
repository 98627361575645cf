"""Errors in the shapes of SGLang's server."""

from http import HTTPStatus
from typing import Any

from aiohttp import web

from instances.openai.refusal import Refused, answer

ABORTED = "Aborted by AbortReq."


def error_value(refused: Refused) -> dict[str, Any]:
    """The object of an error; the code is the status, as a number."""
    known = refused.status in HTTPStatus.__members__.values()
    kind = HTTPStatus(refused.status).phrase.replace(" ", "") if known else str(refused.status)
    return {"object": "error", "message": refused.text, "type": kind, "param": refused.param, "code": refused.status}


def error_event(refused: Refused) -> dict[str, Any]:
    """In a stream the object stands under `error`."""
    return {"error": error_value(refused)}


def error_answer(refused: Refused, *, native: bool) -> web.Response:
    """At the top of the answer on OpenAI paths; `{"error":{"message"}}` for a bad request on native ones."""
    if native and refused.status == HTTPStatus.BAD_REQUEST:
        return answer({"error": {"message": refused.text}}, refused.status)
    return answer(error_value(refused), refused.status)
