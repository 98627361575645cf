"""All dialects, streaming or not, from prefill's envelope to decode's last event."""

import json

import pytest
from mindie_client import (
    FAMILIES,
    MODEL,
    OPENAI,
    body_of,
    cluster,
    control,
    expected_text,
    post,
    run,
    text_of_stream,
    text_of_whole,
)

from instances import tokens

PROMPT = "Tell me about the café, the river and 東京 please"
BOTH = [(family, stream) for family in FAMILIES for stream in (False, True)]


@pytest.mark.parametrize(("family", "stream"), BOTH)
async def test_prefill_and_decode_give_the_whole_answer(family, stream):
    expected = await expected_text(family, PROMPT, stream=stream, limit=40)
    assert len(expected) > 20
    async with cluster() as (fleet, prefill, decode, link):
        envelope, events, text = await run(prefill, decode, link, family, PROMPT, stream=stream, limit=40)
        assert text == expected
        assert await fleet.kv_empty()
        assert prefill.ledger.released_count == decode.ledger.released_count == 1
    prefixes = [prefix for prefix, _ in events]
    if not stream:
        assert prefixes == ["lastData"]
        assert set(envelope) == {"reqId", "isStream"}
        return
    assert set(envelope) == {"reqId", "isStream", "isLastResp", "output"}
    ends = 2 if family in OPENAI else 1
    assert prefixes[-ends:] == ["lastData"] * ends
    assert set(prefixes[:-ends]) == {"data"}
    if family in OPENAI:
        assert events[-1][1] == b"data: [DONE]\n\n"
        last = json.loads(events[-2][1][len(b"data: ") :])
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert last["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(("family", "stream"), BOTH)
async def test_an_answer_of_one_token_ends_in_prefill(family, stream):
    async with cluster() as (_, prefill, decode, _link):
        path, body = body_of(family, PROMPT, stream=stream, limit=1)
        answer = await post(prefill, path, body, control(decode))
        envelope = answer.json
        assert envelope["isLastResp"] is True
        output = envelope["output"].encode()
        text = text_of_stream(family, output) if stream else text_of_whole(family, output, PROMPT)
        assert text == (await expected_text(family, PROMPT, limit=40))[: len(text)] != ""
        assert decode.engine.decode.accepted == 0
        assert prefill.ledger.used_blocks == 0


async def test_an_answer_whose_first_token_is_the_end():
    async with cluster() as (_, prefill, decode, _link):
        path, body = body_of("chat", "say nothing [[length:0]]", stream=True)
        envelope = (await post(prefill, path, body, control(decode))).json
        assert envelope["isLastResp"] is True
        assert text_of_stream("chat", envelope["output"].encode()) == ""
        assert '"finish_reason":"stop"' in envelope["output"]


@pytest.mark.parametrize(
    ("family", "limit"), [("tgi", 20), ("tgi_root", 20), ("vllm", 16), ("triton", 20), ("native", 20), ("chat", 30)]
)
async def test_default_limits(family, limit):
    async with cluster(max_new_tokens=30, answer_tokens=(99, 99)) as (_, prefill, decode, link):
        headers = control(decode)
        path, body = body_of(family, PROMPT)
        await post(prefill, path, body, headers)
        text = text_of_whole(family, (await link.events(headers["req-id"]))[-1][1], PROMPT)
        assert len(tokens.encode(text)) == pytest.approx(limit, abs=2)  # a split character counts twice


async def test_the_role_piece_of_chat_comes_from_both_sides():
    async with cluster() as (_, prefill, decode, link):
        envelope, events, _ = await run(prefill, decode, link, "chat", PROMPT, stream=True, limit=5)
        first = envelope["output"].split("\n\n")
        assert [json.loads(piece[6:])["choices"][0]["delta"] for piece in first[:1]] == [
            {"role": "assistant", "content": ""}
        ]
        assert len(first) == 3  # role, first token, nothing after the last separator
        assert json.loads(events[0][1][6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_triton_echoes_the_callers_id_while_events_carry_the_req_id():
    async with cluster() as (_, prefill, decode, link):
        for call in ("generate", "generate_stream"):
            headers = control(decode)
            body = {"id": "mine-1", "text_input": PROMPT, "parameters": {"max_new_tokens": 4}}
            await post(prefill, f"/v2/models/{MODEL}/{call}", body, headers)
            last = (await link.events(headers["req-id"]))[-1][1]
            value = json.loads(last.removeprefix(b"data:"))
            assert value["id"] == "mine-1"
            assert value["model_name"] == MODEL
            assert {"prefill_time", "decode_time"} <= set(value) or {"prefillTime", "decodeTime"} <= set(value)


async def test_triton_tokens_in_and_out():
    prompt = list(tokens.encode(PROMPT))
    expected = tokens.encode(await expected_text("completions", PROMPT, limit=6))
    async with cluster() as (fleet, prefill, decode, link):
        headers = control(decode)
        tensor = {"name": "input0", "shape": [1, len(prompt)], "datatype": "UINT32", "data": prompt}
        body = {"id": "t", "inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": {"max_new_tokens": 6}}
        await post(prefill, f"/v2/models/{MODEL}/infer", body, headers)
        value = json.loads((await link.events(headers["req-id"]))[-1][1])
        assert value["id"] == "t"
        assert value["outputs"] == [{"name": "output0", "shape": [1, 6], "datatype": "UINT32", "data": list(expected)}]
        assert await fleet.kv_empty()


async def test_native_tokens_give_the_same_answer_as_their_text():
    expected = await expected_text("native", PROMPT, limit=9)
    async with cluster() as (_, prefill, decode, link):
        for path in ("/infer", "/infer_token"):
            headers = control(decode)
            body = {"input_id": list(tokens.encode(PROMPT)), "parameters": {"max_new_tokens": 9}}
            await post(prefill, path, body, headers)
            assert json.loads((await link.events(headers["req-id"]))[-1][1])["generated_text"] == expected


async def test_stop_words_of_openai_and_max_completion_tokens():
    whole = await expected_text("completions", PROMPT, limit=20)
    stop = whole.split()[6]
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        body = {"model": MODEL, "prompt": PROMPT, "stop": [stop], "max_completion_tokens": 20, "stream": True}
        envelope = (await post(prefill, "/v1/completions", body, headers)).json
        events = await link.events(headers["req-id"], 2)
        data = envelope["output"].encode() + b"".join(part for _, part in events)
        assert text_of_stream("completions", data) == whole[: whole.index(stop)]


async def test_tgi_full_text_and_root_list():
    expected = await expected_text("tgi", PROMPT, limit=9)
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 9, "return_full_text": True}}
        await post(prefill, "/", body, headers)
        value = json.loads((await link.events(headers["req-id"]))[-1][1])
        assert isinstance(value, list)
        assert value[0]["generated_text"] == PROMPT + expected


async def test_characters_split_over_tokens_arrive_whole():
    prompt = "many words please"
    expected = await expected_text("chat", prompt, limit=400)
    async with cluster(answer_tokens=(400, 400)) as (_, prefill, decode, link):
        _, events, text = await run(prefill, decode, link, "chat", prompt, stream=True, limit=400)
        assert text.startswith(expected)
        assert any(ord(character) > 0xFFFF for character in text)
        assert all(b'"content":""' not in body for prefix, body in events[1:-2])


async def test_cached_tokens_show_in_the_usage():
    async with cluster(prefix_blocks=100, block_tokens=4) as (_, prefill, decode, link):
        shown = []
        for _ in range(2):
            headers = control(decode)
            await post(prefill, *body_of("chat", PROMPT, limit=3), headers)
            usage = json.loads((await link.events(headers["req-id"]))[-1][1])["usage"]
            shown.append(usage.get("prompt_tokens_details"))
        assert shown[0] is None
        assert shown[1]["cached_tokens"] > 0
