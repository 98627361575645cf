"""The sink of streamed legs, driven by hand."""

import asyncio

import pytest
from msgspec import Raw
from vllm_pair import DONE, Placement, Sink, event, sse

from coordinator.core.errors import EngineFailed, EngineRefused, Side
from coordinator.core.instance import Address, Instance, Role
from coordinator.engines.http_leg import MAX_ERROR_BYTES, StreamLeg
from coordinator.engines.vllm.legs import MergingLeg
from coordinator.transport.errors import TransportError

DECODE = Instance("d0", Role.DECODE, Address("127.0.0.1", 1), "vllm")
SSE = ((b"content-type", b"text/event-stream; charset=utf-8"),)
OPENS = event({"role": "assistant", "content": ""})
TOKEN, LAST = event({"content": "A" * 200}), event({"content": "B"}, "stop")
ERROR = sse({"error": {"message": "boom", "code": 500}})


class Driven:
    def __init__(self, *, status=200, headers=SSE, api="openai", untyped=False):
        self.sink = Sink(api)
        self.stages = Placement(DECODE, DECODE)
        self.leg = StreamLeg(DECODE, self.stages, self.sink, untyped=untyped)
        self.leg.head(status, headers)

    def feed(self, *pieces, end=True):
        for at, piece in enumerate(pieces):
            self.leg.data(piece, float(at))
        if end:
            self.leg.end(9.0)
        return self

    def error(self):
        error = self.leg.done.exception()
        assert isinstance(error, (EngineFailed, EngineRefused))
        return error


async def test_pieces_go_on_as_they_come():
    driven = Driven().feed(OPENS, TOKEN, b": ping\n\n", LAST, DONE)
    driven.leg.done.result()
    assert driven.sink.pieces == [OPENS, TOKEN, b": ping\n\n", LAST, DONE, b""]
    assert driven.sink.tokens == [False, True, False, True, False]
    assert driven.stages.moments == ["prefilled", "decoding"]
    assert driven.leg.decoding


async def test_an_opening_is_no_token():
    driven = Driven().feed(OPENS, end=False)
    assert not driven.leg.decoding
    assert driven.stages.moments == []


@pytest.mark.parametrize("size", [1, 2, 7, 100, 130, 500])
async def test_the_end_is_known_however_the_bytes_come(size):
    stream = OPENS + TOKEN * 20 + LAST
    driven = Driven().feed(*(stream[at : at + size] for at in range(0, len(stream), size)))
    driven.leg.done.result()
    assert driven.sink.text == stream + DONE


@pytest.mark.parametrize(
    "pieces", [(), (b": ping\n\n",), (OPENS,), (OPENS, TOKEN), (TOKEN, TOKEN[:50]), (DONE,), (OPENS, DONE)]
)
async def test_a_stream_that_only_stops_is_a_failure(pieces):
    error = Driven().feed(*pieces).error()
    assert (error.side, error.instance_id, error.reason) == (Side.DECODE, "d0", "ended_early")


async def test_a_family_without_a_sign_of_its_end_must_have_said_something():
    assert Driven(api="vllm", headers=(), untyped=True).feed().error().reason == "ended_early"
    Driven(api="vllm", headers=(), untyped=True).feed(b'{"text":["a"]}\0').leg.done.result()


@pytest.mark.parametrize("together", [False, True])
async def test_an_error_event_is_told_once(together):
    pieces = (TOKEN + ERROR + DONE, TOKEN) if together else (TOKEN, ERROR, DONE, TOKEN)
    driven = Driven().feed(*pieces)
    assert driven.error().reason == "engine_error"
    assert driven.error().message == "the decode instance failed: boom"
    assert driven.sink.text == TOKEN
    assert driven.leg.decoding


async def test_an_error_event_in_parts_is_found_at_the_end():
    driven = Driven().feed(TOKEN, ERROR[:10], ERROR[10:], DONE)
    assert driven.error().reason == "engine_error"


async def test_an_error_before_anything_was_sent():
    assert Driven().feed(sse({"error": {"message": "boom", "code": 400}})).error().status == 400
    driven = Driven().feed(ERROR)
    assert driven.error().reason == "engine_error"
    assert not driven.sink.started
    assert not driven.leg.decoding


async def test_text_about_errors_is_text():
    said = event({"content": 'data: {"error": "x"}'}, "stop")
    assert Driven().feed(TOKEN, said).sink.text == TOKEN + said + DONE


