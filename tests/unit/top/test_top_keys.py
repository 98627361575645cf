"""Keys: how they are told apart, and what they do."""

import pytest

from coordinator.top.terminal import KEYS, SEQUENCES, split_keys
from coordinator.top.view import SORTS, View, step


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("ab", ["a", "b"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1b[5~x\x1b[6~", ["page up", "x", "page down"]),
        ("\x1b", ["escape"]),
        ("\x1b\x1b[A", ["escape", "up"]),
        ("\x1b[1;5Cq", ["q"]),
        ("\x1b[", []),
        ("\x1bOAz", ["up", "z"]),
        ("ä", ["ä"]),
        ("", []),
    ],
)
def test_splitting(sent, keys):
    assert list(split_keys(sent)) == keys


def test_all_names_are_known():
    assert {key for sequence in SEQUENCES for key in split_keys(sequence)} | {"escape"} == KEYS


def after(*keys, view=None, page=10):
    view = view or View()
    for key in keys:
        view = step(view, key, page)
    return view


@pytest.mark.parametrize("key", ["q", "Q", "\x03", "\x04"])
def test_leaving(key):
    assert after(key) is None


def test_orders_come_round():
    seen, view = [], View()
    for _ in SORTS:
        view = after("s", view=view)
        seen.append(view.sort)
    assert sorted(seen) == sorted(SORTS)
    assert view.sort == SORTS[0]
    assert after("r").backwards
    assert not after("r", "s").backwards


def test_scrolling():
    assert after("down", "down", "up").scroll == 1
    assert after("page down").scroll == 10
    assert after("page down", "page up", "up").scroll == 0
    assert after("end").scroll > 10**6
    assert after("end", "home").scroll == 0


def test_a_filter_is_typed():
    typing = after("/", "d", "q", "1")
    assert (typing.typing, typing.filter) == (True, "dq1")
    assert after("\x7f", view=typing).filter == "dq"
    kept = after("\r", view=typing)
    assert (kept.typing, kept.filter) == (False, "dq1")
    assert after("escape", view=typing) == View()
    assert after("escape", view=kept).filter == ""
    assert after("up", view=typing) == typing
    assert after("\x03", view=typing) is None


def test_news_and_what_is_no_key():
    assert not after("n").news
    assert after("n", "n").news
    assert after("z") == View()
