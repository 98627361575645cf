"""From what was noted of a request to its spans."""

import random

import pytest

from coordinator.core.errors import ClientGone, DeadlineExceeded, EngineFailed, EngineRefused, NoInstance, Side
from coordinator.observability.access import RequestRecord
from coordinator.observability.trace import Attempt, Move, Trace
from coordinator.observability.tracing.spans import spans_of


def attempt(**given):
    """One that went well: placed at 1, prefilled at 3, decoding from 4, ended at 9."""
    moments = {"placed_s": 1.0, "sent_s": 1.1, "prefilled_s": 3.0, "decoding_s": 4.0, "ended_s": 9.0}
    return Attempt(**{"engine": "vllm", "prefill": "p0", "decode": "d0", "wire_ids": ("w1",)} | moments | given)


def made(*attempts, moves=(), error=None, **record):
    """The spans of a request that came at 0 and ended at 10."""
    noted = RequestRecord(id="client-id", api="openai", path="/v1/chat/completions?secret=1", duration_s=10.0)
    noted.attempts, noted.prompt_bytes, noted.status = len(attempts), 30, 200
    if attempts:
        noted.prefill, noted.decode = attempts[-1].prefill, attempts[-1].decode
    if error is not None:
        noted.failed(error)
        noted.status = error.status
    for name, value in record.items():
        setattr(noted, name, value)
    trace = Trace(7, 70, 700, True, b"", 0.0, 1000.0, "POST", list(attempts), list(moves))
    return spans_of(trace, noted, random.Random(1))


def times(spans):
    return [(span.name, span.start_s, span.end_s) for span in spans]


def errors(spans):
    return {span.name: span.error for span in spans if span.error}


def test_a_request_and_its_stages():
    spans = made(attempt(), ttft_s=4.0, model="m", stream=True, events=6)
    assert times(spans) == [
        ("request", 0.0, 10.0), ("queue", 0.0, 1.0), ("prefill", 1.0, 3.0), ("handoff", 3.0, 4.0), ("decode", 4.0, 9.0),
    ]  # fmt: skip
    request, *stages = spans
    assert (request.span_id, request.parent_id) == (70, 700)
    assert {span.parent_id for span in stages} == {70}
    assert len({span.span_id for span in spans}) == len(spans)
    assert errors(spans) == {}
    assert request.events == [(4.0, "first token", {})]
    assert request.attributes["url.path"] == "/v1/chat/completions"
    assert request.attributes["pd.prefill"], request.attributes["pd.decode"] == ("p0", "d0")
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.request.model"] == "m"
    assert "error.type" not in request.attributes
    where = {span.name: span.attributes.get("pd.instance") for span in stages}
    assert where == {"queue": None, "prefill": "p0", "handoff": "d0", "decode": "d0"}
    assert stages[2].attributes["pd.from"] == "p0"
    assert all(span.attributes["pd.attempt"] == 1 and span.attributes["pd.engine"] == "vllm" for span in stages)
    assert [span.attributes.get("pd.wire_ids") for span in stages] == [None, ("w1",), ("w1",), ("w1",)]


def test_a_hybrid_instance_has_no_handoff():
    spans = made(attempt(prefill="h0", decode="h0", decoding_s=3.0))
    assert times(spans)[2:] == [("prefill", 1.0, 3.0), ("decode", 3.0, 9.0)]
    assert [span.attributes["pd.instance"] for span in spans[2:]] == ["h0", "h0"]


def test_decode_that_serves_alone_computes_the_prompt_itself():
    spans = made(attempt(prefilled_s=None))
    assert times(spans)[2:] == [("prefill", 1.0, 4.0), ("decode", 4.0, 9.0)]
    assert [span.attributes["pd.instance"] for span in spans[2:]] == ["d0", "d0"]


def test_decode_may_begin_before_prefill_has_answered():
    spans = made(attempt(prefilled_s=4.0, decoding_s=3.5))
    assert times(spans)[2:] == [("prefill", 1.0, 4.0), ("handoff", 4.0, 4.0), ("decode", 4.0, 9.0)]