async def test_an_event_that_broke_off_does_not_swallow_what_follows():
    driven = Driven().feed(TOKEN, TOKEN[:30], end=False)
    driven.leg.lost(TransportError("reset"))
    assert driven.error().reason == "reset"
    assert driven.sink.text == TOKEN + TOKEN[:30] + b"\n\n"
    driven = Driven().feed(TOKEN, end=False)
    driven.leg.lost(TransportError("reset"))
    assert driven.sink.text == TOKEN


async def test_a_refusal_and_its_bound():
    assert Driven(status=429).feed(b'{"error":', b'{"message":"slow"}}').error().message == "slow"
    driven = Driven(status=500).feed(b"x" * MAX_ERROR_BYTES, b"y", b"z", end=False)
    assert driven.error().reason == "http_5xx"
    assert driven.sink.pieces == []


async def test_a_whole_answer_to_a_stream():
    headers = ((b"content-type", b"application/json"),)
    driven = Driven(headers=headers).feed(b'{"a"', b":1}")
    assert driven.sink.answer == b'{"a":1}'
    assert driven.leg.decoding
    assert Driven(headers=headers).feed(b'{"a"').error().reason == "bad_reply"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"error":{"message":"boom","code":500}}', 502, "the decode instance failed: boom"),
        (b'{"error":{"message":"boom","type":"x"}}', 502, "the decode instance failed: boom"),
        (b'{"error":"boom","error_type":"generation"}', 502, "the decode instance failed: boom"),
        (b'{"object":"error","message":"boom"}', 502, "the decode instance failed: boom"),
        (b'{"id":1, "error": {"message":"too long","code":400}}', 400, "too long"),
    ],
)
async def test_an_error_behind_a_200_is_no_answer(body, status, says):
    driven = Driven(headers=((b"content-type", b"application/json"),)).feed(body[:7], body[7:])
    assert (driven.error().status, driven.error().message) == (status, says)
    assert not driven.sink.started
    assert not driven.leg.decoding
    assert driven.stages.moments == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"message":{"content":"\\"error\\""}}],"error":null}',
        b'{"choices":[],"error":{"message":"partly"}}',
        b'[{"generated_text":"x","token":"error"}]',
        b'{"generated_text":"x","details":{"logprobs":[{"text":"error"}]}}',
        b'{"text":["x"],"why":"error"}',
    ],
)
async def test_an_answer_about_errors_is_an_answer(body):
    assert Driven(headers=((b"content-type", b"application/json"),)).feed(body).sink.answer == body


async def test_a_whole_answer_to_a_stream_has_a_limit(monkeypatch):
    monkeypatch.setattr("coordinator.engines.whole_answer.MAX_BYTES", 10)
    headers = ((b"content-type", b"application/json"),)
    assert Driven(headers=headers).feed(b'{"a"', b":1234}").sink.answer == b'{"a":1234}'
    driven = Driven(headers=headers).feed(b'{"a"', b":12345}", b"more", end=False)
    assert driven.error().reason == "reply_too_large"
    assert not driven.sink.started


async def test_usage_is_merged_at_the_end_and_held_pieces_come():
    sink = Sink()
    leg = MergingLeg(DECODE, Placement(DECODE, DECODE), sink, Raw(b"3"))
    leg.head(200, SSE)
    usage = sse({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 8}}})
    for piece in (OPENS, TOKEN[:9], TOKEN[9:], LAST + usage[:40], usage[40:] + b"data: [DONE]"):
        leg.data(piece, 1.0)
    leg.end(2.0)
    leg.done.result()
    assert b'"cached_tokens":3' in sink.text
    assert sink.text.startswith(OPENS + TOKEN + LAST)
    assert sink.text.endswith(b"\n\ndata: [DONE]")
    assert sink.text.count(b"[DONE]") == 1


async def test_a_merging_leg_that_is_lost_drops_the_piece_it_holds():
    sink = Sink()
    leg = MergingLeg(DECODE, Placement(DECODE, DECODE), sink, Raw(b"3"))
    leg.head(200, SSE)
    leg.data(TOKEN + TOKEN[:20], 1.0)
    leg.lost(TransportError("reset"))
    assert isinstance(leg.done.exception(), EngineFailed)
    assert sink.text == TOKEN


async def test_a_settled_leg_takes_no_more():
    driven = Driven().feed(TOKEN, ERROR, end=False)
    driven.leg.end(1.0)
    driven.leg.lost(TransportError("reset"))
    assert driven.error().reason == "engine_error"
    done = asyncio.get_running_loop().create_future()
    driven.leg.done = done
    done.cancel()
    driven.leg.end(1.0)
    assert driven.sink.text == TOKEN
