"""From what was noted of a request to its spans, as plain values. Pure; runs after the request's end."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from coordinator.core.errors import Outcome
from coordinator.observability.access import RequestRecord
from coordinator.observability.lines import printable
from coordinator.observability.trace import Attempt, Trace

MAX_WIRE_IDS = 16
CLIENTS_OWN = (Outcome.OK, Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE)
"""Outcomes that are no error of this service (OpenTelemetry's conventions for HTTP servers)."""
UNPLACED = (Outcome.UNAVAILABLE, Outcome.REJECTED, Outcome.DEADLINE, Outcome.CLIENT_GONE)
"""How a request may end that waited for a placement and got none."""

Value = str | int | float | bool | tuple[str, ...]


@dataclass(slots=True)
class Span:
    """One span.

    Attributes:
        start_s: monotonic seconds, as `end_s`.
        parent_id: 0: none.
        error: why it failed, in a word; empty where it did not.
        events: what happened on the way: time, name and attributes.
    """

    name: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: dict[str, Value]
    error: str = ""
    events: list[tuple[float, str, Mapping[str, Value]]] = field(default_factory=list)


def spans_of(trace: Trace, record: RequestRecord, ids: random.Random) -> list[Span]:
    """The span of the request, then those of its stages in the order in which they began.

    No prompt, output, header or query is among the attributes.
    """
    request = _request_span(trace, record)
    end_s = trace.arrived_s + record.duration_s
    stages: list[Span] = []
    waits_s = trace.arrived_s
    for number, attempt in enumerate(trace.attempts, 1):
        is_last = number == len(trace.attempts)
        error = attempt.reason or ("" if not is_last else _error(record))
        common: dict[str, Value] = {"pd.attempt": number, "pd.engine": attempt.engine}
        stages.append(Span("queue", 0, 0, waits_s, attempt.placed_s, dict(common)))
        stages += _stages_of(attempt, common, error, trace)
        waits_s = attempt.ended_s
    if _ended_waiting(trace, record):
        common = {"pd.attempt": len(trace.attempts) + 1}
        stages.append(Span("queue", 0, 0, waits_s, end_s, common, _error(record) or record.outcome))
    for span in stages:
        span.span_id, span.parent_id = ids.getrandbits(64) or 1, trace.span_id
    return [request, *stages]


def _request_span(trace: Trace, record: RequestRecord) -> Span:
    attributes: dict[str, Value] = {
        "http.request.method": trace.method,
        "url.path": printable(record.path.partition("?")[0]),
        "pd.request.id": printable(record.id),
        "pd.api": record.api,
        "pd.outcome": str(record.outcome),
        "pd.stream": record.stream,
        "pd.attempts": record.attempts,
        "pd.recomputes": record.recomputes,
        "pd.prompt.bytes": record.prompt_bytes,
        "pd.answer.bytes": record.bytes_out,
        "pd.answer.events": record.events,
    }
    if record.status:
        attributes["http.response.status_code"] = record.status
    if record.model is not None:
        attributes["gen_ai.request.model"] = printable(record.model)
    if record.prefill is not None:
        attributes["pd.prefill"] = record.prefill
        attributes["pd.decode"] = record.decode or record.prefill
    if record.ttft_s is not None:
        attributes["pd.first_token_s"] = record.ttft_s
    error = _error(record)
    if record.error_code is not None:
        attributes["error.type"] = error or record.error_code
    if record.outcome in CLIENTS_OWN and record.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        error = ""
    end_s = trace.arrived_s + record.duration_s
    span = Span("request", trace.span_id, trace.parent_id, trace.arrived_s, end_s, attributes, error)
    if record.ttft_s is not None:
        span.events.append((trace.arrived_s + record.ttft_s, "first token", {}))
    return span


def _stages_of(attempt: Attempt, common: Mapping[str, Value], error: str, trace: Trace) -> Iterator[Span]:
    """Prefill, handoff and decode, as far as it came; the stage in which it ended has the error."""
    alone = attempt.prefilled_s is None and attempt.decoding_s is not None
    single = alone or attempt.prefill == attempt.decode
    where = attempt.decode if alone else attempt.prefill
    wire_ids = attempt.wire_ids[:MAX_WIRE_IDS]
    details: dict[str, Value] = {**common, "pd.instance": where, "pd.wire_ids": wire_ids}
    prefilled_s = attempt.decoding_s if alone else attempt.prefilled_s
    failed = {"pd.guilty": attempt.guilty} if attempt.guilty else {}
    if prefilled_s is None:
        yield Span("prefill", 0, 0, attempt.placed_s, attempt.ended_s, {**details, **failed}, error)
        return
    yield Span("prefill", 0, 0, attempt.placed_s, prefilled_s, details)
    details = {**common, "pd.instance": attempt.decode, "pd.wire_ids": wire_ids}
    decoding_s = prefilled_s if single else attempt.decoding_s
    moves = [m for m in trace.moves if attempt.placed_s <= m.at_s <= attempt.ended_s]
    if not single:
        ends_here = decoding_s is None
        end_s = attempt.ended_s if decoding_s is None else max(decoding_s, prefilled_s)
        more = {"pd.from": attempt.prefill, **(failed if ends_here else {})}
        span = Span("handoff", 0, 0, prefilled_s, end_s, {**details, **more}, error if ends_here else "")
        span.events = [(m.at_s, "decode replaced", {"pd.instance": m.instance, "pd.reason": m.reason}) for m in moves]
        yield span
    if decoding_s is not None:
        start_s = max(decoding_s, prefilled_s)
        yield Span("decode", 0, 0, start_s, max(start_s, attempt.ended_s), {**details, **failed}, error)


def _error(record: RequestRecord) -> str:
    """Why the request failed, in a word; empty where it did not."""
    return record.error_reason or record.error_code or ""


def _ended_waiting(trace: Trace, record: RequestRecord) -> bool:
    """Whether its last wait was for a placement that did not come."""
    if not trace.attempts:
        return record.outcome in UNPLACED and record.prompt_bytes > 0
    return record.error_reason == "schedule"
