"""Errors in the shape of vLLM's server."""

from typing import Any

from instances.openai.refusal import Refused

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_value(refused: Refused) -> dict[str, Any]:
    """`{"error":{message,type,param,code}}`; the code is the status, as a number."""
    kind = _TYPES.get(refused.status, "InternalServerError")
    return {"error": {"message": refused.text, "type": kind, "param": refused.param, "code": refused.status}}
