"""The deadlines of a request on a clock and a timer that tests turn (contract: timeouts)."""

import math
import types

import pytest
from engine_world import request

from coordinator.core.errors import DeadlineExceeded
from coordinator.dispatch.flight import Flight, Watch
from coordinator.dispatch.waits import Waits

pytestmark = pytest.mark.uncompiled  # a relay of its own

START_S = 1000.0


class Timers:
    """An event loop that has timers alone, and a clock that moves with them."""

    def __init__(self):
        self.now_s = START_S
        self.due = []
        self.set = 0
        self.waits = Waits(self, self.clock)

    def clock(self):
        return self.now_s

    def call_later(self, delay_s, callback):
        assert delay_s > 0
        self.set += callback != self.waits._look_around  # the one look for all
        handle = types.SimpleNamespace(at_s=self.now_s + delay_s, callback=callback, cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self.due.append(handle)
        return handle

    def until(self, at_s):
        """Let time pass up to `at_s` after the start."""
        while True:
            waiting = [handle for handle in self.due if not handle.cancelled and handle.at_s <= START_S + at_s]
            if not waiting:
                break
            handle = min(waiting, key=lambda one: one.at_s)
            self.due.remove(handle)
            self.now_s = max(self.now_s, handle.at_s)
            handle.callback()
        self.now_s = START_S + at_s

    @property
    def pending(self):
        return [handle for handle in self.due if not handle.cancelled]


class Case:
    def __init__(self, timers, **deadlines):
        self.timers = timers
        self.relay = types.SimpleNamespace(last_token_s=math.nan)
        self.lease = types.SimpleNamespace(prefilled_s=None)
        self.flight = Flight(request(arrived_s=START_S, **deadlines), self.relay, None)
        self.flight.lease = self.lease
        self.ended = []
        self.watch = Watch(self.flight, self.interrupt, timers.clock, timers.waits)
        self.watch.__enter__()

    def interrupt(self, error):
        assert isinstance(error, DeadlineExceeded)
        self.ended.append((error.stage, round(self.timers.now_s - START_S, 3)))

    def token(self, at_s):
        self.timers.until(at_s)
        self.relay.last_token_s = self.timers.now_s


@pytest.fixture
def timers():
    return Timers()


def test_no_first_token(timers):
    case = Case(timers, first_token_s=600, inter_token_s=120, finished_s=3600)
    timers.until(599.9)
    assert case.ended == []
    timers.until(10_000)
    assert case.ended == [("first_token", 600.0)]


def test_a_silence_between_tokens(timers):
    case = Case(timers, first_token_s=600, inter_token_s=120, finished_s=3600)
    for at_s in (10, 100, 219):
        case.token(at_s)
    timers.until(338.9)
    assert case.ended == []
    timers.until(10_000)
    assert case.ended == [("inter_token", 339.0)]


def test_the_whole_request(timers):
    case = Case(timers, first_token_s=600, inter_token_s=120, finished_s=3600)
    for at_s in range(10, 3600, 100):
        case.token(at_s)
    timers.until(10_000)
    assert case.ended == [("request", 3600.0)]


def test_a_silence_that_begins_late_is_not_seen_late(timers):
    """The timer is set for the first token; a token just before must not hide the silence after it."""
    case = Case(timers, first_token_s=600, inter_token_s=5, finished_s=3600)
    case.token(1)
    timers.until(10_000)
    stage, at_s = case.ended[0]
    assert stage == "inter_token"
    assert at_s == pytest.approx(6.0, abs=0.01)


def test_not_streaming(timers):
    """Until prefill is done the first token is awaited; from then on the whole answer."""
    case = Case(timers, stream=False, first_token_s=60, inter_token_s=5, finished_s=3600)
    timers.until(59)
    case.lease.prefilled_s = 1.0
    timers.until(10_000)
    assert case.ended == [("request", 3600.0)]


def test_not_streaming_and_prefill_hangs(timers):
    case = Case(timers, stream=False, first_token_s=60, inter_token_s=5, finished_s=3600)
    timers.until(10_000)
    assert case.ended == [("first_token", 60.0)]


def test_while_it_waits_for_an_instance_the_scheduler_counts(timers):
    case = Case(timers, first_token_s=60, inter_token_s=5, finished_s=3600)
    case.flight.lease = None
    timers.until(100)
    assert case.ended == []
    timers.until(10_000)
    assert case.ended == [("request", 3600.0)]


def test_placed_after_its_first_token_was_due(timers):
    """It waited for too long: the next look at the deadlines ends it."""
    case = Case(timers, first_token_s=60, inter_token_s=5, finished_s=3600)
    case.flight.lease = None
    timers.until(61)
    case.flight.lease = case.lease
    timers.until(3000)
    assert case.ended[0][0] == "first_token"
    assert case.ended[0][1] <= 61 + 5.01


@pytest.mark.parametrize(
    ("deadlines", "stage"),
    [({"first_token_s": 7}, "first_token"), ({"finished_s": 7}, "request"), ({"inter_token_s": 7}, "inter_token")],
)
def test_each_alone(timers, deadlines, stage):
    case = Case(timers, **deadlines)
    if stage == "inter_token":
        case.token(0.5)
    timers.until(10_000)
    assert case.ended[0][0] == stage


def test_all_off_sets_no_timer(timers):
    case = Case(timers)
    assert timers.pending == []
    case.watch.__exit__(None, None, None)


def test_leaving_ends_the_watch(timers):
    case = Case(timers, first_token_s=60)
    case.watch.__exit__(None, None, None)
    timers.until(10_000)
    assert case.ended == []
    assert timers.pending == []


def test_it_fires_once(timers):
    case = Case(timers, first_token_s=60, finished_s=70)
    timers.until(10_000)
    assert case.ended == [("first_token", 60.0)]
    assert timers.pending == []


def test_a_token_costs_no_timer(timers):
    case = Case(timers, first_token_s=600, inter_token_s=120, finished_s=3600)
    for number in range(2000):
        case.token(number * 0.5)
    assert case.ended == []
    assert timers.set < 20


def test_a_deadline_in_the_past(timers):
    case = Case(timers, finished_s=-5)
    timers.until(1)
    assert case.ended[0][0] == "request"
