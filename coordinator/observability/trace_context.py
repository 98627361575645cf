"""The headers `traceparent` and `tracestate` (W3C Trace Context, Recommendation of 23 November 2021). Pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1
MAX_STATE_BYTES = 512  # §3.3.1.5: at least so many are passed on
MAX_STATE_MEMBERS = 32
# §3.2: version, trace id, parent id, flags; a later version may have more behind a dash
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
# §3.3.1: key, or tenant@system
_KEY = rb"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(rb"[ \t]*(?:" + _KEY + rb"=[ -+\--<>-~]{0,255}[!-+\--<>-~])?[ \t]*")

Header = tuple[bytes, bytes]


class Parent(NamedTuple):
    """Who asked: the span that ours belongs below.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        sampled: whether its sender records it.
        state: `tracestate` as it came, as one header; empty where there was none that is valid.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: bytes = b""


def parent_of(headers: Iterable[Header]) -> Parent | None:
    """The context that a request came with; None where there is none, several, or one that is malformed (§4.3)."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    if len(parents) != 1:
        return None
    found = _PARENT.fullmatch(parents[0].strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id = found[1], int(found[2], 16), int(found[3], 16)
    if version == b"ff" or (version == b"00" and found[5] is not None) or not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & SAMPLED), _state(states))


def _state(values: list[bytes]) -> bytes:
    """`tracestate` in one header (§3.3.1.1); empty where it is malformed, which leaves `traceparent` as it is."""
    if not values:
        return b""
    joined = b",".join(values)
    members = [member for member in joined.split(b",") if member.strip(b" \t")]
    if len(joined) > MAX_STATE_BYTES or len(members) > MAX_STATE_MEMBERS:
        return b""
    keys = {member.partition(b"=")[0].strip(b" \t") for member in members}
    if len(keys) != len(members) or not all(_MEMBER.fullmatch(member) for member in members):
        return b""
    return b",".join(member.strip(b" \t") for member in members)
