"""Spans as a real receiver gets them."""

import logging
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from otlp_receiver import Receiver

from coordinator.observability.access import RequestRecord
from coordinator.observability.trace import Attempt, Trace
from coordinator.observability.tracing import missing_extra, otlp


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def library():
    """The library's logger, which a sender makes silent."""
    found = logging.getLogger("opentelemetry")
    before = found.level
    yield found
    found.setLevel(before)


@pytest.fixture
def sender(receiver, library):
    made = otlp.OtlpSender(
        otlp.Receiver(receiver.endpoint, {"Authorization": "Bearer k"}, {"service.name": "s", "service.version": "9"})
    )
    yield made
    made.end()


def finished(**given):
    record = RequestRecord(id="r", api="openai", path="/v1/completions", status=200, attempts=1, duration_s=2.0)
    trace = Trace(**{
        "trace_id": 0xABC, "span_id": 0x12, "parent_id": 0x34, "sampled": True, "state": b"a=1,b=2", "arrived_s": 100.0,
        "wall_s": 1.7e9, "method": "POST",
    } | given)  # fmt: skip
    trace.attempts.append(Attempt("vllm", "p0", "d0", ("w1", "w2"), 100.5, 100.5, 101.0, 101.25, 102.0))
    return trace, record


def test_nothing_is_missing_here():
    assert missing_extra() is None


def test_spans_arrive_as_they_were_made(receiver, sender):
    assert sender.send([finished(), finished(trace_id=0xDEF, parent_id=0, state=b"")])
    ((path, headers),) = receiver.requests
    assert path == "/v1/traces"
    assert headers["authorization"] == "Bearer k"
    assert headers["content-type"] == "application/x-protobuf"
    spans = receiver.of(f"{0xABC:032x}")
    assert [span.name for span in spans] == ["request", "queue", "prefill", "handoff", "decode"]
    request, queue, prefill, *_ = spans
    assert (request.id, request.parent, request.kind) == (f"{0x12:016x}", f"{0x34:016x}", "SERVER")
    assert (queue.parent, queue.kind) == (request.id, "INTERNAL")
    assert request.state == "a=1,b=2"
    assert request.start_s == pytest.approx(1.7e9 + 100, abs=1e-5)
    assert (queue.end_s - queue.start_s, request.end_s - request.start_s) == pytest.approx((0.5, 2.0), abs=1e-5)
    assert prefill.attributes["pd.wire_ids"] == ["w1", "w2"]
    assert request.resource == {"service.name": "s", "service.version": "9"}
    assert request.scope == "pd_coordinator"
    assert receiver.of(f"{0xDEF:032x}")[0].parent == ""


def test_errors_and_events_arrive(receiver, sender):
    trace, record = finished()
    record.ttft_s = 1.25
    trace.attempts[0].guilty, trace.attempts[0].reason = "d0", "reset"
    assert sender.send([(trace, record)])
    request, *_, decode = receiver.of(trace.id)
    assert request.events == [("first token", {})]
    assert (request.error, decode.error) == (None, "reset")


@pytest.mark.parametrize("status", [400, 401])
def test_a_refusal_is_a_failure(receiver, sender, status, caplog):
    receiver.status = status
    assert not sender.send([finished()])
    assert caplog.text == ""


def test_the_end_cuts_repetitions_short(receiver, library, monkeypatch):
    monkeypatch.setattr(otlp, "SEND_S", 120.0)  # the library would try for half a minute at least
    sender = otlp.OtlpSender(otlp.Receiver(receiver.endpoint))
    receiver.status = 503
    results = []
    thread = threading.Thread(target=lambda: results.append(sender.send([finished()])), daemon=True)
    thread.start()
    assert receiver.arrived.wait(10)
    sender.end()
    thread.join(15)
    assert results == [False]
