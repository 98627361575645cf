"""Clients that read more slowly than their answer is made."""

from relay_world import T0, Case

from coordinator.core.errors import SlowClient

A = b"data: 1\n\n"


class Source:
    """An engine's connection that can be paused; says so if it is told the same twice."""

    def __init__(self, case):
        self.paused = False
        self.calls = []
        case.relay.paced_by(self.pause, self.resume)

    def pause(self):
        assert not self.paused
        self.paused = True
        self.calls.append("pause")

    def resume(self):
        assert self.paused
        self.paused = False
        self.calls.append("resume")


def test_its_own_source_is_slowed_down_until_it_has_caught_up():
    case = Case()
    source = Source(case)
    case.relay.piece(A, T0)
    assert source.calls == []
    case.congest(500)
    for _ in range(3):
        case.relay.piece(A, T0)
    assert source.calls == ["pause"]
    case.relieve()
    assert source.calls == ["pause", "resume"]
    case.congest(500)
    case.relay.piece(A, T0)
    assert source.calls == ["pause", "resume", "pause"]
    assert case.cuts == []


def test_without_a_source_of_its_own_the_bound_decides():
    """A shared stream never waits for one client: that one is cut off alone."""
    case = Case(limit_bytes=1000)
    case.congest(1000)
    case.relay.piece(A, T0)
    assert case.cuts == []
    case.congest(1001)
    case.relay.piece(A, T0)
    assert [type(error) for error in case.cuts] == [SlowClient]


def test_the_bound_holds_for_a_paced_source_too():
    case = Case(limit_bytes=1000)
    source = Source(case)
    case.congest(5000)
    case.relay.piece(A, T0)
    assert source.paused
    assert len(case.cuts) == 1


def test_after_the_request_nobody_is_told():
    case = Case(limit_bytes=10)
    case.relay.on_cut = None
    case.congest(5000)
    case.relay.piece(A, T0)
    assert case.cuts == []


def test_the_end_forgets_the_source():
    case = Case()
    source = Source(case)
    case.relay.piece(A, T0)
    case.congest(500)
    case.relay.piece(A, T0)
    case.relay.finish(A, T0)
    case.relieve()
    assert source.calls == ["pause"]
    assert case.client.exchange.on_writable is None


def test_a_client_that_leaves_does_not_wake_the_source():
    case = Case()
    source = Source(case)
    case.congest(500)
    case.relay.piece(A, T0)
    case.client.exchange.left()
    case.relieve()
    assert source.calls == ["pause"]


def test_a_large_first_piece_is_no_reason_to_cut_a_client_that_takes_it():
    case = Case(limit_bytes=10)
    case.relay.piece(A * 10_000, T0)
    assert case.cuts == []
