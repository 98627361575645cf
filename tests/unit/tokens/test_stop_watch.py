"""Stop strings across the borders of pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tokens import StopWatch

LETTERS = st.text(st.sampled_from("ab\n"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=4), max_size=3)


def run(watch, pieces):
    """(what was shown, whether a stop string was met)."""
    shown = ""
    for piece in pieces:
        text, met = watch.push(piece)
        shown += text
        if met:
            return shown, True
    return shown + watch.end(), False


@given(text=LETTERS, stops=STOPS, include=st.booleans())
def test_letter_by_letter_the_first_stop_string_to_be_complete_ends_the_text(text, stops, include):
    ends = [at for at in range(1, len(text) + 1) if any(text[:at].endswith(stop) for stop in stops)]
    shown, met = run(StopWatch(stops, include=include), text)
    if not ends:
        assert (shown, met) == (text, False)
        return
    whole = text[: ends[0]]
    longest = max((stop for stop in stops if whole.endswith(stop)), key=len)
    assert (shown, met) == (whole if include else whole[: -len(longest)], True)


@given(data=st.data(), text=LETTERS, stop=st.text(st.sampled_from("ab\n"), min_size=1, max_size=4))
def test_pieces_make_no_difference_to_one_stop_string(data, text, stop):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    before, found, _ = text.partition(stop)
    assert run(StopWatch([stop]), pieces) == (before if found else text, bool(found))


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one</", "s", ">two"], ["one", "", ""]),
        (["a<", "b"], ["a", "<b"]),
        (["</", "</s>"], ["", "</"]),
        (["x", "y"], ["x", "y"]),
    ],
)
def test_only_what_may_become_a_stop_string_is_held_back(pieces, shown):
    watch = StopWatch(["</s>"])
    assert [watch.push(piece)[0] for piece in pieces] == shown


def test_of_several_in_one_piece_the_one_that_begins_first_wins():
    watch = StopWatch(["world", "lo wor"])
    assert watch.push("hello world") == ("hel", True)
    assert watch.met == "lo wor"


def test_after_a_stop_string_nothing_is_shown():
    watch = StopWatch(["."])
    assert watch.push("a.b") == ("a", True)
    assert watch.push("c") == ("", True)
    assert watch.end() == ""


def test_the_stop_string_is_shown_where_that_is_wanted():
    watch = StopWatch(["END"], include=True)
    assert watch.push("the E") == ("the ", False)
    assert watch.push("ND of it") == ("END", True)


def test_without_stop_strings_nothing_is_held():
    watch = StopWatch(["", ""])
    assert watch.push("abc") == ("abc", False)
    assert watch.end() == ""
