"""Faults of simulated SGLang instances: each shows on the wire, and none leaves KV behind."""

import asyncio

import pytest
from openai_client import CHAT, Events, chat, get, opened, post, until
from sglang_legs import GENERATE, both, meeting, pair

TEXT = "hello [[length:6]]"


async def streams(fleet, text=TEXT):
    """(events of prefill, events of decode) of one streamed request."""
    prefill, decode = fleet.instances
    body = {**chat(text), **meeting(prefill), "stream": True}
    async with opened(prefill, CHAT, body) as one, opened(decode, CHAT, body) as two:
        await one.head()
        await two.head()
        return [Events(*got) for got in await asyncio.gather(one.body(), two.body())]


async def test_prefill_fails_at_once_and_decode_waits():
    async with pair(prefill=["status=400"], bootstrap_timeout_s=0.1) as fleet:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        on_prefill, on_decode = await both(fleet, CHAT, chat(TEXT))
        assert (on_prefill.status, on_prefill.json["message"]) == (400, "injected failure")
        assert (on_decode.status, loop.time() - began_s > 0.09) == (500, True)
        assert await fleet.kv_empty()


async def test_prefill_fails_late():
    async with pair(prefill=["prefill_error=out of luck"], waiting_timeout_s=5) as fleet:
        on_prefill, on_decode = await both(fleet, CHAT, chat(TEXT))
        for answer in (on_prefill, on_decode):
            assert (answer.status, answer.json["message"]) == (500, "out of luck")
        on_prefill, on_decode = await both(fleet, GENERATE, {"text": TEXT})
        assert on_decode.status == 500
        assert await fleet.kv_empty()


async def test_native_streams_tell_the_error_in_the_finish_reason():
    async with pair(prefill=["prefill_error"]) as fleet:
        prefill, decode = fleet.instances
        body = {"text": TEXT, **meeting(prefill), "stream": True}
        async with opened(decode, GENERATE, body) as request:
            await post(prefill, GENERATE, body)
            await request.head()
            events = Events(*await request.body())
        reason = {"type": "abort", "message": "Prefill failed.", "status_code": 500}
        assert events.values[-1]["meta_info"]["finish_reason"] == reason
        assert events.done == 1


async def test_prefill_fails_after_decode_streamed():
    async with pair(prefill=["late_error=0.05"]) as fleet:
        on_prefill, on_decode = await streams(fleet)
        assert on_prefill.error["message"] == "Prefill failed."
        assert (on_decode.finish(), on_decode.error) == ("stop", None)
        assert await fleet.kv_empty()


async def test_prefill_answers_late():
    async with pair(prefill=["late_reply=0.3"]) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(TEXT), **meeting(prefill)}
        async with opened(prefill, CHAT, body) as late:
            assert (await post(decode, CHAT, body)).status == 200
            assert len(prefill.engine.serving.live) == 1
            # decode has its KV: whether prefill's answer is read makes no difference any more
            assert prefill.ledger.used_blocks == 0
            assert (await late.head())[0] == 200


async def test_prefill_stalls():
    async with pair(prefill=["prefill_stall"], waiting_timeout_s=0.05) as fleet:
        on_prefill, on_decode = await both(fleet, CHAT, chat(TEXT))
        assert (on_prefill.status, on_decode.status) == (500, 500)
        assert fleet.prefill[0].engine.timeouts == 1
        assert await fleet.kv_empty()


@pytest.mark.parametrize("fault", ["wrong_kv", "garbage"])
async def test_visibly_wrong_text(fault):
    faults = {"prefill": ["wrong_kv"]} if fault == "wrong_kv" else {"prefill": ["prefill_error"], "decode": ["garbage"]}
    async with pair(**faults) as fleet:
        on_prefill, on_decode = await streams(fleet)
        assert set(on_decode.text().split()) == {"<KV-LOST>"}
        assert (on_prefill.error is None) == (fault == "wrong_kv")
        assert await fleet.kv_empty()


