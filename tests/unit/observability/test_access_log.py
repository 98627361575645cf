import dataclasses
import inspect
import io
import json
import logging
import re
import shlex

import pytest

from coordinator.core.errors import DeadlineExceeded, EngineFailed, EngineRefused, InternalError, Outcome, Side
from coordinator.observability.access import AccessLog, RequestRecord
from coordinator.observability.lines import LINE_LIMIT_BYTES
from coordinator.observability.writer import LineWriter

SECRET = "canary-4711"


def a_record(**changes):
    record = RequestRecord(
        id="client-id-77",
        api="openai",
        path="/v1/chat/completions",
        stream=True,
        status=200,
        prefill="p0",
        decode="d1",
        wire_ids=["9314"],
        attempts=1,
        events=128,
        bytes_out=4096,
        prompt_bytes=900,
        queue_s=0.0001,
        ttft_s=0.0412,
        duration_s=0.812,
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def log():
    log = logging.getLogger("pd_coordinator.test_access")
    log.setLevel(logging.INFO)
    yield log
    log.setLevel(logging.NOTSET)


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def text(log, stream):
    access = AccessLog(log, LineWriter(stream), wall=lambda: 1_700_000_000.25)

    def line(record):
        access.finished(record)
        return stream.getvalue().removesuffix("\n")

    return line


@pytest.fixture
def data(log, stream):
    access = AccessLog(log, LineWriter(stream), as_json=True, wall=lambda: 1_700_000_000.25)

    def fields(record):
        access.finished(record)
        return json.loads(stream.getvalue())

    return fields


def test_text(text):
    assert text(a_record()) == (
        "2023-11-14T22:13:20.250Z INFO pd_coordinator.test_access request id=client-id-77 api=openai"
        " path=/v1/chat/completions stream=yes status=200 outcome=ok prefill=p0 decode=d1 wire=9314 attempts=1"
        " events=128 bytes=4096 prompt_bytes=900 queue_ms=0.1 ttft_ms=41.2 duration_ms=812.0"
    )


def test_json_has_the_same_fields(data):
    assert data(a_record()) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "pd_coordinator.test_access",
        "message": "request",
        "id": "client-id-77",
        "api": "openai",
        "path": "/v1/chat/completions",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "prefill": "p0",
        "decode": "d1",
        "wire": "9314",
        "attempts": 1,
        "events": 128,
        "bytes": 4096,
        "prompt_bytes": 900,
        "queue_ms": 0.1,
        "ttft_ms": 41.2,
        "duration_ms": 812.0,
    }


FULL = {"model": "m", "recomputes": 1, "error_code": "engine_failed", "error_side": "decode", "error_reason": "reset",
        "error_instance": "d1", "error_detail": "after 3 events"}  # fmt: skip


def test_text_and_json_agree_on_every_field(log):
    streams = io.StringIO(), io.StringIO()
    for out, as_json in zip(streams, (False, True), strict=True):
        AccessLog(log, LineWriter(out), as_json=as_json).finished(a_record(**FULL))
    words = shlex.split(streams[0].getvalue().partition(" request ")[2])
    in_text = dict(word.split("=", 1) for word in words)
    in_json = json.loads(streams[1].getvalue())
    for key in ("time", "level", "logger", "message"):
        del in_json[key]
    assert list(in_text) == list(in_json)
    assert in_text["guilty"] == "d1"
    assert in_text["detail"] == "after 3 events"


def test_request_that_got_no_instance(text):
    line = text(RequestRecord(id="a", api="", path="/nope", status=404, outcome=Outcome.CLIENT_ERROR))
    assert " prefill=" not in line
    assert " ttft_ms=" not in line
    assert 'api="" path=/nope' in line


@pytest.mark.parametrize("side", [Side.PREFILL, Side.DECODE])
def test_failures_name_side_and_reason(text, side):
    record = a_record(status=502)
    record.failed(EngineFailed(side, "the-guilty", "reset", detail="after 3 events"))
    line = text(record)
    assert " status=502 outcome=engine_error " in line
    assert line.endswith(f' error=engine_failed side={side} reason=reset guilty=the-guilty detail="after 3 events"')


