"""Whose failure it is when a request does not get from prefill to decode."""

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Instance
from coordinator.wire.refusal import message_of

NOT_HANDED_OVER = "[P Node] Send D request failed"  # MindIE protocol page §4.4
KV_NOT_PULLED = "Pull kv failed"  # §5.3


def not_handed_over(status: int, body: bytes) -> bool:
    """Whether prefill says that decode did not take the request from it."""
    return status >= 500 and message_of(body, status).lstrip().startswith(NOT_HANDED_OVER)


def handoff_failed(prefill: Instance, decode: Instance) -> EngineFailed:
    """The error for that: prefill is alive and says so, but the way between them may be what is broken."""
    error = EngineFailed(Side.DECODE, decode.id, "handoff_failed", detail=f"says {prefill.id}")
    error.doubted = prefill.id
    return error


def doubt(error: BaseException, prefill: Instance) -> None:
    """Have the next placement avoid prefill, too, where decode could not pull its KV: nobody may reach it."""
    if isinstance(error, EngineFailed) and error.detail.startswith(KV_NOT_PULLED):
        error.doubted = prefill.id
