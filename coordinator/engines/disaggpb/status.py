"""From gRPC's words for a failed call to our errors. Knows the words only, not the library."""

from coordinator.core.errors import EngineFailed, EngineRefused, KvTooLarge, RequestError
from coordinator.core.instance import Instance
from coordinator.engines.http_leg import side_of

CALLER_IS_WRONG = {"INVALID_ARGUMENT": 400, "OUT_OF_RANGE": 400, "FAILED_PRECONDITION": 400, "NOT_FOUND": 404}
TOO_LONG = "larger than max"
NO_CONNECTION = ("failed to connect", "connections to all backends failing", "resolution failed", "resolver")
CONNECT_REASONS = (
    ("refused", "connect_refused"),
    ("resol", "dns_failed"),
    ("handshake", "tls_failed"),
    ("ssl", "tls_failed"),
    ("certificate", "tls_failed"),
    ("verification", "tls_failed"),
    ("timed out", "connect_timeout"),
    ("timeout", "connect_timeout"),
)
OTHER_REASONS = {  # clients' own credentials do not travel to workers, so it is ours that are refused
    "UNIMPLEMENTED": "bad_reply",
    "UNAUTHENTICATED": "key_refused",
    "PERMISSION_DENIED": "key_refused",
}
BROKEN = ("socket closed", "reset", "broken pipe", "goaway", "recvmsg", "sendmsg", "transport", "keepalive", "ping")
MOST_DETAIL_CHARS = 300


def call_failed(instance: Instance, code: str, details: str) -> RequestError:
    """The error for a call that ended with a status.

    Args:
        instance: which was called.
        code: the status by its name, like `UNAVAILABLE`.
        details: its text, which the engine or gRPC itself has written.
    """
    words = details.lower()
    if code in CALLER_IS_WRONG:
        status = CALLER_IS_WRONG[code]
        return EngineRefused(status, details[:MOST_DETAIL_CHARS] or f"the engine refused the request ({code})")
    if code == "RESOURCE_EXHAUSTED" and TOO_LONG in words:
        error = KvTooLarge(f"the prompt is too long: its KV is above what one message of {side_of(instance)} may hold")
        error.detail = f"{instance.id}: {details[:MOST_DETAIL_CHARS]}"
        return error
    if code == "UNAVAILABLE" and any(word in words for word in NO_CONNECTION):
        reason = next((reason for word, reason in CONNECT_REASONS if word in words), "connect_failed")
        return _failed(instance, reason, code, details, connecting=True)
    if code == "CANCELLED" or (code == "UNAVAILABLE" and (not words or any(word in words for word in BROKEN))):
        return _failed(instance, "reset", code, details)
    if code == "DEADLINE_EXCEEDED":
        return _failed(instance, "timeout", code, details)
    return _failed(instance, OTHER_REASONS.get(code, "engine_error"), code, details)


def _failed(instance: Instance, reason: str, code: str, details: str, *, connecting: bool = False) -> EngineFailed:
    detail = f"{code}: {details[:MOST_DETAIL_CHARS]}"
    return EngineFailed(side_of(instance), instance.id, reason, detail=detail, connecting=connecting)
