"""What the status codes of results mean for a request (xLLM protocol page §6)."""

from http import HTTPStatus

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Instance
from coordinator.core.ports import Placement

CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE, OLD_UNAVAILABLE = range(1, 8)

REASONS = {
    CANCELLED: ("cancelled", HTTPStatus.SERVICE_UNAVAILABLE),
    DEADLINE_EXCEEDED: ("engine_deadline", HTTPStatus.GATEWAY_TIMEOUT),
    RESOURCE_EXHAUSTED: ("overloaded", HTTPStatus.TOO_MANY_REQUESTS),
    UNAVAILABLE: ("unavailable", HTTPStatus.SERVICE_UNAVAILABLE),
    OLD_UNAVAILABLE: ("unavailable", HTTPStatus.SERVICE_UNAVAILABLE),
}
NO_SUCH_MODEL = "Model not supported"
ABOUT_THE_PAIR = ("incompatible", "decode instance", "No decode address")  # invalid, but not by the client's doing
NOT_ADDED = "Failed to add new requests to decode instance"  # prefill's word for a call that decode did not take
MAX_CHARS = 300
RETRY_AFTER_S = 1


def error_of(code: int, message: str, side: Side, instance: Instance, *, started: bool) -> RequestError:
    """The error of a request whose result has a status other than 0.

    What another instance may do better is retryable; when nobody does, the client is told the status of the page.

    Args:
        code: status_code.
        message: status_msg, which the client may see.
        side: prefill, or decode once prefill is over.
        instance: of that side.
        started: a part of the answer is at the client, for which a status comes too late.
    """
    text = message[:MAX_CHARS]
    if not started and code == INVALID_ARGUMENT and not any(word in text for word in ABOUT_THE_PAIR):
        return EngineRefused(HTTPStatus.BAD_REQUEST, text or "the engine refused the request")
    if not started and code == UNKNOWN and NO_SUCH_MODEL in text:
        return EngineRefused(HTTPStatus.NOT_FOUND, text)
    reason, status = REASONS.get(code, ("engine_error", HTTPStatus.BAD_GATEWAY))
    failure = EngineFailed(side, instance.id, reason, detail=f"status {code}: {text}")
    failure.status = status
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        failure.retry_after_s = RETRY_AFTER_S
    if text and code != CANCELLED:
        failure.message = f"the {side} instance failed: {text}"
    return failure


def error_of_prefill(code: int, message: str, placement: Placement, *, started: bool) -> RequestError:
    """The same for what prefill says before its token: of decode, where that did not take the request from it.

    What concerns the pair may be the fault of either instance, so the next placement avoids both.
    """
    prefill, decode = placement.prefill, placement.decode
    if NOT_ADDED in message:
        error = error_of(code, message, Side.DECODE, decode, started=started)
    else:
        error = error_of(code, message, Side.PREFILL, prefill, started=started)
    if isinstance(error, EngineFailed) and any(word in message for word in ABOUT_THE_PAIR):
        error.doubted = prefill.id if error.side is Side.DECODE else decode.id
        if error.side is Side.DECODE:
            error.reason = "handoff_failed"
    return error
