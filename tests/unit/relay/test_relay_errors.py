"""How a failure is told: by a status before the first byte, by an event after it."""

import json

import pytest
from relay_world import BY_NAME, T0, Case

from coordinator.core.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRefused,
    HeadersTooLarge,
    InternalError,
    NoInstance,
    Side,
    SlowClient,
    TooManyRequests,
    UnknownExpectation,
    UnknownModel,
    UnknownPath,
    UnsupportedEncoding,
    WrongMethod,
)

FAILED = EngineFailed(Side.DECODE, "d0", "reset", detail="10.0.0.1:99")


def text_in(body):
    error = json.loads(body)["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("family", BY_NAME)
class TestEachFamily:
    def test_before_the_first_byte(self, family):
        case = Case(family)
        case.relay.fail(FAILED)
        assert case.client.status == case.record.status == 502
        assert case.client.headers["content-type"] == "application/json"
        assert case.client.headers["x-request-id"] == "client-7"
        assert text_in(case.client.body) == FAILED.message
        assert case.client.whole
        assert len(case.client.writes) == 1
        assert b"10.0.0.1" not in case.client.body

    def test_after_it(self, family):
        case = Case(family)
        case.relay.piece(b"data: 1\n\n", T0 + 1)
        case.relay.fail(FAILED)
        event = case.client.body.removeprefix(b"data: 1\n\n")
        assert event == case.family.error_event(FAILED)
        assert text_in(event[event.index(b"{") :].rstrip(b"\0")) == FAILED.message
        assert not case.client.whole, "a broken answer must not look like a whole one"
        assert case.client.ends == ["torn"]
        assert b"[DONE]" not in case.client.body
        assert case.record.status == 200

    def test_after_the_end_it_is_too_late(self, family):
        case = Case(family)
        case.relay.finish(b"data: 1\n\n", T0 + 1)
        written = list(case.client.writes)
        case.relay.fail(FAILED)
        assert case.client.writes == written
        assert case.client.whole

    def test_only_once(self, family):
        case = Case(family)
        case.relay.fail(FAILED)
        case.relay.fail(FAILED)
        assert len(case.client.writes) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("x"), 400), (UnknownPath("x"), 404), (UnknownModel("x"), 404), (WrongMethod("x", allow="GET"), 405),
        (BodyTooLarge("x"), 413), (UnsupportedEncoding("x"), 415), (UnknownExpectation("x"), 417),
        (HeadersTooLarge("x"), 431), (EngineRefused(422, "x"), 422), (TooManyRequests("x"), 429),
        (NoInstance("x"), 503), (Draining(), 503), (DeadlineExceeded("schedule"), 504), (FAILED, 502),
        (InternalError("x"), 500),
    ],
)  # fmt: skip
def test_statuses(error, status):
    case = Case()
    case.relay.fail(error)
    assert case.client.status == case.record.status == status


class TestHeaders:
    def headers(self, error):
        case = Case()
        case.relay.fail(error)
        return case.client.headers

    @pytest.mark.parametrize(
        ("error", "after"),
        [
            (TooManyRequests("x"), "1"),
            (TooManyRequests("x", retry_after_s=9), "9"),
            (NoInstance("x"), "1"),
            (Draining(), "1"),
            (EngineRefused(429, "x", retry_after_s=120), "120"),
            (EngineRefused(413, "x", retry_after_s=3), "3"),
            (EngineRefused(429, "x"), None),
            (FAILED, None),
            (BadRequest("x"), None),
            (DeadlineExceeded("request"), None),
        ],
    )
    def test_retry_after(self, error, after):
        assert self.headers(error).get("retry-after") == after

    def test_a_deadline_is_not_to_be_tried_again(self):
        assert self.headers(DeadlineExceeded("first_token"))["x-should-retry"] == "false"
        assert "x-should-retry" not in self.headers(NoInstance("x"))

    def test_methods_that_are_allowed(self):
        assert self.headers(WrongMethod("x", allow="GET, HEAD"))["allow"] == "GET, HEAD"

    def test_encodings_that_are_read(self):
        assert self.headers(UnsupportedEncoding("x"))["accept-encoding"] == "gzip, deflate"


class TestSlowClient:
    def test_it_is_cut_off_without_a_word(self):
        case = Case()
        case.relay.piece(b"data: 1\n\n", T0 + 1)
        written = list(case.client.writes)
        case.relay.fail(SlowClient("the client reads too slowly"))
        assert case.client.writes == written
        assert case.client.ends == ["reset"]

    def test_one_that_has_its_answer_is_left_alone(self):
        case = Case()
        case.relay.finish(b"data: 1\n\n", T0 + 1)
        case.relay.fail(SlowClient("the client reads too slowly"))
        assert case.client.ends == ["answered"]


def test_a_head_request_gets_the_head_of_its_error():
    case = Case(method="HEAD")
    case.relay.fail(NoInstance("x"))
    assert case.client.status == 503
    assert b"".join(case.client.writes).endswith(b"\r\n\r\n")


def test_a_client_that_has_left_is_told_nothing():
    case = Case()
    case.client.exchange.left()
    case.relay.fail(ClientGone("the client has left"))
    assert case.client.writes == []
