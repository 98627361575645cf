"""Recompute: decode gives a request back, prefill goes on from the tokens so far (MindIE protocol page §6)."""

import asyncio
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
    text_of_stream,
    text_of_whole,
)

from instances import tokens

PROMPT = "Tell me about the café and the river [[fault:preempt@4]]"
KEYS = {
    "chat": ["model", "messages", "stream", "max_tokens"],
    "completions": ["model", "prompt", "stream", "max_tokens"],
    "tgi": ["inputs", "origin_inputs", "parameters", "stream"],
    "tgi_root": ["inputs", "origin_inputs", "parameters", "stream"],
    "vllm": ["prompt", "origin_inputs", "stream", "max_tokens", "model"],
    "triton": ["text_input", "parameters"],
    "native": ["inputs", "stream", "parameters"],
}
PROMPT_KEYS = {"chat": "messages", "completions": "prompt", "vllm": "prompt", "triton": "text_input"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_goes_on_after_a_retry_event(family, stream):
    expected = await expected_text(family, PROMPT, stream=stream, limit=12)
    async with cluster() as (fleet, prefill, decode, link):
        headers = control(decode)
        path, body = body_of(family, PROMPT, stream=stream, limit=12)
        data = (await post(prefill, path, body, headers)).json.get("output", "").encode()
        events = await link.events(headers["req-id"])
        data += b"".join(part for prefix, part in events if prefix == "data")
        prefix, retry = events[-1]
        assert prefix == "retry"
        assert list(json.loads(retry)) == KEYS[family]
        assert decode.ledger.used_blocks == prefill.ledger.used_blocks == 0

        again = await post(prefill, path, retry, {**headers, "is-recompute": "true"})
        assert again.status == 200, again.body
        if stream:
            assert '"role":"assistant","content":""' not in again.json["output"]
        data += again.json.get("output", "").encode()
        events = await link.events(headers["req-id"], 2 if stream and family in OPENAI else 1)
        if stream:
            assert text_of_stream(family, data + b"".join(part for _, part in events)) == expected
        else:
            assert [prefix for prefix, _ in events] == ["lastData"]
            assert text_of_whole(family, events[-1][1], PROMPT) == expected
        assert await fleet.kv_empty()
        assert (decode.engine.decode.preempted, decode.engine.decode.wrong_kv) == (1, 0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_prompt_becomes_count_prompt_tokens_and_generated_tokens(family):
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        await post(prefill, *body_of(family, PROMPT, limit=12), headers)
        retry = json.loads((await link.events(headers["req-id"]))[-1][1])
        count, *ids = (int(part) for part in retry[PROMPT_KEYS.get(family, "inputs")].split(","))
        assert len(ids) == count + 4
        prompt = tokens.decode(ids[:count])
        assert prompt == (f"user: {PROMPT}\nassistant:" if family == "chat" else PROMPT)
        if "origin_inputs" in retry:
            assert retry["origin_inputs"] == PROMPT


async def test_tensors_carry_the_numbers_themselves():
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        ids = list(tokens.encode(PROMPT))
        path = f"/v2/models/{MODEL}/infer"
        body = {"id": "t", "inputs": [{"name": "input0", "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}]}
        await post(prefill, path, body, headers)
        text = (await link.events(headers["req-id"]))[-1][1]
        retry = json.loads(text)
        assert list(retry) == ["id", "inputs", "outputs", "parameters"]
        data = retry["inputs"][0]["data"]
        assert data[: len(ids) + 1] == [len(ids), *ids]
        assert retry["inputs"][0]["shape"] == [1, len(data)] == [1, len(ids) + 5]
        assert (await post(prefill, path, text, {**headers, "is-recompute": "true"})).status == 200
        assert len(json.loads((await link.events(headers["req-id"]))[-1][1])["outputs"][0]["data"]) > 4


async def test_sampling_parameters_travel_with_the_retry_event():
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        path, body = body_of("chat", PROMPT)
        body |= {"temperature": 0.5, "seed": 3, "stop": None, "top_p": 0.9, "response_format": {"type": "text"}}
        await post(prefill, path, body, headers)
        retry = json.loads((await link.events(headers["req-id"]))[-1][1])
        assert {key: retry[key] for key in list(retry)[3:]} == {
            "seed": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "response_format": {"type": "text"},
        }


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/generate", {"prompt": "1,5,6"}, "origin_inputs"),
        ("/generate_stream", {"inputs": "1,5,6"}, "origin_inputs"),
        ("/infer", {"inputs": "not,numbers"}, "comma-separated"),
        ("/infer", {"inputs": "5,1,2"}, "fewer tokens"),
        ("/infer", {"inputs": "1,5,123456"}, "does not continue"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
async def test_refused_recompute_bodies(path, body, text):
    async with cluster() as (_, prefill, decode, _link):
        answer = await post(prefill, path, body, control(decode, is_recompute="true"))
        assert answer.status == 422
        assert text in answer.json["error"]


async def test_an_id_that_lingers_on_prefill_is_refused_for_a_while():
    async with cluster(prefill={"settings": {"linger_s": 0.15}}) as (_, prefill, decode, link):
        headers = control(decode)
        path, body = body_of("vllm", PROMPT)
        await post(prefill, path, body, headers)
        retry = (await link.events(headers["req-id"]))[-1][1]
        headers["is-recompute"] = "true"
        refused = await post(prefill, path, retry, headers)
        assert refused.status == 424
        assert refused.json["error"].startswith("Failed to enqueue inferRequest.")
        async with asyncio.timeout(2):
            while (await post(prefill, path, retry, headers)).status == 424:  # noqa: ASYNC110 - the peer's state
                await asyncio.sleep(0.02)
        assert (await link.events(headers["req-id"]))[-1][0] == "lastData"
        assert prefill.engine.prefill.refused_duplicates > 1


async def test_running_out_of_blocks_preempts():
    sizes = {"blocks": 12, "block_tokens": 1, "answer_tokens": (90, 90)}
    async with cluster(decode=sizes, prefill={"answer_tokens": (90, 90)}) as (fleet, prefill, decode, link):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "the light of the city"), headers)
        prefix, retry = (await link.events(headers["req-id"]))[-1]
        assert prefix == "retry"
        assert len(json.loads(retry)["prompt"].split(",")) == 13
        assert await fleet.kv_empty()
