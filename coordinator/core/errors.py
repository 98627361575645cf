"""The one error tree of the coordinator.

Each error says what the client may see (status, stable code, message), what metrics call it (outcome), whether another
placement may help (retryable), which side is to blame and, for the log alone, an internal detail. Foreign errors are
translated into these at one place each: `transport` for sockets, `api` for bodies.
"""

from enum import StrEnum


class Side(StrEnum):
    """Who is to blame for a failure."""

    CLIENT = "client"
    COORDINATOR = "coordinator"
    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """How a request ended: the values of the metric label `outcome` and of the log field of that name."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    CLIENT_GONE = "client_gone"
    SLOW_CLIENT = "slow_client"
    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"
    ENGINE_ERROR = "engine_error"
    DEADLINE = "deadline"
    INTERNAL_ERROR = "internal_error"


class RequestError(Exception):
    """A request that ends in something other than its answer.

    Args:
        message: text for the client; never an address, a path or an exception's text.
        detail: text for the log only.
        retry_after_s: whole seconds for `Retry-After`, or None.
    """

    status = 500
    code = "internal_error"
    outcome = Outcome.INTERNAL_ERROR
    side = Side.COORDINATOR
    retryable = False

    def __init__(self, message: str, *, detail: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.retry_after_s = retry_after_s


class InternalError(RequestError):
    """A fault of our own, or of a plug-in; the log has the traceback."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("internal error of the coordinator", detail=detail)


# --- what the client did wrong


class BadRequest(RequestError):
    """The body or a header is not what the API family asks for."""

    status = 400
    code = "invalid_request"
    outcome = Outcome.CLIENT_ERROR
    side = Side.CLIENT


class InvalidKey(BadRequest):
    """The call carries no API key, or one that is not valid."""

    status = 401
    code = "invalid_api_key"


class UnknownPath(BadRequest):
    """No API family serves this path."""

    status = 404
    code = "unknown_path"


class UnknownModel(BadRequest):
    """No instance serves this model name."""

    status = 404
    code = "model_not_found"


class WrongMethod(BadRequest):
    """The path is served, but not with this method; `allow` lists those that are."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(BadRequest):
    """The body, or what it expands to, is above `limits.max_body_bytes`."""

    status = 413
    code = "body_too_large"


class KvTooLarge(BadRequest):
    """The KV of the prompt is above what the coordinator, or decode, takes for one request."""

    status = 413
    code = "kv_too_large"


class UnsupportedEncoding(BadRequest):
    """The body's `Content-Encoding` cannot be read here."""

    status = 415
    code = "unsupported_encoding"


class UnknownExpectation(BadRequest):
    """An `Expect` other than `100-continue`."""

    status = 417
    code = "expectation_failed"


class HeadersTooLarge(BadRequest):
    """The request line and headers are above `limits.max_header_bytes`."""

    status = 431
    code = "headers_too_large"


class EngineRefused(RequestError):
    """An engine answered 4xx: its status and message go to the client, nobody is charged, nothing is retried."""

    code = "engine_refused"
    outcome = Outcome.CLIENT_ERROR
    side = Side.CLIENT

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status


class ClientGone(RequestError):
    """The client closed its connection before it had its answer; there is nobody left to tell."""

    status = 499
    code = "client_gone"
    outcome = Outcome.CLIENT_GONE
    side = Side.CLIENT


class SlowClient(RequestError):
    """The client let more than `limits.stream_buffer_bytes` pile up and was cut off."""

    status = 499
    code = "slow_client"
    outcome = Outcome.SLOW_CLIENT
    side = Side.CLIENT


# --- what we cannot do now


class TooManyRequests(RequestError):
    """`limits.max_requests` live requests, or `limits.max_queue` waiting ones, are there already."""

    status = 429
    code = "too_many_requests"
    outcome = Outcome.REJECTED

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class KeyLimitReached(TooManyRequests):
    """The API key has as many requests in flight, or has made as many within a minute, as it may."""

    code = "rate_limit_exceeded"


class KvMemoryFull(RequestError):
    """The memory for KV on its way through the coordinator is taken, and did not become free in time."""

    status = 503
    code = "kv_memory_full"
    outcome = Outcome.REJECTED

    def __init__(self, message: str, *, detail: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, detail=detail, retry_after_s=retry_after_s)


class NoInstance(RequestError):
    """No schedulable prefill and decode pair (or hybrid) for this request."""

    status = 503
    code = "no_instance"
    outcome = Outcome.UNAVAILABLE

    def __init__(self, message: str, *, detail: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, detail=detail, retry_after_s=retry_after_s)


class Draining(RequestError):
    """The coordinator is shutting down and takes no new request."""

    status = 503
    code = "draining"
    outcome = Outcome.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__("the server is shutting down", retry_after_s=1)


class DeadlineExceeded(RequestError):
    """A deadline of `timeouts` passed; `stage` is the key without its unit: schedule, first_token, ..."""

    status = 504
    code = "deadline_exceeded"
    outcome = Outcome.DEADLINE

    def __init__(self, stage: str) -> None:
        super().__init__(f"the request ran into its {stage.replace('_', ' ')} deadline")
        self.stage = stage


# --- what an engine did wrong


class EngineFailed(RequestError):
    """An instance failed a request that another placement may still serve.

    Args:
        side: the guilty leg.
        instance_id: the guilty instance; the only one that is charged at once.
        reason: a word from a bounded set, the value of the metric label `reason`.
        connecting: no connection could be made at all: the instance itself is in doubt, not just this request.

    Attributes:
        doubted: id of the other instance of the pair, where it may be the guilty one all the same: the next placement
            avoids it as well, and it is charged if other requests show that it was.
    """

    status = 502
    code = "engine_failed"
    outcome = Outcome.ENGINE_ERROR
    retryable = True

    def __init__(
        self, side: Side, instance_id: str, reason: str, *, detail: str = "", connecting: bool = False
    ) -> None:
        super().__init__(f"the {side} instance failed ({reason.replace('_', ' ')})", detail=detail)
        self.side = side
        self.instance_id = instance_id
        self.reason = reason
        self.connecting = connecting
        self.doubted = ""
