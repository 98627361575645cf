"""Which instances can serve together, and the sentence about it."""

import pytest

from coordinator.cluster.pairing import find_pair, list_reasons, pairs, serves
from coordinator.core.instance import State


@pytest.mark.parametrize(
    ("prefill", "decode", "fit"),
    [
        ({}, {}, True),
        ({"engine": "other"}, {}, False),
        ({"group": "1"}, {"group": "1"}, True),
        ({"group": "1"}, {"group": "2"}, False),
        ({"group": "1"}, {}, False),
        ({"model": "m"}, {"model": "m"}, True),
        ({"model": "m"}, {}, True),
        ({"model": "m"}, {"model": "n"}, False),
        ({"peers": frozenset({"d1"})}, {"peers": frozenset({"p1"})}, True),
        ({}, {"peers": frozenset({"p1"})}, True),
        ({}, {"peers": frozenset()}, False),
        ({"peers": frozenset({"d2"})}, {}, False),
        ({"peers": frozenset({"d2"})}, {"peers": frozenset({"p1"})}, True),
        ({"peers": frozenset({"d1"})}, {"peers": frozenset()}, True),
    ],
)
def test_pairs(make, prefill, decode, fit):
    p, d = make("p1", **prefill), make("d1", **decode)
    assert pairs(p, d) is fit
    assert find_pair([p, d])[0] is fit
    assert find_pair([make("p2", engine="odd"), p, make("d2", group="odd"), d])[0] is fit


def test_a_hybrid_needs_nobody(make):
    assert find_pair([make("h1")])[0]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((), "no prefill and no decode instance"),
        (("p1",), "no decode instance"),
        (("d1",), "no prefill instance"),
    ],
)
def test_what_is_missing_is_named(make, ids, words):
    found, sentence = find_pair([make(ident) for ident in ids])
    assert not found
    assert sentence.startswith(words)


def test_models(make):
    one, any_name = make("h1", model="m"), make("h2")
    assert [serves(one, name) for name in ("m", "n", None)] == [True, False, True]
    assert [serves(any_name, name) for name in ("m", "n", None)] == [True, True, True]
    assert find_pair([one], "m")[0]
    assert not find_pair([one], "n")[0]


def test_reasons_are_cut_short():
    rows = [(f"d{i}", State.DOWN, "refused") for i in range(5)]
    assert list_reasons([]) == ""
    assert list_reasons([("p1", State.READY, "")]) == ""
    assert list_reasons([("p1", State.READY, ""), rows[0]]) == ": d0 is down (refused)"
    assert list_reasons(rows) == ": d0 is down (refused), d1 is down (refused), d2 is down (refused) and 2 more"