def test_deadlines_name_their_stage(data):
    record = a_record()
    record.failed(DeadlineExceeded("first_token"))
    fields = data(record)
    assert (fields["outcome"], fields["error"], fields["reason"]) == ("deadline", "deadline_exceeded", "first_token")


def test_status_that_is_out_stays(data):
    record = a_record(status=200)
    record.failed(InternalError("broken plug-in"))
    fields = data(record)
    assert (fields["status"], fields["outcome"], fields["detail"]) == (200, "internal_error", "broken plug-in")


def test_the_message_for_the_client_is_not_logged(text):
    record = a_record(status=400)
    record.failed(EngineRefused(400, f"bad input: {SECRET}"))
    assert SECRET not in text(record)


@pytest.mark.parametrize(
    ("reason", "detail", "logged"),
    [
        ("http_5xx", f"status 503: you said {SECRET}", ' detail="status 503"'),
        ("bad_reply", f"status 302: {SECRET}", ' detail="status 302"'),
        ("engine_error", f"cannot decode {SECRET}", ""),
        ("timeout", f"prefill waited for it: {SECRET}", ""),
        ("of_a_plug_in", SECRET, ""),
        ("connect_refused", "10.0.0.1:99", " detail=10.0.0.1:99"),
        ("link_lost", "silent for 30 s", ' detail="silent for 30 s"'),
    ],
)
def test_the_words_of_engines_are_not_logged(text, reason, detail, logged):
    record = a_record(status=502)
    record.failed(EngineFailed(Side.DECODE, "d0", reason, detail=detail))
    line = text(record)
    assert SECRET not in line
    assert line.endswith(f" reason={reason} guilty=d0{logged}")


@pytest.mark.parametrize("as_json", [False, True])
def test_query_is_not_logged(log, stream, as_json):
    AccessLog(log, LineWriter(stream), as_json=as_json).finished(a_record(path=f"/generate?key={SECRET}&a=?b"))
    assert SECRET not in stream.getvalue()
    assert "/generate" in stream.getvalue()


@pytest.mark.uncompiled
def test_a_record_has_no_place_for_what_must_not_be_logged():
    parameters = inspect.signature(AccessLog.finished).parameters
    assert [p.annotation for p in parameters.values()][1:] == [RequestRecord]
    for field in dataclasses.fields(RequestRecord):
        assert not re.search(r"bytes(?!_)|object|Any|Request\b|dict|headers|body", f"{field.type}"), field.name
    with pytest.raises(AttributeError):
        a_record().prompt = SECRET


HOSTILE = ["x" * 100_000, "\n" * 5000, 'a" outcome=ok b="', "\ud800", "\u202e", "\x1b[2J", "模" * 5000, "a\\"]


@pytest.mark.parametrize("bad", HOSTILE)
@pytest.mark.parametrize("as_json", [False, True])
def test_hostile_values_stay_in_one_short_line(log, stream, bad, as_json):
    record = a_record(id=bad, path="/" + bad, model=bad, prefill=bad, decode=bad, wire_ids=[bad], outcome=Outcome.OK,
                      error_code="c", error_instance=bad, error_detail=bad)  # fmt: skip
    AccessLog(log, LineWriter(stream), as_json=as_json).finished(record)
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert len(line.encode()) <= LINE_LIMIT_BYTES
    if as_json:
        assert json.loads(line)["outcome"] == "ok"
    else:
        assert len(re.findall(r'(?:^|[^\\" ]) outcome=ok', re.sub(r'"(?:[^"\\]|\\.)*"', "Q", line))) == 1


def test_all_wire_ids_of_three_attempts_fit(text):
    ids = [f"{i:036d}" for i in range(6)]
    assert f'wire="{",".join(ids)}"' in text(a_record(wire_ids=ids))


def test_below_info_nothing_is_written(log, text):
    log.setLevel(logging.WARNING)
    assert text(a_record()) == ""
