"""Waiting, leaving, cleaning up, preemption and faults (microserving protocol page §3.4, §4, §8)."""

import asyncio

import pytest
from microserving_client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    PREP,
    PROMPT,
    SEND,
    body_of,
    error_of,
    expected,
    generate,
    generate_stream,
    never_answers,
    one,
    pair,
    prep,
    ready,
    send,
    send_body,
    whole,
)
from openai_client import Events, get, opened, post, until

from instances import tokens
from instances.microserving.settings import MENU
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

IDS = list(tokens.encode(PROMPT))


def generate_body(user, **more):
    return {**body_of(user), "begin": -1, **more}


# --- waiting for pages


async def test_prep_recv_waits_in_line_until_there_is_room():
    async with one(role="decode", blocks=404) as fleet:
        decode = fleet.decode[0]
        await prep(decode, "r1", prompt="river " * 50)  # 4 pages, and 400 in reserve
        async with (
            opened(decode, PREP, {**body_of("r2", "river " * 50), "end": -1}) as large,
            opened(decode, PREP, {**body_of("r3"), "end": 0}) as small,
        ):
            await until(lambda: decode.ledger.waiting == 2)
            assert await never_answers(decode, PREP, {**body_of("r4"), "end": 1})  # it has left, and waits all the same
            assert decode.ledger.waiting == 3
            assert (await generate(decode, "r1")).status == 200
            assert (await large.head())[0] == 200
            assert (await small.head())[0] == 200
        await generate(decode, "r2")
        # one after the other; that the caller has left makes no difference
        await until(lambda: set(decode.engine.loop.reservations) == {"r3", "r4"})
        assert [entry["id"] for entry in decode.ledger.snapshot()["held"]] == ["r3", "r4"]


async def test_what_can_never_fit_blocks_everything_behind_it():
    async with one(role="decode", blocks=402) as fleet:
        decode = fleet.decode[0]
        assert await never_answers(decode, PREP, {**body_of("r1", "river " * 100), "end": -1})
        assert await never_answers(decode, PREP, {**body_of("r2"), "end": 0})
        assert decode.ledger.waiting == 2


async def test_ordinary_requests_need_no_reserve():
    async with one(blocks=4) as fleet:
        assert (await post(fleet.hybrid[0], COMPLETIONS, body_of("r1"))).status == 200


# --- leaving


async def test_leaving_a_stream_frees_at_once():
    async with pair(decode=["stall@2"]) as fleet:
        await ready(fleet, "r1")
        decode = fleet.decode[0]
        async with opened(decode, GENERATE, generate_body("r1", stream=True)) as request:
            await request.head()
            assert decode.ledger.count("allocated") > 0
            request.leave()
        assert await fleet.kv_empty()
        assert decode.ledger.released[-1]["why"] == "aborted: the caller left"
        assert decode.engine.loop.streams == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_any_output_shows_with_the_next_output(stream):
    async with pair(decode=["slow=0.6"]) as fleet:
        await ready(fleet, "r1")
        decode = fleet.decode[0]
        async with opened(decode, GENERATE, generate_body("r1", stream=stream)) as request:
            await until(lambda: decode.engine.loop.running)
            request.leave()
        await until(lambda: decode.live == 0)
        assert decode.ledger.count("allocated") > 0
        assert await fleet.kv_empty()
        assert decode.ledger.released[-1]["why"] == "aborted: the caller left"


async def test_an_orphan_stays_until_the_cleanup_call():
    async with pair() as fleet:
        decode = fleet.decode[0]
        await prep(decode, "r1")
        assert not await fleet.kv_empty(0.05)
        assert decode.ledger.snapshot()["held"][0]["state"] == "pinned"
        # nobody can free it by its id with another call
        assert (await post(decode, COMPLETIONS, body_of("r1"))).status == 200
        assert decode.ledger.count("pinned") == 1
        async with opened(decode, GENERATE, generate_body("r1", stream=True)) as cleanup:
            await cleanup.head()
            cleanup.leave()
        assert await fleet.kv_empty()
        assert decode.engine.loop.reservations == {}


