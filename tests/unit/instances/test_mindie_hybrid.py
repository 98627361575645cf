"""The hybrid role, and requests whose target is the instance itself (MindIE protocol page §4.5)."""

import asyncio
import json
import time

import pytest
import uvloop
from mindie_client import (
    DEADLINE_S,
    FAMILIES,
    MODEL,
    OPENAI,
    body_of,
    cluster,
    connect,
    control,
    encode_request,
    linked,
    post,
    read_chunk,
    read_head,
    run,
    text_of_stream,
    text_of_whole,
    until,
)

from instances.options import Options
from instances.run import Fleet, run_instance
from instances.timing import Timing

PROMPT = "Tell me about the river"


@pytest.mark.parametrize("family", FAMILIES)
async def test_streams_and_whole_answers_agree(family):
    async with run_instance(Options()) as hybrid:
        stream = await post(hybrid, *body_of(family, PROMPT, stream=True, limit=25))
        whole = await post(hybrid, *body_of(family, PROMPT, limit=25))
        assert stream.headers["content-type"] == "text/event-stream"
        assert whole.headers["content-type"].startswith("application/json")
        text = text_of_stream(family, stream.body)
        assert len(text) > 20
        assert text == text_of_whole(family, whole.body, PROMPT)
        assert stream.body.count(b"[DONE]") == (family in OPENAI)
        assert hybrid.ledger.used_blocks == 0


async def test_one_piece_is_one_http_chunk():
    async with run_instance(Options()) as hybrid:
        reader, writer = await connect(hybrid)
        path, body = body_of("chat", "hi [[length:2]]", stream=True)
        writer.write(encode_request("POST", path, json.dumps(body).encode()))
        await read_head(reader)
        pieces = []
        while data := (await read_chunk(reader))[1]:
            pieces.append(data)
        assert len(pieces) == 5  # role, two tokens, end, terminator
        assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)
        writer.close()


async def test_the_same_seed_gives_the_same_bytes_on_another_instance():
    answers = []
    for seed in (3, 3, 4):
        async with run_instance(Options(seed=seed)) as hybrid:
            answers.append((await post(hybrid, *body_of("tgi", PROMPT, stream=True))).body)
    assert answers[0] == answers[1] != answers[2]


async def test_a_target_that_is_the_instance_itself_gets_a_standard_answer():
    async with Fleet([Options(role="prefill")]) as fleet:
        prefill = fleet.prefill[0]
        answer = await post(prefill, *body_of("chat", PROMPT), control(prefill))
        assert answer.json["object"] == "chat.completion"
        assert answer.json["choices"][0]["message"]["tool_calls"] == []


async def test_logprobs_and_stop_words_are_not_refused_outside_dmi_mode():
    async with run_instance(Options()) as hybrid:
        path, body = body_of("vllm", PROMPT)
        assert (await post(hybrid, path, {**body, "stop": ["zzz"], "logprobs": 1})).status == 200
        assert (await post(hybrid, path, {**body, "n": 2})).status == 422


async def test_a_live_id_is_refused_and_stop_ends_a_request():
    async with run_instance(Options()) as hybrid:
        body = body_of("chat", f"{PROMPT} [[fault:stall@3]]", stream=True)
        waiting = asyncio.create_task(post(hybrid, *body, {"req-id": "7"}))
        await until(lambda: hybrid.engine.hybrid.live)
        assert (await post(hybrid, *body, {"req-id": "7"})).status == 424
        assert (await post(hybrid, f"/v2/models/{MODEL}/stopInfer", {"id": "7"})).status == 200
        assert b"[DONE]" not in (await waiting).body
        assert hybrid.ledger.used_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_its_request(stream):
    async with run_instance(Options(timing=Timing(decode_ms=20), answer_tokens=(5000, 5000))) as hybrid:
        path, body = body_of("chat", PROMPT, stream=stream, limit=5000)
        _, writer = await connect(hybrid)
        writer.write(encode_request("POST", path, json.dumps(body).encode()))
        await until(lambda: hybrid.ledger.used_blocks)
        writer.close()
        assert await hybrid.ledger.wait_empty(DEADLINE_S)


async def test_no_blocks_no_inference():
    async with run_instance(Options(blocks=1, block_tokens=4)) as hybrid:
        answer = await post(hybrid, *body_of("chat", PROMPT))
        assert (answer.status, answer.json["error_type"]) == (424, "Generation Error")


async def broken(fault):
    """Pieces of a stream with a fault, and how it ended."""
    async with run_instance(Options()) as hybrid:
        reader, writer = await connect(hybrid)
        path, body = body_of("chat", f"{PROMPT} [[fault:{fault}]]", stream=True)
        writer.write(encode_request("POST", path, json.dumps(body).encode()))
        pieces, end = 0, "clean"
        try:
            async with asyncio.timeout(DEADLINE_S):
                await read_head(reader)
                while (await read_chunk(reader))[1]:
                    pieces += 1
        except asyncio.IncompleteReadError:
            end = "fin"
        except ConnectionResetError:
            end = "reset"
        writer.close()
        assert await hybrid.ledger.wait_empty(DEADLINE_S)
        return pieces, end


async def test_streams_that_break_off():
    assert await broken("stream_end@3") == (4, "clean")
    assert await broken("stream_close@3") == (4, "fin")
    assert (await broken("stream_reset@3"))[1] == "reset"


async def test_slow_and_stalled_streams():
    async with run_instance(Options()) as hybrid:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await post(hybrid, *body_of("chat", f"[[length:4]] [[fault:{'slow'}=0.02]]", stream=True))
        assert loop.time() - began > 0.08


async def test_timing_shows_in_the_time_to_the_first_and_the_further_tokens():
    timing = Timing(prefill_ms=50, decode_ms=20)
    async with run_instance(Options(timing=timing)) as hybrid:
        began_s = time.monotonic()
        answer = await post(hybrid, *body_of("triton", "[[length:4]]"))
        took_s = time.monotonic() - began_s
        assert took_s > 0.12
        assert 20 < answer.json["prefill_time"] < took_s * 1000 - 50
        assert len(answer.json["decode_time"]) == 4


def test_everything_works_under_uvloop_too():
    async def flow():
        async with cluster() as (fleet, prefill, decode, link):
            _, events, text = await run(prefill, decode, link, "chat", PROMPT, stream=True)
            assert text
            assert events[-1][0] == "lastData"
            assert await fleet.kv_empty()
            async with linked(decode):
                assert (await link.event())[1] == "close"
        assert await broken("stream_close@3") == (4, "fin")
        assert (await broken("stream_reset@3"))[1] == "reset"

    uvloop.run(flow())
