"""`traceparent` and `tracestate` as W3C Trace Context has them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.observability.trace import Trace
from coordinator.observability.trace_context import Parent, parent_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def read(*parents, states=()):
    headers = [(b"host", b"a"), *((b"traceparent", text.encode("latin-1")) for text in parents)]
    return parent_of([*headers, *((b"tracestate", text.encode("latin-1")) for text in states)])


def test_a_parent():
    assert read(GOOD) == Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_only_one_flag_means_sampled(flags, sampled):
    assert read(f"00-{TRACE}-{SPAN}-{flags}").sampled is sampled


@pytest.mark.parametrize("text", [f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-later", f" {GOOD}\t"])
def test_later_versions_are_read_as_far_as_they_are_known(text):
    assert read(text) == Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "00", GOOD[:-1], GOOD + "0", GOOD + "-", GOOD + "-00", GOOD.upper(), f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}{SPAN}-01", f"0x-{TRACE}-{SPAN}-01", f"00-{TRACE[:-1]}g-{SPAN}-01", f"00-{TRACE}-{SPAN}-1\xa0",
        f"00- {TRACE[1:]}-{SPAN}-01", f"{GOOD},{GOOD}",
    ],
)  # fmt: skip
def test_malformed_ones_are_none(text):
    assert read(text) is None


def test_none_and_several_are_none():
    assert read() is None
    assert read(GOOD, GOOD) is None
    assert read(states=["a=1"]) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], ""),
        (["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1 , ,\tb=2,"], "a=1,b=2"),
        (["tenant@system=x", "0a@b=y"], "tenant@system=x,0a@b=y"),
        (["a= b !~"], "a= b !~"),
        ([",".join(f"k{n}=1" for n in range(32))], ",".join(f"k{n}=1" for n in range(32))),
    ],
)
def test_states_are_passed_on(states, expected):
    assert read(GOOD, states=states).state == expected.encode()


@pytest.mark.parametrize(
    "states",
    [
        ["a"], ["=1"], ["A=1"], ["0a=1"], ["a=1,a=2"], ["a=1", "a=2"], ["a=b=c"], ["a=\x7f"], ["a=é"], ["a=1\r\nx: y"],
        ["a b=1"], ["a@b@c=1"], ["a=" + "x" * 600], [",".join(f"k{n}=1" for n in range(33))],
    ],
)  # fmt: skip
def test_a_malformed_state_is_left_out_and_the_parent_stays(states):
    assert read(GOOD, states=states) == Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)


def trace(*, sampled=True, state=b""):
    return Trace(int(TRACE, 16), 0xAB, int(SPAN, 16), sampled, state, 0.0, 0.0, "POST")


@pytest.mark.parametrize("sampled", [True, False])
def test_engines_get_our_span_as_the_parent(sampled):
    headers = ((b"x-a", b"1"), (b"traceparent", b"rubbish"), (b"tracestate", b"old"), (b"traceparent", b"two"))
    made = trace(sampled=sampled, state=b"a=1").carried_by(headers)
    parent = f"00-{TRACE}-00000000000000ab-{'01' if sampled else '00'}".encode()
    assert made == ((b"x-a", b"1"), (b"traceparent", parent), (b"tracestate", b"a=1"))
    assert parent_of(made) == Parent(int(TRACE, 16), 0xAB, sampled, b"a=1")


def test_without_a_state_there_is_no_such_header():
    assert [name for name, _ in trace().carried_by(())] == [b"traceparent"]


BYTES = st.binary(max_size=80) | st.from_regex(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", fullmatch=True)


@given(BYTES, st.lists(st.binary(max_size=40) | st.from_regex(rb"[a-z]{1,3}=[ -~]{0,8}", fullmatch=True), max_size=4))
def test_whatever_comes_what_goes_on_is_well_formed(parent, states):
    found = parent_of([(b"traceparent", parent), *((b"tracestate", state) for state in states)])
    if found is None:
        return
    made = Trace(found.trace_id, 1, found.span_id, found.sampled, found.state, 0.0, 0.0, "POST").carried_by(())
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", made[0][1])
    assert all(re.fullmatch(rb"[ -~]*", value) for _, value in made)
