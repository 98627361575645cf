"""The line of a request is put together from kept parts: it has to be what its fields are one by one."""

import itertools
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.errors import Outcome
from coordinator.observability.forms import JSON, TEXT, WIRE_IDS_LIMIT, line
from coordinator.observability.lines import LINE_LIMIT_BYTES, printable, quoted
from coordinator.observability.record import RequestRecord
from coordinator.observability.trace import Trace

PLAIN = st.text(string.ascii_letters + string.digits, min_size=1, max_size=30)
ANY = st.one_of(
    PLAIN, st.text(max_size=30), st.text(string.ascii_letters + '"\\ =\n\u202e模', min_size=150, max_size=260)
)
# what lies just between two tenths of a millisecond may become either of them
SPANS = st.one_of(st.floats(0, 0.9), st.floats(0, 10_000), st.integers(0, 10_000).map(lambda tenths: tenths / 10_000))
SPANS = SPANS.filter(lambda span_s: span_s * 10_000 % 1 != 0.5)
COUNTS = st.one_of(st.integers(0, 3000), st.integers(0, 10**12))


@st.composite
def records(draw):
    record = RequestRecord(draw(ANY), draw(PLAIN), "/" + draw(ANY), draw(ANY), draw(ANY))
    record.model = draw(st.none() | ANY)
    record.stream = draw(st.booleans())
    record.status = draw(st.sampled_from([0, 200, 429, 502]))
    record.outcome = draw(st.sampled_from(Outcome))
    if draw(st.booleans()):
        record.prefill, record.decode = draw(ANY), draw(st.none() | ANY)
        record.wire_ids = draw(st.lists(ANY, max_size=3))
    record.attempts, record.recomputes = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    record.events, record.bytes_out, record.prompt_bytes = draw(COUNTS), draw(COUNTS), draw(COUNTS)
    record.queue_s, record.ttft_s, record.duration_s = draw(st.none() | SPANS), draw(st.none() | SPANS), draw(SPANS)
    if draw(st.booleans()):
        record.trace = Trace(7, 1, 0, True, b"", 0.0, 0.0, "POST")
    if draw(st.booleans()):
        record.error_code, record.error_side = draw(PLAIN), draw(st.none() | PLAIN)
        record.error_instance, record.error_detail = draw(st.none() | ANY), draw(ANY)
    return record


def expected(r):
    """Name, value and limit of each field that the line has, in order; texts as they were given."""
    wire = ",".join(r.wire_ids)
    fields = [
        ("id", r.id), ("api", r.api), ("path", r.path.partition("?")[0]), ("client", r.client or None),
        ("key", r.key or None), ("model", r.model), ("stream", r.stream), ("status", r.status),
        ("outcome", r.outcome.value), ("prefill", r.prefill), ("decode", None if r.prefill is None else r.decode or ""),
        ("wire", None if r.prefill is None else wire), ("attempts", r.attempts), ("recomputes", r.recomputes or None),
        ("events", r.events), ("bytes", r.bytes_out), ("prompt_bytes", r.prompt_bytes), ("queue_ms", r.queue_s),
        ("ttft_ms", r.ttft_s), ("duration_ms", r.duration_s), ("trace_id", r.trace and r.trace.id),
        ("error", r.error_code), ("side", r.error_side), ("reason", r.error_reason),
        ("guilty", r.error_instance or None), ("detail", r.error_detail or None),
    ]  # fmt: skip
    return [(name, value) for name, value in fields if value is not None]


def limits(name):
    return (WIRE_IDS_LIMIT,) if name == "wire" else ()


def in_text(name, value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return quoted(value, *limits(name))
    return f"{value * 1000:.1f}" if name.endswith("_ms") else str(value)


@given(records())
def test_text_is_its_fields_one_after_the_other(record):
    fields = (f" {name}={in_text(name, value)}" for name, value in expected(record))
    found = line(TEXT, TEXT.start + "NOW", TEXT.head("log"), record)
    whole = "NOW INFO log request" + "".join(fields)
    if len(whole.encode()) <= LINE_LIMIT_BYTES:
        assert found == whole
    else:
        assert len(found.encode()) <= LINE_LIMIT_BYTES


@given(records())
def test_json_is_the_same_fields_but_for_empty_texts(record):
    found = json.loads(line(JSON, JSON.start + "NOW", JSON.head("log"), record))
    head = {name: found.pop(name) for name in ("time", "level", "logger", "message")}
    assert head == {"time": "NOW", "level": "INFO", "logger": "log", "message": "request"}
    wanted = {
        name: printable(value, *limits(name))
        if isinstance(value, str)
        else float(f"{value * 1000:.1f}")
        if name.endswith("_ms")
        else value
        for name, value in expected(record)
        if value != "" or name in ("id", "path")
    }
    if found.pop("cut", False):
        assert found.items() <= wanted.items()
    else:
        assert found == wanted
        assert list(found) == list(wanted)


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_what_differs_in_one_field_alone_is_not_mixed_up(form):
    """Parts are kept by the values that they are made of: none may be left out of these."""
    seen = set()
    for changes in itertools.product(
        ("openai", "tgi"), ("/a", "/b"), ("1.1.1.1", ""), ("k", ""), (None, "m"), (True, False), (200, 502),
        (Outcome.OK, Outcome.DEADLINE), (None, "p"), (None, "d"),
    ):  # fmt: skip
        api, path, client, key, model, stream, status, outcome, prefill, decode = changes
        record = RequestRecord("i", api, path, client, key, stream, model, status, outcome, prefill, decode, ["1"])
        if prefill is not None or decode is None:
            seen.add(line(form, form.start, form.head("log"), record))
    assert len(seen) == 2**8 * 3


def test_short_spans_and_small_counts_are_written_as_all_others():
    for number in range(9000):
        record = RequestRecord("i", "a", "/", events=number, duration_s=number / 10_000, queue_s=0.0, ttft_s=1.0)
        longer = json.loads(line(JSON, JSON.start, JSON.head(""), record))
        record.ttft_s = 0.0
        found = json.loads(line(JSON, JSON.start, JSON.head(""), record))
        assert found | {"ttft_ms": 1000.0} == longer
        assert (found["events"], found["duration_ms"]) == (number, number / 10)


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_what_is_kept_is_bounded_however_long_the_texts_are(form):
    form.asked.cache_clear()
    for i in range(50):
        text = f"{i}" + "x" * 10_000
        line(form, form.start, form.head("log"), RequestRecord("i", "a", "/" + text, model=text))
    line(form, form.start, form.head("log"), RequestRecord("i", "a", "/" + "y" * 10_000, model="y" * 1000))
    line(form, form.start, form.head("log"), RequestRecord("i", "a", "/" + "y" * 20_000, model="y" * 2000))
    assert form.asked.cache_info().currsize == 51
    assert form.asked.cache_info().maxsize <= 4096
