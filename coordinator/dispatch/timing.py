"""From the moments of an attempt to the histograms of stages."""

from coordinator.core.errors import EngineFailed
from coordinator.dispatch.flight import Flight
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics, StageMetrics
from coordinator.observability.trace import Attempt
from coordinator.scheduler import Lease


def note_attempt(metrics: Metrics, flight: Flight, lease: Lease, failure: EngineFailed | None) -> None:
    """Leave what an attempt that has ended has been through with the request and in the metrics."""
    record = flight.record
    record.wire_ids.extend(lease.wire_ids)
    record.prefill, record.decode = lease.prefill.id, lease.decode.id  # an engine may choose
    _time_stages(metrics.stages, record, lease)
    if record.ttft_s is not None and flight.request.ask.stream and not flight.split:
        _split_first_token(metrics, flight, lease)
    if record.trace is not None:
        record.trace.attempts.append(_attempt_of(lease, failure))


def _time_stages(stages: StageMetrics, record: RequestRecord, lease: Lease) -> None:
    """Time the stages of a request's last attempt.

    The record gets the one that the end cut short, too; histograms are of whole stages. A stage that it did not come to
    stays without a time, and so does prefill where decode serves alone.
    """
    sent_s, prefilled_s, decoding_s, ended_s = lease.sent_s, lease.prefilled_s, lease.decoding_s, lease.ended_s
    until_s = lease.placed_s if ended_s is None else ended_s
    record.prefill_s = record.handoff_s = record.decode_s = None
    if decoding_s is not None:
        record.decode_s = max(0.0, until_s - decoding_s)
        until_s = decoding_s
        if ended_s is not None:
            stages.decode.observe(record.decode_s)
    if prefilled_s is not None:
        record.handoff_s = max(0.0, until_s - prefilled_s)
        until_s = prefilled_s
        if sent_s is not None and decoding_s is not None:
            stages.handoff.observe(record.handoff_s)
    if sent_s is not None:
        record.prefill_s = max(0.0, until_s - sent_s)
        if prefilled_s is not None:
            stages.prefill.observe(record.prefill_s)


def _split_first_token(metrics: Metrics, flight: Flight, lease: Lease) -> None:
    """Divide a stream's time to first token among the stages and instances that it was spent at.

    To be called once, after the attempt whose token was the first; the parts are the whole time, without a gap. Where
    one instance does both, or decode serves alone, all of the attempt is that instance's `prefill`.
    """
    flight.split = True
    record, arrived_s, placed_s = flight.record, flight.request.arrived_s, lease.placed_s
    queue_s, first_s = record.queue_s or 0.0, arrived_s + (record.ttft_s or 0.0)
    timed = metrics.ttft_stage.labels
    timed("queue", "").observe(queue_s)
    if record.attempts > 1:
        timed("retries", "").observe(max(0.0, placed_s - arrived_s - queue_s))
    prefill, decode, prefilled_s = lease.prefill, lease.decode, lease.prefilled_s
    if prefilled_s is None or prefill is decode:
        timed("prefill", decode.id).observe(max(0.0, first_s - placed_s))
        return
    prefilled_s = min(prefilled_s, first_s)  # prefill's own token may be the first one
    timed("prefill", prefill.id).observe(prefilled_s - placed_s)
    timed("handoff", decode.id).observe(first_s - prefilled_s)


def _attempt_of(lease: Lease, failure: EngineFailed | None) -> Attempt:
    """What a trace keeps of an attempt that has ended, and of its failure where an instance has failed it."""
    return Attempt(
        lease.prefill.engine,
        lease.prefill.id,
        lease.decode.id,
        tuple(lease.wire_ids),
        lease.placed_s,
        lease.sent_s,
        lease.prefilled_s,
        lease.decoding_s,
        lease.placed_s if lease.ended_s is None else lease.ended_s,
        "" if failure is None else failure.instance_id,
        "" if failure is None else failure.reason,
    )