@pytest.mark.parametrize(
    ("given", "stage", "instance"),
    [
        ({"prefilled_s": None, "decoding_s": None, "guilty": "p0", "reason": "reset"}, "prefill", "p0"),
        ({"decoding_s": None, "guilty": "d0", "reason": "reset"}, "handoff", "d0"),
        ({"guilty": "d0", "reason": "reset"}, "decode", "d0"),
    ],
)
def test_the_stage_in_which_an_attempt_failed_has_the_error(given, stage, instance):
    side = Side.PREFILL if instance == "p0" else Side.DECODE
    spans = made(attempt(**given), error=EngineFailed(side, instance, "reset"))
    assert errors(spans) == {"request": "reset", stage: "reset"}
    failed = next(span for span in spans if span.name == stage)
    assert failed.attributes["pd.guilty"] == instance
    assert failed.end_s == 9.0
    assert spans[0].attributes["error.type"] == "reset"
    assert spans[-1] is failed


def test_a_retry_has_stages_of_its_own():
    first = attempt(prefilled_s=None, decoding_s=None, ended_s=2.0, guilty="p0", reason="connect_refused")
    second = attempt(prefill="p1", placed_s=2.5, sent_s=2.5, wire_ids=("w2",))
    spans = made(first, second)
    assert times(spans)[1:] == [
        ("queue", 0.0, 1.0), ("prefill", 1.0, 2.0),
        ("queue", 2.0, 2.5), ("prefill", 2.5, 3.0), ("handoff", 3.0, 4.0), ("decode", 4.0, 9.0),
    ]  # fmt: skip
    assert [span.error for span in spans] == ["", "", "connect_refused", "", "", "", ""]
    assert [span.attributes["pd.attempt"] for span in spans[1:]] == [1, 1, 2, 2, 2, 2]


def test_a_request_that_decode_gave_back_is_no_failure():
    spans = made(attempt(ended_s=5.0), attempt(placed_s=5.0, prefilled_s=6.0, decoding_s=7.0), recomputes=1)
    assert errors(spans) == {}
    assert [span.name for span in spans].count("decode") == 2
    assert spans[0].attributes["pd.recomputes"] == 1


def test_a_decode_that_was_replaced_is_an_event_of_the_handoff():
    spans = made(attempt(decode="d1"), moves=[Move(3.5, "d0", "reset")])
    handoff = next(span for span in spans if span.name == "handoff")
    assert handoff.events == [(3.5, "decode replaced", {"pd.instance": "d0", "pd.reason": "reset"})]


def test_one_that_was_never_placed_has_waited():
    spans = made(error=NoInstance("nobody"))
    assert times(spans) == [("request", 0.0, 10.0), ("queue", 0.0, 10.0)]
    assert errors(spans) == {"request": "no_instance", "queue": "no_instance"}


def test_a_wait_after_a_failed_attempt_that_was_in_vain():
    failed = attempt(prefilled_s=None, decoding_s=None, ended_s=2.0, guilty="p0", reason="reset")
    spans = made(failed, error=DeadlineExceeded("schedule"))
    assert times(spans)[-1] == ("queue", 2.0, 10.0)
    assert spans[-1].error == "schedule"


def test_a_client_that_leaves_is_no_error_of_ours():
    spans = made(attempt(), error=ClientGone("gone"))
    assert spans[0].error == ""
    assert spans[0].attributes["error.type"] == "client_gone"
    assert spans[-1].error == "client_gone"


def test_a_client_s_mistake_is_none_either():
    spans = made(attempt(prefilled_s=None, decoding_s=None), error=EngineRefused(400, "the prompt is too long"))
    assert spans[0].error == ""
    assert spans[0].attributes["http.response.status_code"] == 400
    assert "the prompt" not in str([span.attributes for span in spans])


def test_what_cannot_be_read_has_the_request_alone():
    spans = made(error=EngineRefused(400, "no"), prompt_bytes=0)
    assert [span.name for span in spans] == ["request"]


def test_what_a_client_chose_is_cut_and_escaped():
    spans = made(attempt(wire_ids=tuple(map(str, range(100)))), model="m\n" * 500, id="i" * 500, path="/" + "p" * 900)
    attributes = spans[0].attributes
    assert all(len(attributes[name]) < 210 for name in ("gen_ai.request.model", "pd.request.id", "url.path"))
    assert "\n" not in attributes["gen_ai.request.model"]
    assert len(spans[2].attributes["pd.wire_ids"]) == 16
