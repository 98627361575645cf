"""Which of a client's headers travel on to an engine, and what its request id may be."""

import functools
from collections.abc import Iterable

from coordinator.core.request import Headers
from coordinator.security.keys import CREDENTIALS

MAX_ID_CHARS = 128
_ID_CHARS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:@/+=~%-")

# RFC 9110 §7.6.1 hop by hop, RFC 9112 framing, what we answer ourselves, what names a host or an encoding of this hop
_OURS = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings", b"content-length", b"content-encoding",
        b"expect", b"host", b"accept-encoding", b"x-request-id",
    )
)  # fmt: skip
# engines and sidecars take orders from these: a client may give none (MindIE protocol page §4.1; llm-d; vLLM). What it
# says of its own address goes no further either: an engine may trust us, and would take it for ours
_CONTROL = frozenset(
    (
        b"req-id", b"req-type", b"d-target", b"d-port", b"is-recompute", b"dp-instance-id", b"prefill-id",
        b"forwarded", b"x-real-ip",
    )
)  # fmt: skip
_CONTROL_PREFIXES = (
    b"x-forwarded-",
    b"x-prefill",
    b"x-decode",
    b"x-data-parallel",
    b"x-encoder",
    b"x-pd-",
    b"x-kv-",
    b"x-gateway-",
)


def forwardable(headers: Headers, *, credentials: bool = True) -> Headers:
    """A client's end-to-end headers without any that would steer, frame or address the call to the engine.

    Without `credentials` its keys stay here, too: they are ours then.
    """
    kept = [header for header in headers if _travels(header[0])]
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = {token.strip().lower() for value in named for token in value.split(b",")}
        kept = [header for header in kept if header[0] not in dropped]
    if not credentials:
        kept = [header for header in kept if header[0] not in CREDENTIALS]
    return tuple(kept)


@functools.lru_cache(512)
def _travels(name: bytes) -> bool:
    """Whether a header of this name may go on, as far as its name tells."""
    return name not in _OURS and name not in _CONTROL and not name.startswith(_CONTROL_PREFIXES)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The client's own X-Request-Id; None when there is none, several, or one that no log line should carry."""
    found = [value for name, value in headers if name == b"x-request-id"]
    if len(found) != 1 or not 0 < len(found[0]) <= MAX_ID_CHARS or not _ID_CHARS.issuperset(found[0]):
        return None
    return found[0].decode("ascii")
