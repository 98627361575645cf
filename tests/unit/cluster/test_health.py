"""The state machine of one instance, as tables of events and states."""

import pytest

from coordinator.cluster.health import Health, HealthSettings
from coordinator.core.instance import State

SETTINGS = HealthSettings(interval_s=10, timeout_s=3, fail_after=3, recover_after=2)

OK, BAD, REFUSED, LINK, CUT, FAIL, DONE = "ok", "bad", "refused", "link", "cut", "fail", "done"
J, R, S, D = State.JOINING, State.READY, State.SUSPECT, State.DOWN


def feed(health, event, now_s):
    if event == OK:
        health.checked()
    elif event == BAD:
        health.check_failed("refused")
    elif event == REFUSED:
        health.unconnected("refused")
    elif event == LINK:
        health.link_up()
    elif event == CUT:
        health.link_down("reset")
    elif event == FAIL:
        health.request_failed("status 500", now_s)
    elif event == DONE:
        health.request_done()


TABLES = {
    "a check makes it ready": [(LINK, J), (OK, R)],
    "the link may come last": [(OK, J), (LINK, R)],
    "never seen healthy stays joining": [(LINK, J), *[(BAD, J)] * 5, (OK, R)],
    "one failed check is a doubt": [(LINK, J), (OK, R), (BAD, S), (OK, S), (OK, R)],
    "too many are a loss": [(LINK, J), (OK, R), (BAD, S), (BAD, S), (BAD, D), (OK, D), (OK, R)],
    "good ones must be in a row": [(LINK, J), (OK, R), (BAD, S), (OK, S), (BAD, S), (OK, S), (OK, R)],
    "so must be failures": [(LINK, J), (OK, R), (BAD, S), (BAD, S), (OK, S), (BAD, S), (BAD, S), (BAD, D)],
    "down needs a row too": [(LINK, J), (OK, R), *[(BAD, S)] * 2, (BAD, D), (OK, D), (BAD, D), (OK, D), (OK, R)],
    "connections count with checks": [(LINK, J), (OK, R), (REFUSED, S), (BAD, S), (REFUSED, D)],
    "a burst of them counts once": [(LINK, J), (OK, R), *[(REFUSED, S)] * 20, (BAD, S), (BAD, D)],
    "and once again after a check": [(LINK, J), (OK, R), (REFUSED, S), (OK, S), (REFUSED, S), (OK, S), (OK, R)],
    "a lost link takes it out at once": [(LINK, J), (OK, R), (CUT, D), (LINK, R)],
    "a new link needs one good check": [(LINK, J), (OK, R), (CUT, D), *[(BAD, D)] * 3, (LINK, D), (OK, R)],
    "but a bad one revokes that": [
        (LINK, J),
        (OK, R),
        (CUT, D),
        *[(BAD, D)] * 3,
        (LINK, D),
        (BAD, D),
        (OK, D),
        (OK, R),
    ],
    "a link that never opened": [(CUT, J), (OK, J), (CUT, J), (LINK, R)],
    "request failures in a row": [(LINK, J), (OK, R), (FAIL, R), (FAIL, R), (FAIL, S), (FAIL, S), (OK, S)],
    "a good request between": [(LINK, J), (OK, R), (FAIL, R), (FAIL, R), (DONE, R), (FAIL, R), (FAIL, R), (FAIL, S)],
    "a good request ends it": [(LINK, J), (OK, R), *[(FAIL, R)] * 2, (FAIL, S), (DONE, R), (FAIL, R), (FAIL, R)],
    "they never make it down": [(LINK, J), (OK, R), *[(FAIL, R)] * 2, *[(FAIL, S)] * 50],
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_state_follows_events(table):
    health = Health(SETTINGS)
    assert health.state(0) is J
    for step, (event, state) in enumerate(table):
        feed(health, event, 1.0)
        assert health.state(1.0) is state, f"step {step}: {event}"
        assert bool(health.reason(1.0)) == (state is not R), f"step {step}: {event}"


def test_one_failure_is_enough_for_a_strict_setting():
    health = Health(HealthSettings(10, 3, fail_after=1, recover_after=1))
    for event, state in ((LINK, J), (OK, R), (BAD, D), (OK, R), (FAIL, S)):
        feed(health, event, 0.0)
        assert health.state(0.0) is state


def test_cool_downs_double_and_are_capped():
    health = Health(SETTINGS)
    health.link_up()
    health.checked()
    now_s = 100.0
    lengths = []
    for trip in range(6):
        for _ in range(3 if trip == 0 else 1):
            assert health.state(now_s) is R
            health.request_failed("status 500", now_s)
        assert health.state(now_s) is S
        lengths.append(health.cools_at_s - now_s)
        assert health.state(health.cools_at_s - 0.001) is S
        now_s = health.cools_at_s
        assert health.state(now_s) is R
    assert lengths == [10, 20, 40, 60, 60, 60]
    assert health.request_done()
    assert not health.request_done()
    health.request_failed("status 500", now_s)
    assert health.state(now_s) is R, "a good request makes it start over"


def test_failures_during_a_cool_down_do_not_lengthen_it():
    health = Health(SETTINGS)
    health.link_up()
    health.checked()
    for now_s in (0.0, 1.0, 2.0, 3.0, 11.9):
        health.request_failed("status 500", now_s)
    assert health.cools_at_s == 12.0
    health.request_failed("status 500", 12.0)
    assert health.cools_at_s == 32.0


def test_many_trips_stay_finite():
    health = Health(SETTINGS)
    now_s = 0.0
    for _ in range(5000):
        health.request_failed("status 500", now_s)
        now_s = max(now_s, health.cools_at_s)
    assert health.cools_at_s - now_s <= 60


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((), "not checked yet"),
        ((BAD,), "refused"),
        ((LINK, OK, BAD), "refused"),
        ((OK,), "unlinked: not linked yet"),
        ((LINK, OK, CUT), "unlinked: reset"),
        ((LINK, OK, FAIL, FAIL, FAIL), "requests failed: status 500"),
    ],
)
def test_reasons(events, words):
    health = Health(SETTINGS)
    for event in events:
        feed(health, event, 0.0)
    assert health.reason(0.0) == words