async def test_reset_engine_frees_everything_and_ends_nothing():
    async with pair(decode=["stall@1"]) as fleet:
        decode = fleet.decode[0]
        await prep(decode, "r1")
        await ready(fleet, "r2")
        async with opened(decode, GENERATE, generate_body("r2", stream=True)) as request:
            await request.head()
            answer = await post(decode, "/debug/reset_engine", {"model": "sim-model"})
            assert (answer.status, answer.body) == (200, b"null")
            assert await fleet.kv_empty()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await request.body()
        assert {entry["why"] for entry in decode.ledger.released} == {"reset_engine"}
        assert await whole(fleet, "r2", prompt="hello again [[length:0]]")


async def test_remote_send_goes_on_without_its_caller():
    async with pair(prefill=["send_late=0.5"]) as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        async with opened(prefill, SEND, send_body(decode, "r1", metadata)) as request:
            await until(lambda: prefill.ledger.count("allocated") == 1)
            request.leave()
        await until(lambda: decode.engine.state()["reserved"][0]["complete"])
        await until(lambda: prefill.ledger.used_blocks == 0)


async def test_a_slow_reader_stops_its_own_request_only():
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        body = body_of("r1", "[[fault:huge=1]]", stream=True, max_tokens=40, debug_config={"ignore_eos": True})
        async with opened(hybrid, COMPLETIONS, body) as slow:
            await slow.head()
            await until(lambda: hybrid.engine.loop.batch.running == 1)
            assert (await post(hybrid, COMPLETIONS, body_of("r2"))).status == 200
            assert hybrid.engine.loop.streams
            events = Events(*await slow.body())
        assert events.finish() == "length"


# --- preemption


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_preemption_on_the_wire(after):
    async with pair(decode=[f"preempt@{after}"]) as fleet:
        decode, right = fleet.decode[0], (await expected())["choices"][0]["text"]
        await ready(fleet, "r1")
        events = await generate_stream(decode, "r1", stream_options={"include_usage": True})
        assert (events.finish(), events.done) == ("preempt", 1)
        assert right.startswith(events.text())
        assert len(events.chunks) == after + 1
        assert events.values[-2]["choices"] == [{"finish_reason": "preempt", "index": 0, "logprobs": None, "text": ""}]
        zero = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "extra": None}
        assert events.usage == [zero]
        assert await fleet.kv_empty()
        assert decode.ledger.released[-1]["why"] == "preempted"
        await ready(fleet, "r1")
        answer = (await generate(decode, "r1")).json
        assert (answer["choices"][0]["finish_reason"], answer["usage"]) == ("preempt", zero)


async def test_the_chosen_requests_are_preempted():
    async with pair(decode=["#2:preempt@1"]) as fleet:
        reasons = [(await whole(fleet, f"r{i}"))["choices"][0]["finish_reason"] for i in range(3)]
        assert reasons == ["stop", "preempt", "stop"]
        marked = await whole(fleet, "r9", prompt="go [[fault:preempt@2]]")
        assert marked["choices"][0]["finish_reason"] == "preempt"


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("fault", "attempts"), [("preempt@3", 2), ("preempt@2=2", 7)])
async def test_the_rest_of_a_preempted_answer_can_be_asked_for(fault, attempts, ids):
    start = "go on [[length:12]]"
    right = (await expected(start))["choices"][0]["text"]
    async with pair(decode=[fault]) as fleet:
        prompt = list(tokens.encode(start)) if ids else start
        shown, made = "", 0
        for attempt in range(1, 20):
            asked = {"prompt": prompt, "max_tokens": 30 - made, "logprobs": 0}
            await ready(fleet, f"r{attempt}", **asked)
            events = await generate_stream(fleet.decode[0], f"r{attempt}", **asked)
            text = events.text().removesuffix("\ufffd")
            shown += text
            if events.finish() != "preempt":
                break
            made += sum(len(value["choices"][0]["logprobs"]["tokens"]) for value in events.chunks[:-1])
            prompt = [*prompt, *tokens.encode(text)] if ids else prompt + text
        assert (shown, events.finish(), attempt) == (right, "stop", attempts)
        assert await fleet.kv_empty()


