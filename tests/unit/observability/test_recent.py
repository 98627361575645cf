"""The last requests and failures: bounded, merged, and without a word of a client or an engine."""

import msgspec
import pytest

from coordinator.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    NoInstance,
    Outcome,
    Side,
)
from coordinator.observability.access import RequestRecord
from coordinator.observability.recent import ID_LIMIT, MOST_FAILURES, MOST_PATHS, Recent, Recently, merged

SECRET = "tell nobody"


class Days:
    """Wall-clock time that moves by a second with each look."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        self.now_s += 1
        return self.now_s


@pytest.fixture
def recent():
    return Recent(Days())


def record(ident="r1", error=None, **changed):
    given = {"prefill": "p0", "decode": "d0", "attempts": 1, "queue_s": 0.25, "duration_s": 2.0, **changed}
    made = RequestRecord(ident, "openai", "/v1/completions", **given)
    if error is not None:
        made.failed(error)
    return made


def failed(instance="d0", reason="reset", side=Side.DECODE):
    return EngineFailed(side, instance, reason, detail=SECRET)


def test_a_path_has_stages_and_instances(recent):
    recent.take(record(prefill_s=0.5, handoff_s=0.125, decode_s=1.0, ttft_s=0.9, events=7))
    (path,) = recent.read().paths
    assert (path.id, path.api, path.outcome) == ("r1", "openai", "ok")
    assert (path.prefill, path.decode) == ("p0", "d0")
    assert (path.queue_s, path.prefill_s, path.handoff_s, path.decode_s) == (0.25, 0.5, 0.125, 1.0)
    assert (path.ttft_s, path.duration_s, path.tokens, path.at_s) == (0.9, 2.0, 7, 1001.0)


def test_the_newest_come_first_and_old_ones_go(recent):
    for number in range(MOST_PATHS + 3):
        recent.take(record(f"r{number}"))
    paths = recent.read().paths
    assert len(paths) == MOST_PATHS
    assert [path.id for path in paths][:2] == [f"r{MOST_PATHS + 2}", f"r{MOST_PATHS + 1}"]


def test_a_request_that_was_never_placed_has_waited_all_the_time(recent):
    recent.take(record(error=DeadlineExceeded("schedule"), prefill=None, decode=None, queue_s=None))
    (path,) = recent.read().paths
    assert (path.queue_s, path.prefill, path.outcome) == (2.0, "", "deadline")


def test_what_never_wanted_an_instance_has_no_path(recent):
    recent.take(record(prefill=None, decode=None))
    recent.take(record(error=BadRequest(SECRET), prefill=None, decode=None))
    assert recent.read().paths == []


def test_failures_of_a_kind_are_counted_together(recent):
    for number in range(3):
        recent.take(record(f"r{number}", NoInstance(SECRET)))
    recent.take(record("r9", DeadlineExceeded("first_token")))
    newest, oldest = recent.read().failures
    assert (newest.code, newest.reason, newest.count) == ("deadline_exceeded", "first_token", 1)
    assert (oldest.code, oldest.count, oldest.request, oldest.survived) == ("no_instance", 3, "r2", 0)
    assert oldest.at_s < newest.at_s


def test_a_failed_attempt_that_another_made_good(recent):
    made = record()
    made.blame(failed("d1"))
    recent.take(made)
    (failure,) = recent.read().failures
    assert (failure.instance, failure.reason, failure.side) == ("d1", "reset", "decode")
    assert (failure.count, failure.survived) == (1, 1)


def test_the_last_attempt_is_not_counted_twice(recent):
    error = failed()
    made = record(error=error)
    made.blame(failed("d1"))
    made.blame(error)
    recent.take(made)
    assert sorted((f.instance, f.count, f.survived) for f in recent.read().failures) == [("d0", 1, 0), ("d1", 1, 0)]


def test_a_failure_of_an_engine_that_was_no_attempt_counts_by_itself(recent):
    recent.take(record(error=failed(reason="recompute")))
    assert [(f.reason, f.count) for f in recent.read().failures] == [("recompute", 1)]


def test_old_kinds_of_failures_go(recent):
    for number in range(MOST_FAILURES + 5):
        recent.take(record(f"r{number}", failed(f"d{number}")))
    failures = recent.read().failures
    assert len(failures) == MOST_FAILURES
    assert failures[0].instance == f"d{MOST_FAILURES + 4}"
    assert all(failure.instance != "d0" for failure in failures)


def test_a_kind_that_comes_again_is_new_again(recent):
    recent.take(record("r1", failed("d0")))
    for number in range(1, MOST_FAILURES):
        recent.take(record(f"r{number}", failed(f"d{number}")))
    recent.take(record("again", failed("d0")))
    recent.take(record("one more", failed("another")))
    failures = {failure.instance: failure for failure in recent.read().failures}
    assert failures["d0"].count == 2
    assert "d1" not in failures


def test_nothing_of_a_text_gets_in(recent):
    made = record("\x1b[31m" + "x" * 200, failed(), model=SECRET, client=SECRET, key=SECRET)
    made.blame(failed("d1"))
    recent.take(made)
    sent = msgspec.json.encode(recent.read()).decode()
    assert SECRET not in sent
    (path,) = recent.read().paths
    assert path.id.isprintable()
    assert len(path.id) <= ID_LIMIT + 3


def test_several_processes_are_one():
    days, parts = Days(), []
    for worker in range(3):
        recent = Recent(days)
        for number in range(20):
            recent.take(record(f"w{worker}-{number}", failed("d0" if number % 2 else f"d{worker}")))
        parts.append(recent.read())
    whole = merged(parts)
    assert len(whole.paths) == MOST_PATHS
    assert [path.at_s for path in whole.paths] == sorted((path.at_s for path in whole.paths), reverse=True)
    assert whole.paths[0].id == "w2-19"
    counts = {failure.instance: failure.count for failure in whole.failures}
    assert counts == {"d0": 40, "d1": 10, "d2": 10}
    assert whole.failures[0].request == "w2-19"


def test_one_process_is_passed_on_as_it_is_and_none_is_empty(recent):
    recent.take(record())
    part = recent.read()
    assert merged([part]) is part
    assert merged([]) == Recently([], [])


def test_it_travels_between_processes(recent):
    recent.take(record(error=failed()))
    part = recent.read()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=Recently) == part


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.OK])
def test_who_was_placed_has_a_path_however_it_ended(recent, outcome):
    recent.take(record(outcome=outcome))
    assert [path.outcome for path in recent.read().paths] == [outcome.value]