async def test_the_transfer_fails_on_decode():
    async with pair(decode=["transfer_failed"]) as fleet:
        on_prefill, on_decode = await both(fleet, CHAT, chat(TEXT))
        assert (on_prefill.status, on_decode.status) == (200, 500)
        assert "Decode transfer failed" in on_decode.json["message"]
        assert await fleet.kv_empty()


@pytest.mark.parametrize("fault", ["status=503", "close", "reset"])
async def test_decode_refuses_and_prefill_alone_times_out(fault):
    async with pair(decode=[fault], bootstrap_timeout_s=0.05) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(TEXT), **meeting(prefill)}
        async with opened(prefill, CHAT, body) as waiting:
            if fault == "status=503":
                assert (await post(decode, CHAT, body)).status == 503
            else:
                with pytest.raises((EOFError, ConnectionResetError)):
                    await post(decode, CHAT, body)
            assert (await waiting.head())[0] == 500
        assert prefill.engine.timeouts == 1
        assert await fleet.kv_empty()


async def test_decode_never_answers():
    async with pair(decode=["hang"], bootstrap_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        body = {**chat(TEXT), **meeting(prefill)}
        async with opened(prefill, CHAT, body) as one, opened(decode, CHAT, body) as two:
            await until(lambda: decode.ordinal == 1)
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            one.leave()
            two.leave()
        assert await fleet.kv_empty()
        assert prefill.engine.rooms.state() == []
        await until(lambda: next(iter(decode.records)).outcome == "cut off")


@pytest.mark.parametrize(
    ("fault", "ended"), [("stream_end@2", "terminator"), ("stream_close@2", "eof"), ("stream_reset@2", "reset")]
)
async def test_streams_of_decode_that_break_off(fault, ended):
    async with pair(decode=[fault]) as fleet:
        on_prefill, on_decode = await streams(fleet)
        assert on_prefill.finish() == "length"
        assert (on_decode.ended, on_decode.finish(), on_decode.done) == (ended, None, 0)
        assert await fleet.kv_empty()


async def test_decode_fails_after_tokens():
    async with pair(decode=["answer_error@3=out of luck"]) as fleet:
        _, on_decode = await streams(fleet)
        assert on_decode.error == {
            "object": "error",
            "message": "out of luck",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert (on_decode.text() != "", on_decode.finish()) == (True, None)
        assert await fleet.kv_empty()


async def test_decode_dies_after_tokens():
    async with pair(decode=["answer_crash@3"]) as fleet:
        on_prefill, on_decode = await streams(fleet)
        assert (on_prefill.finish(), on_decode.ended) == ("length", "reset")
        assert await fleet.kv_empty()


async def test_control_calls():
    async with pair(bootstrap_timeout_s=5) as fleet:
        prefill, decode = fleet.instances
        room = meeting(prefill)
        async with opened(decode, CHAT, {**chat(TEXT), **room}) as waiting:
            await until(lambda: len(prefill.engine.rooms.state()) == 1)
            state = (await get(prefill, "/sim/state")).json
            assert state["rooms"] == [{"rank": 0, "room": room["bootstrap_room"], "prefill": False, "decode": True}]
            state = (await get(decode, "/sim/state")).json
            assert (state["rooms"], state["kv"]["allocated"] > 0) == ([room["bootstrap_room"]], True)
            assert (await post(decode, "/sim/reset", {})).status == 200
            assert (await waiting.head())[0] == 500
        await until(lambda: prefill.engine.rooms.state() == [])
        assert await fleet.kv_empty()


async def test_acts():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        with pytest.raises(ValueError, match="cannot do"):
            prefill.engine.act("dance", "")
        body = {**chat(TEXT + "[[fault:stall@2]]"), **meeting(prefill)}
        async with opened(decode, CHAT, body) as running:
            await post(prefill, CHAT, body)
            await until(lambda: decode.engine.meters.generated_tokens == 2)
            decode.engine.act("abort", "")
            assert (await running.head())[0] == 500
        assert await fleet.kv_empty()
    with pytest.raises(ValueError, match="duplicate_room must be one of"):
        await pair(duplicate_room="ignore").__aenter__()
