"""What is noted of a traced request on its way."""

from dataclasses import dataclass, field

from .trace_context import SAMPLED, TRACEPARENT, TRACESTATE, Header


@dataclass(slots=True)
class Move:
    """A decode instance that failed and was exchanged for another.

    Attributes:
        at_s: when (monotonic seconds).
        instance: id of the one that failed.
        reason: why, in one word.
    """

    at_s: float
    instance: str
    reason: str


@dataclass(slots=True)
class Attempt:
    """One placement and its moments (monotonic seconds; None: it did not come to that).

    Attributes:
        engine: name of the engine protocol.
        prefill: instance id.
        decode: instance id; the same as `prefill` for a hybrid instance.
        wire_ids: ids on engines' wires.
        placed_s: of the placement.
        sent_s: of the first call to prefill.
        prefilled_s: of prefill's answer.
        decoding_s: of decode's first output.
        ended_s: of its end.
        guilty: id of the instance that failed it.
        reason: why, in one word.
    """

    engine: str
    prefill: str
    decode: str
    wire_ids: tuple[str, ...]
    placed_s: float
    sent_s: float | None
    prefilled_s: float | None
    decoding_s: float | None
    ended_s: float
    guilty: str = ""
    reason: str = ""


@dataclass(slots=True)
class Trace:
    """One request's place in a trace, and its attempts.

    Attributes:
        trace_id: 128 bits.
        span_id: of the span of the whole request.
        parent_id: of the caller's span; 0: there is none.
        sampled: whether spans are recorded.
        state: the caller's `tracestate`.
        arrived_s: of the request (monotonic seconds).
        wall_s: seconds from the monotonic clock to the epoch.
        method: of the HTTP request.
    """

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool
    state: bytes
    arrived_s: float
    wall_s: float
    method: str
    attempts: list[Attempt] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The trace id as logs and other tools write it."""
        return f"{self.trace_id:032x}"

    def carried_by(self, headers: tuple[Header, ...]) -> tuple[Header, ...]:
        """Headers for an engine: its spans belong below ours, and it records them if we do."""
        flags = SAMPLED if self.sampled else 0
        parent = b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, flags)
        rest = tuple(header for header in headers if header[0] not in (TRACEPARENT, TRACESTATE))
        state = ((TRACESTATE, self.state),) if self.state else ()
        return (*rest, (TRACEPARENT, parent), *state)
