"""Waits in bags, on a loop and a clock that tests turn."""

import pytest
from test_deadline_watch import START_S, Timers

from coordinator.dispatch.waits import FAR_S


class Waiter:
    def __init__(self, timers):
        self.timers = timers
        self.due_s = 0.0
        self.timer = None
        self.fired = []

    def fire(self):
        self.timer = None
        self.fired.append(round(self.timers.now_s - START_S, 3))

    def start(self, wait_s):
        self.timers.waits.start(self, self.timers.now_s, wait_s)
        return self


@pytest.fixture
def timers():
    return Timers()


@pytest.mark.parametrize("wait_s", [0.0, 0.5, FAR_S, FAR_S + 0.001, 3.999, 4.0, 4.75, 60, 600.25, 3600])
def test_it_fires_in_time_and_once(timers, wait_s):
    timers.now_s += 0.3
    waiter = Waiter(timers).start(wait_s)
    timers.until(10_000)
    assert waiter.fired == [pytest.approx(max(wait_s, 0.002) + 0.3, abs=0.001)]
    assert timers.pending == []


@pytest.mark.parametrize("stopped_s", [0, 1, 56, 57.5, 59.9])
def test_what_is_stopped_does_not_fire(timers, stopped_s):
    stopped, other = Waiter(timers).start(60), Waiter(timers).start(60)
    timers.until(stopped_s)
    timers.waits.stop(stopped)
    timers.waits.stop(stopped)
    timers.until(10_000)
    assert (stopped.fired, other.fired) == ([], [60.0])
    assert timers.pending == []


def test_stopping_one_that_never_began_or_has_fired(timers):
    waiter = Waiter(timers)
    timers.waits.stop(waiter)
    waiter.start(10)
    timers.until(20)
    timers.waits.stop(waiter)
    waiter.start(10)
    timers.until(40)
    assert waiter.fired == [10.0, 30.0]


def test_many_wait_with_one_timer(timers):
    waiters = [Waiter(timers).start(600 + number / 100) for number in range(1000)]
    timers.until(500)
    assert len(timers.pending) == 1
    for waiter in waiters:
        timers.waits.stop(waiter)
    timers.until(502)
    assert timers.pending == []
    assert timers.waits._bags == {}
    assert timers.set == 0
