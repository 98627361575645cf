"""The sink of prefill's answer, and the sink in front of the client's."""

import pytest
from engine_world import Out, instance
from sglang_world import DONE, event

from coordinator.core.errors import EngineFailed, EngineRefused, Side
from coordinator.engines.http_leg import MAX_ERROR_BYTES
from coordinator.engines.sglang import joined, legs
from coordinator.engines.sglang.joined import LogprobsOut
from coordinator.engines.sglang.legs import PrefillLeg, settled
from coordinator.transport.errors import TransportError

JSON = ((b"content-type", b"application/json"),)


class Told:
    """A leg and what it has told."""

    def __init__(self, *, stream=False, keep_bytes=100):
        self.ends = []
        self.doomed = 0
        self.leg = PrefillLeg(
            instance("p0", engine="sglang"),
            stream=stream,
            keep_bytes=keep_bytes,
            on_doomed=self._doom,
            on_over=lambda now_s, error: self.ends.append((now_s, error)),
        )

    def _doom(self):
        self.doomed += 1

    @property
    def error(self):
        ((_, error),) = self.ends
        return error


def test_a_good_answer_is_kept_up_to_its_limit():
    told = Told()
    told.leg.head(200, JSON)
    for _ in range(50):
        told.leg.data(b"x" * 7, 1.0)
    assert not told.leg.over
    told.leg.end(2.0)
    assert told.ends == [(2.0, None)]
    assert told.leg.over
    assert told.leg.body == b"x" * 100
    assert told.doomed == 0


def test_a_refusal_is_the_clients():
    told = Told()
    told.leg.head(422, (*JSON, (b"retry-after", b"7")))
    assert told.doomed == 1
    told.leg.data(b'{"error":{"message":', 1.0)
    told.leg.data(b'"no"}}', 1.0)
    told.leg.end(1.0)
    assert isinstance(told.error, EngineRefused)
    assert (told.error.status, told.error.message, told.error.retry_after_s) == (422, "no", 7)


def test_an_endless_failure_is_told_when_there_is_enough_of_it():
    told = Told(keep_bytes=1)
    told.leg.head(500, JSON)
    while not told.ends:
        told.leg.data(b"E" * 10_000, 1.0)
    assert len(told.leg.body) == MAX_ERROR_BYTES
    told.leg.data(b"E", 1.0)
    told.leg.end(1.0)
    assert (told.error.reason, told.error.side) == ("http_5xx", Side.PREFILL)


def test_a_failure_that_does_not_end_is_given_up():
    told = Told()
    told.leg.give_up(1.0)
    told.leg.head(200, JSON)
    told.leg.give_up(1.0)
    assert not told.ends
    told = Told()
    told.leg.head(400, JSON)
    told.leg.data(b"because", 1.0)
    told.leg.give_up(1.0)
    told.leg.give_up(2.0)
    assert (told.error.status, told.error.message) == (400, "because")


@pytest.mark.parametrize(
    ("body", "stream", "kind", "says"),
    [
        (b"", False, EngineFailed, "bad_reply"),
        (b" \n", True, EngineFailed, "bad_reply"),
        (event({"error": {"message": "x", "code": 500}}) + DONE, True, EngineFailed, "engine_error"),
        (event({"error": {"message": "x", "code": 400}}) + DONE, True, EngineRefused, "x"),
        (event({"error": {"code": 400}}), True, EngineRefused, "status 400"),
        (b'{"error":{"message":"x"}}', False, EngineFailed, "engine_error"),
    ],
)
def test_a_200_is_not_yet_a_success(body, stream, kind, says):
    told = Told(stream=stream)
    told.leg.head(200, JSON)
    if body:
        told.leg.data(body, 1.0)
    told.leg.end(1.0)
    assert type(told.error) is kind
    assert says in (told.error.reason if kind is EngineFailed else told.error.message)


def test_a_lost_connection_is_stale_only_at_once(monkeypatch):
    for unsent, wait_s, stale in ((True, 0.5, True), (True, 1.5, False), (False, 0.5, False)):
        now_s = [100.0]
        monkeypatch.setattr(legs.time, "monotonic", lambda now_s=now_s: now_s[0])
        told = Told()
        now_s[0] += wait_s
        told.leg.lost(TransportError("closed", "x", unsent=unsent))
        assert told.leg.stale is stale
        assert told.error.reason == "closed"
        assert told.ends[0][0] == 100.0 + wait_s


def test_nobody_is_told_after_parting():
    told = Told()
    told.leg.part()
    told.leg.head(500, JSON)
    told.leg.end(1.0)
    assert not told.ends
    assert told.doomed == 0
    assert told.leg.over


def test_a_refusal_that_blames_the_other_leg_is_no_refusal():
    p0 = instance("p0", engine="sglang")
    error, blames = settled(p0, EngineRefused(400, "Aborted by AbortReq."))
    assert blames
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "engine_error")
    assert "400" in error.detail
    own = EngineRefused(400, "too long")
    assert settled(p0, own) == (own, False)
    failed = EngineFailed(Side.PREFILL, "p0", "http_5xx", detail="status 500: KVTransferError")
    assert settled(p0, failed) == (failed, True)


def test_a_stream_that_is_held_back_is_paused_and_goes_on(monkeypatch):
    monkeypatch.setattr(joined, "MAX_HELD_BYTES", 100)
    out, paces = Out("sglang"), []
    held = LogprobsOut(out, stream=True)
    held.paced_by(lambda: paces.append("pause"), lambda: paces.append("resume"))
    assert out.pace is not None
    for _ in range(11):
        held.piece(b": 23456789", 1.0)
    held.finish(b"", 1.0, token=False, after=DONE)
    assert held.waits
    assert not held.started
    assert paces == ["pause"]
    held.prefilled(b"nothing", 2.0)
    assert paces == ["pause", "resume"]
    assert out.body == b": 23456789" * 11
    assert out.over
    assert not held.waits
    held.release()