async def test_an_unfinished_character_comes_with_the_preemption():
    prompt = "a split character [[length:200]]"
    async with one() as fleet:
        asked = body_of("x", prompt, max_tokens=200, stream=True)
        async with opened(fleet.hybrid[0], COMPLETIONS, asked) as request:
            await request.head()
            events = Events(*await request.body())
    # as many tokens as there are pieces before the first one that has no text of its own
    first = next(i for i, value in enumerate(events.chunks) if not value["choices"][0]["text"].isascii()
                 and len(value["choices"][0]["text"]) == 1)  # fmt: skip
    async with one(f"preempt@{first + 1}") as fleet:
        answer = (await post(fleet.hybrid[0], COMPLETIONS, body_of("x", prompt, max_tokens=200))).json
        assert answer["choices"][0]["text"].endswith("\ufffd")


async def test_several_sequences_are_preempted_in_one_chunk():
    async with pair(decode=["preempt@2"]) as fleet:
        await ready(fleet, "r1", n=2)
        events = await generate_stream(fleet.decode[0], "r1", n=2)
        assert [c["finish_reason"] for c in events.chunks[-1]["choices"]] == ["preempt", "preempt"]


async def test_pages_run_out_and_the_newest_request_is_preempted():
    async with pair(more={"blocks": 8, "timing": Timing(decode_ms=1)}, reserve_pages=2) as fleet:
        decode = fleet.decode[0]
        endless = {"debug_config": {"ignore_eos": True}, "max_tokens": 90}
        for user in ("r1", "r2"):
            await ready(fleet, user, **endless)
        async with opened(decode, GENERATE, generate_body("r1", stream=True, **endless)) as first:
            await first.head()
            newest = await generate_stream(decode, "r2", **endless)
            assert newest.finish() == "preempt"
            assert Events(*await first.body()).finish() == "length"
        assert await fleet.kv_empty()
        assert decode.engine.loop.counts["preempted"] == 1


async def test_without_disaggregation_a_preempted_request_goes_on_later():
    async with one(blocks=4, settings={"disagg": 0}, timing=Timing(decode_ms=1)) as fleet:
        hybrid = fleet.hybrid[0]
        asked = {"max_tokens": 28, "debug_config": {"ignore_eos": True}}
        answers = await asyncio.gather(*(post(hybrid, COMPLETIONS, body_of(f"r{i}", **asked)) for i in range(2)))
        right = (await expected(**asked))["choices"][0]["text"]
        assert [answer.json["choices"][0]["text"] for answer in answers] == [right, right]
        assert hybrid.engine.loop.counts["put_back"] >= 1
        assert await fleet.kv_empty()


async def test_a_preempted_chat_is_torn():
    async with one("preempt@1") as fleet:
        body = {"messages": [{"role": "user", "content": "hi [[length:9]]"}]}
        assert (await post(fleet.hybrid[0], CHAT, body)).status == 500
        async with opened(fleet.hybrid[0], CHAT, {**body, "stream": True}) as request:
            await request.head()
            events = Events(*await request.body())
        assert (events.ended, events.done, events.finish()) == ("eof", 0, None)
        assert await fleet.kv_empty()


# --- faults of the calls


async def test_calls_that_fail_do_nothing():
    async with pair(decode=["#1:prep_error=503"], prefill=["#1:send_error"]) as fleet:
        prefill, decode = fleet.instances
        answer = await post(decode, PREP, {**body_of("r1"), "end": -1})
        assert (answer.status, error_of(answer)["code"], decode.engine.loop.reservations) == (503, 503, {})
        metadata, _ = await prep(decode, "r1")
        answer = await post(prefill, SEND, send_body(decode, "r1", metadata))
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
        assert not decode.engine.state()["reserved"][0]["complete"]
        await send(prefill, decode, "r1", metadata)
    async with pair(decode=["generate_error=502"]) as fleet:
        await ready(fleet, "r1")
        assert (await generate(fleet.decode[0], "r1")).status == 502
        assert fleet.decode[0].ledger.count("pinned") == 1


@pytest.mark.parametrize(("call", "path"), [("prep", PREP), ("send", SEND), ("generate", GENERATE)])
async def test_calls_that_hang_or_break(call, path):
    role = "prefill" if call == "send" else "decode"
    for fault in ("hang", "close"):
        async with pair(**{role: [f"{call}_{fault}"]}) as fleet:
            prefill, decode = fleet.instances
            metadata = "WzBd" if call == "prep" else (await prep(decode, "r1"))[0]
            bodies = {
                PREP: {**body_of("r1"), "end": -1},
                SEND: send_body(decode, "r1", metadata),
                GENERATE: generate_body("r1"),
            }
            target = prefill if call == "send" else decode
            if fault == "hang":
                assert await never_answers(target, path, bodies[path])
            else:
                with pytest.raises((EOFError, ConnectionResetError)):
                    await post(target, path, bodies[path])
            assert (decode.ledger.count("pinned"), decode.ledger.count("allocated")) == (call != "prep", 0)


