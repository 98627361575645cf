"""From the moments of an attempt to the histograms of stages."""

from coordinator.core.errors import EngineFailed
from coordinator.dispatch.flight import Flight
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics, StageMetrics
from coordinator.observability.trace import Attempt
from coordinator.scheduler import Lease


def time_stages(stages: StageMetrics, lease: Lease) -> None:
    """Time what an attempt that has ended has been through."""
    sent_s, prefilled_s, decoding_s = lease.sent_s, lease.prefilled_s, lease.decoding_s
    if sent_s is not None and prefilled_s is not None:
        stages.prefill.observe(prefilled_s - sent_s)
        if decoding_s is not None:
            stages.handoff.observe(max(0.0, decoding_s - prefilled_s))
    if decoding_s is not None and lease.ended_s is not None:
        stages.decode.observe(max(0.0, lease.ended_s - decoding_s))


def note_stages(record: RequestRecord, lease: Lease) -> None:
    """Leave in a request's record how long its last attempt was in each stage, the one that the end cut short included.

    A stage that it did not come to stays without a time, and so does prefill where decode serves alone.
    """
    sent_s, prefilled_s, decoding_s = lease.sent_s, lease.prefilled_s, lease.decoding_s
    until_s = lease.placed_s if lease.ended_s is None else lease.ended_s
    record.prefill_s = record.handoff_s = record.decode_s = None
    if decoding_s is not None:
        record.decode_s = max(0.0, until_s - decoding_s)
        until_s = decoding_s
    if prefilled_s is not None:
        record.handoff_s = max(0.0, until_s - prefilled_s)
        until_s = prefilled_s
    if sent_s is not None:
        record.prefill_s = max(0.0, until_s - sent_s)


def split_first_token(metrics: Metrics, flight: Flight, lease: Lease) -> None:
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


def attempt_of(lease: Lease, failure: EngineFailed | None) -> Attempt:
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
