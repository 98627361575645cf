"""Limits of keys, in one process and over several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.errors import KeyLimitReached
from coordinator.security.keys import Key
from coordinator.security.uses import SLOTS, KeyUses, clear_row, own_words, size_bytes


class Clock:
    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def made(name="a", slot=0, **limits):
    return Key(slot, name, name.encode(), **limits)


def uses(clock, words=None, row=0):
    found = KeyUses(own_words() if words is None else words, row, clock)
    found.assign({"a": 0, "b": 1})
    return found


def count_admitted(found, key, tries):
    admitted = 0
    for _ in range(tries):
        try:
            use = found.admit(key)
        except KeyLimitReached:
            continue
        found.release(use)
        admitted += 1
    return admitted


def test_without_limits_there_are_none():
    found = uses(Clock())
    assert count_admitted(found, made(), 5000) == 5000


def test_in_flight_is_given_back():
    found, key = uses(Clock()), made(max_in_flight=2)
    use = found.admit(key)
    found.admit(key)
    with pytest.raises(KeyLimitReached, match="2 requests in flight") as caught:
        found.admit(key)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1
    found.release(use)
    found.admit(key)


def test_a_key_does_not_count_for_another():
    found = uses(Clock())
    found.admit(made("a", 0, max_in_flight=1))
    found.admit(made("b", 1, max_in_flight=1))
    assert count_admitted(found, made("b", 1, requests_per_minute=3), 5) == 3


def test_requests_of_a_minute_and_when_to_come_again():
    clock = Clock(1002.5)
    found, key = uses(clock), made(requests_per_minute=10)
    assert count_admitted(found, key, 50) == 10
    with pytest.raises(KeyLimitReached) as caught:
        found.admit(key)
    clock.now_s += caught.value.retry_after_s - 1.6
    assert count_admitted(found, key, 1) == 0
    clock.now_s += 1.6
    assert count_admitted(found, key, 50) == 10


@given(
    limit=st.integers(1, 20),
    gaps_s=st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=120),
)
def test_no_minute_holds_more_than_the_limit_and_none_is_wasted(limit, gaps_s):
    clock = Clock(12345.0)
    found, key = uses(clock), made(requests_per_minute=limit)
    admitted_s = []
    for gap_s in gaps_s:
        clock.now_s += gap_s
        if count_admitted(found, key, 1):
            admitted_s.append(clock.now_s)
        else:
            assert sum(clock.now_s - 65 <= then_s for then_s in admitted_s) >= limit
    for then_s in admitted_s:
        assert sum(then_s - 60 < other_s <= then_s for other_s in admitted_s) <= limit


def test_what_one_process_has_counted_in_a_period_another_one_finds_there():
    clock = Clock()
    words = memoryview(bytearray(size_bytes(2))).cast("q")
    key = made(requests_per_minute=10)
    assert count_admitted(uses(clock, words, 0), key, 4) == 4
    assert count_admitted(uses(clock, words, 0), key, 3) == 3  # it was started again
    clock.now_s += 5
    assert count_admitted(uses(clock, words, 1), key, 10) == 3


def test_processes_count_together():
    clock = Clock()
    words = memoryview(bytearray(size_bytes(3))).cast("q")
    rows = [uses(clock, words, row) for row in range(3)]
    key = made(max_in_flight=2, requests_per_minute=1000)
    use = rows[0].admit(key)
    rows[1].admit(key)
    with pytest.raises(KeyLimitReached):
        rows[2].admit(key)
    rows[0].release(use)
    rows[2].admit(key)
    few = made("b", 1, requests_per_minute=7)
    assert sum(count_admitted(row, few, 5) for row in rows) == 7


def test_what_a_process_had_going_ends_with_it_but_its_minute_counts_on():
    clock = Clock()
    words = memoryview(bytearray(size_bytes(2))).cast("q")
    lost, other = uses(clock, words, 0), uses(clock, words, 1)
    key = made(max_in_flight=1, requests_per_minute=3)
    lost.admit(key)
    clear_row(words, 0)
    assert count_admitted(other, key, 10) == 2


def test_a_reload_keeps_what_is_counted():
    found, key = uses(Clock()), made(max_in_flight=1)
    found.admit(key)
    found.assign({"b": 1, "a": 0})
    with pytest.raises(KeyLimitReached):
        found.admit(key)


def test_a_key_that_is_gone_does_not_weigh_on_its_successor():
    found, gone = uses(Clock()), made("a", 0, max_in_flight=1, requests_per_minute=1)
    use = found.admit(gone)
    found.assign({"new": 0})
    new = made("new", 0, max_in_flight=1, requests_per_minute=1)
    found.admit(new)
    found.release(use)
    with pytest.raises(KeyLimitReached):
        found.admit(new)


def test_release_after_the_key_is_gone_does_nothing():
    found, key = uses(Clock()), made()
    use = found.admit(key)
    found.assign({})
    found.release(use)
    assert not any(found._words)


def test_the_last_slot_is_within_the_table():
    found = KeyUses(own_words(), 0, Clock())
    found.assign({"z": SLOTS - 1})
    found.admit(made("z", SLOTS - 1, max_in_flight=1, requests_per_minute=1))