async def test_a_late_reservation_comes_without_its_caller():
    async with pair(decode=["prep_late=0.5"]) as fleet:
        decode = fleet.decode[0]
        assert await never_answers(decode, PREP, {**body_of("r1"), "end": -1}, 0.02)
        assert decode.ledger.used_blocks == 0
        await until(lambda: decode.ledger.count("pinned") == 1)


@pytest.mark.parametrize("call", ["prep", "send"])
async def test_answers_that_are_lost(call):
    role = "decode" if call == "prep" else "prefill"
    async with pair(**{role: [f"{call}_lost"]}) as fleet:
        prefill, decode = fleet.instances
        if call == "prep":
            with pytest.raises((EOFError, ConnectionResetError)):
                await prep(decode, "r1")
            assert decode.ledger.count("pinned") == 1
        else:
            metadata, _ = await prep(decode, "r1")
            with pytest.raises((EOFError, ConnectionResetError)):
                await send(prefill, decode, "r1", metadata)
            assert decode.engine.state()["reserved"][0]["complete"]


async def test_an_acknowledgement_is_no_proof():
    async with pair(prefill=["send_nothing"]) as fleet:
        answer = await whole(fleet, "r1")
        assert set(answer["choices"][0]["text"].split()) == {"<KV-LOST>"}
        assert fleet.prefill[0].engine.loop.counts == {"not_sent": 1}
    async with pair(prefill=["wrong_kv"]) as fleet:
        assert "<KV-LOST>" in (await whole(fleet, "r1"))["choices"][0]["text"]
        assert fleet.prefill[0].engine.loop.counts == {"sent_arrived": 1}


async def test_addresses_that_are_not_what_they_should_be():
    async with pair(decode=["metadata=!no base64!"]) as fleet:
        assert (await prep(fleet.decode[0], "r1")) == ("!no base64!", 0)
        assert (await post(fleet.prefill[0], SEND, send_body(fleet.decode[0], "r1", "!no base64!"))).status == 500


@pytest.mark.parametrize("fault", ["prep_die", "send_die", "die@2"])
async def test_loops_that_die(fault):
    role = "prefill" if fault == "send_die" else "decode"
    async with pair(**{role: [fault]}) as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        dead = prefill if fault == "send_die" else decode
        if fault == "send_die":
            assert await never_answers(prefill, SEND, send_body(decode, "r1", metadata))
        elif fault == "prep_die":
            assert await never_answers(decode, GENERATE, generate_body("r1"))
        else:
            await send(prefill, decode, "r1", metadata)
            async with opened(decode, GENERATE, generate_body("r1", stream=True)) as request:
                await request.head()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await request.body()
        assert dead.engine.loop.dead
        assert (await get(dead, "/v1/models")).status == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await get(dead, "/metrics")
        held = decode.ledger.used_blocks
        assert not await fleet.kv_empty(0.05)
        assert decode.ledger.used_blocks == held > 0


# --- faults of answers


async def test_an_exception_in_mid_stream_tears_the_stream():
    async with pair(decode=["answer_error@3"]) as fleet:
        await ready(fleet, "r1")
        events = await generate_stream(fleet.decode[0], "r1")
        assert (events.ended, events.done, len(events.chunks)) == ("eof", 0, 3)
        await ready(fleet, "r2")
        assert (await generate(fleet.decode[0], "r2")).status == 500
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    ("fault", "ended"), [("stream_end@2", "terminator"), ("stream_close@2", "eof"), ("stream_reset@2", "reset")]
)
async def test_streams_that_break_off(fault, ended):
    async with pair(decode=[fault]) as fleet:
        await ready(fleet, "r1")
        events = await generate_stream(fleet.decode[0], "r1")
        assert (events.ended, events.done, events.finish()) == (ended, 0, None)
        assert await fleet.kv_empty()


@pytest.mark.parametrize(("fault", "ended"), [("cut_after=300", "eof"), ("reset_after=300", "reset")])
async def test_bodies_that_break_off(fault, ended):
    async with pair(decode=[f"#2:{fault}"]) as fleet:  # the second call: start_generate
        await ready(fleet, "r1")
        events_of = generate_stream(fleet.decode[0], "r1")
        if ended == "eof":
            with pytest.raises((AssertionError, ValueError)):
                await events_of  # a cut event is no JSON
        else:
            with pytest.raises((AssertionError, ValueError, ConnectionResetError)):
                assert (await events_of).ended == "terminator"
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    "fault",
    [
        "no_space",
        "multi_line",
        "crlf",
        "split",
        "split_chunks",
        "join",
        "comments",
        "empty_first",
        "huge=1",
        "slow=0.001",
    ],
)
async def test_events_of_odd_shapes_say_the_same(fault):
    async with pair(decode=[fault]) as fleet:
        await ready(fleet, "r1")
        events = await generate_stream(fleet.decode[0], "r1")
        assert (events.text(), events.finish()) == ((await expected())["choices"][0]["text"], "stop")
        assert events.done == 1
        assert (events.values[0]["choices"] == []) == (fault == "empty_first")


async def test_a_stream_without_done_and_an_answer_that_is_not_json():
    async with pair(decode=["no_done", "not_json"]) as fleet:
        await ready(fleet, "r1")
        events = await generate_stream(fleet.decode[0], "r1")
        assert (events.ended, events.done, events.finish()) == ("terminator", 0, "stop")
        await ready(fleet, "r2")
        with pytest.raises(ValueError, match="Expecting value"):
            _ = (await generate(fleet.decode[0], "r2")).json


async def test_faults_of_all_engines_count_calls():
    async with pair(decode=["#2:status=503", "#4:hang", "health_status@0=500"]) as fleet:
        decode = fleet.decode[0]
        await ready(fleet, "r1")
        answer = await generate(decode, "r1")
        assert (answer.status, error_of(answer)["message"]) == (503, "injected failure")
        assert (await generate(decode, "r1")).status == 200
        assert await never_answers(decode, PREP, {**body_of("r2"), "end": -1})
        assert (await get(decode, "/v1/models")).status == 500
        assert (await post(decode, PREP, {**body_of("r3"), "end": -1}, {"X-Return-Error": "429"})).status == 429
    async with pair(decode=["first=2:crash=0"]) as fleet:
        with pytest.raises((EOFError, ConnectionResetError)):
            await prep(fleet.decode[0], "r1")


async def test_a_crash_in_mid_answer():
    async with pair(decode=["#1:answer_crash@2=0.01"]) as fleet:
        decode = fleet.decode[0]
        await ready(fleet, "r1")
        events = await generate_stream(decode, "r1")
        assert events.ended == "reset"
        assert await fleet.kv_empty()
        async with asyncio.timeout(5):
            while True:
                try:
                    assert await whole(fleet, "r2")
                    break
                except OSError:
                    await asyncio.sleep(0.01)


async def test_acts():
    async with pair(decode=["stall@1"]) as fleet:
        decode = fleet.decode[0]
        await ready(fleet, "r1")
        async with opened(decode, GENERATE, generate_body("r1", stream=True)) as request:
            await request.head()
            assert (await post(decode, "/sim/act", {"do": "preempt", "value": "r2"})).status == 200
            assert decode.engine.loop.running
            await post(decode, "/sim/act", {"do": "preempt"})
            assert Events(*await request.body()).finish() == "preempt"
        assert (await post(decode, "/sim/act", {"do": "dance"})).status == 400
        state = (await get(decode, "/sim/state")).json
        assert (state["kv"]["allocated"], state["kv"]["pinned"], state["counts"]["preempted"]) == (0, 0, 1)


async def test_it_starts_late():
    async with one(startup_s=60) as fleet:
        hybrid = fleet.hybrid[0]
        assert (await get(hybrid, "/v1/models")).status == 503
        assert (await post(hybrid, PREP, {**body_of("r1"), "end": -1})).status == 503


async def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="num_gpus must be at least 1"):
        await Fleet([Options(engine="microserving", settings={"num_gpus": "0"})]).__aenter__()
    with pytest.raises(ValueError, match="no setting 'pestart'"):
        await Fleet([Options(engine="microserving", settings={"pestart": "0"})]).__aenter__()
    assert {"preempt", "send_nothing", "prep_late"} <= set(MENU)
