"""The three calls as they should go (microserving protocol page §2 to §4), over real sockets."""

import pytest
from microserving_client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    PREP,
    PROMPT,
    SEND,
    body_of,
    expected,
    generate,
    generate_stream,
    numbers,
    one,
    packed,
    pair,
    prep,
    ready,
    send,
    send_body,
    whole,
)
from openai_client import get, post, stream

from instances import tokens
from instances.options import Options
from instances.run import Fleet

LONG = "the quiet river follows a narrow road " * 12
IDS = list(tokens.encode(PROMPT))


def text_of(answer, index=0):
    return answer["choices"][index]["text"]


@pytest.mark.parametrize("prompt", [PROMPT, IDS, LONG])
async def test_the_three_calls_give_the_answer_of_one_engine(prompt):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        answer = await whole(fleet, "r1", prompt=prompt)
        assert answer["choices"] == (await expected(prompt))["choices"]
        assert (answer["id"], answer["object"], answer["model"]) == ("r1", "text_completion", None)
        assert await fleet.kv_empty()
        assert [entry["why"] for entry in prefill.ledger.released] == ["sent"]
        assert [entry["why"] for entry in decode.ledger.released] == ["end of generation"]
        assert prefill.engine.loop.counts == {"sent_arrived": 1}
        assert (prefill.engine.wrong_role, decode.engine.wrong_role) == (0, 0)


async def test_strings_and_ids_of_the_same_prompt_are_the_same():
    async with pair() as fleet:
        assert text_of(await whole(fleet, "r1")) == text_of(await whole(fleet, "r2", prompt=IDS))


@pytest.mark.parametrize("begin", [-1, len(IDS) - 1])
@pytest.mark.parametrize("end", [-1, len(IDS) - 1])
async def test_negative_and_positive_windows_mean_the_same(begin, end):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        metadata, matched = await prep(decode, "r1", end)
        assert (metadata, matched) == ("WzEsMCwxNF0=", 0)
        await send(prefill, decode, "r1", metadata, 0, end)
        assert text_of((await generate(decode, "r1", begin)).json) == text_of(await expected())


@pytest.mark.parametrize("share", [1, 3, len(IDS) // 2, len(IDS) - 1])
async def test_part_of_the_prompt_is_prefilled_on_decode(share):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        end = len(IDS) - share
        metadata, _ = await prep(decode, "r1", end)
        assert numbers(metadata) == [1, 0, end]
        await send(prefill, decode, "r1", metadata, 0, end)
        assert text_of((await generate(decode, "r1", -share)).json) == text_of(await expected())


async def test_a_prompt_of_one_token_has_nothing_to_send():
    async with pair() as fleet:
        decode = fleet.decode[0]
        assert await prep(decode, "r1", prompt=[7]) == ("WzBd", 0)
        assert (await post(decode, PREP, {**body_of("r2", [7]), "end": 0})).json["kv_append_metadata"] == "WzBd"
        assert text_of((await generate(decode, "r1", prompt=[7])).json) == text_of(await expected([7]))
        assert decode.engine.loop.counts["wrong_kv"] == 0


async def test_decode_takes_the_parameters_of_prep_recv():
    async with pair() as fleet:
        asked = {"max_tokens": 4, "stop": ["never"], "seed": 3}
        await ready(fleet, "r1", **asked)
        answer = (await generate(fleet.decode[0], "r1", max_tokens=30, seed=9, temperature=1.5)).json
        right = await expected(**asked)
        assert (text_of(answer), answer["choices"][0]["finish_reason"]) == (text_of(right), "length")
        assert answer["usage"]["completion_tokens"] == 4
        assert text_of(right) != text_of(await expected(max_tokens=4))


async def test_streams():
    async with pair() as fleet:
        decode = fleet.decode[0]
        right = await expected()
        await ready(fleet, "r1")
        events = await generate_stream(decode, "r1")
        assert (events.text(), events.finish(), events.done) == (text_of(right), "stop", 1)
        assert (events.usage, {value["id"] for value in events.values}) == ([], {"r1"})
        assert all(value["usage"] is None for value in events.values)
        await ready(fleet, "r2")
        events = await generate_stream(decode, "r2", stream_options={"include_usage": True})
        last = events.values[-1]
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], len(IDS) + 10)
        extra = last["usage"]["extra"]
        assert {"prefill_tokens", "decode_tokens", "jump_forward_tokens", "ttft_s", "end_to_end_latency_s"} < set(extra)
        assert extra["completion_tokens"] == last["usage"]["completion_tokens"] == 10
        assert events.raw.startswith(b'data: {"id":"r2","choices":[{"finish_reason":null,"index":0,"logprobs":null,')


async def test_empty_deltas_are_skipped_with_their_log_probabilities():
    async with pair() as fleet:
        asked = {"prompt": "a split character [[length:200]]", "max_tokens": 200, "logprobs": 0}
        await ready(fleet, "r1", **asked)
        events = await generate_stream(fleet.decode[0], "r1", stream_options={"include_usage": True}, **asked)
        pieces = [value["choices"][0] for value in events.chunks]
        assert all(piece["text"] or piece["finish_reason"] for piece in pieces)
        made = events.usage[0]["completion_tokens"]
        assert made == 200
        assert len(pieces) < made
        assert sum(len(piece["logprobs"]["token_logprobs"]) for piece in pieces) == len(pieces)
        assert all(entry == {} for piece in pieces for entry in piece["logprobs"]["top_logprobs"])
        assert pieces[0]["logprobs"]["text_offset"] is None


@pytest.mark.parametrize("top", [1, 5])
async def test_log_probabilities_with_alternatives(top):
    async with pair() as fleet:
        answer = await whole(fleet, "r1", logprobs=top)
        listed = answer["choices"][0]["logprobs"]
        assert len(listed["token_logprobs"]) == len(listed["tokens"]) == len(listed["top_logprobs"]) == 10
        assert "".join(listed["tokens"]) == text_of(answer)
        assert all(len(entry) == top for entry in listed["top_logprobs"])


async def test_several_sequences_come_in_one_chunk():
    async with pair() as fleet:
        right = await expected(n=3)
        assert len({choice["text"] for choice in right["choices"]}) == 3
        assert (await whole(fleet, "r1", n=3))["choices"] == right["choices"]
        await ready(fleet, "r2", n=3)
        events = await generate_stream(fleet.decode[0], "r2", n=3)
        assert [events.text(index) for index in range(3)] == [choice["text"] for choice in right["choices"]]
        assert [choice["index"] for choice in events.chunks[0]["choices"]] == [0, 1, 2]
        # fewer streamers than sequences: the rest is dropped; more: an assertion
        await ready(fleet, "r3", n=3)
        assert len((await generate(fleet.decode[0], "r3", n=2)).json["choices"]) == 2
        await ready(fleet, "r4")
        assert (await generate(fleet.decode[0], "r4", n=2)).status == 500
        assert await fleet.kv_empty()


async def test_echo_comes_first_and_suffix_last():
    async with pair() as fleet:
        await ready(fleet, "r1")
        asked = {"echo": True, "suffix": " (end)", "stream_options": {"include_usage": True}}
        events = await generate_stream(fleet.decode[0], "r1", **asked)
        right = text_of(await expected())
        assert events.text() == PROMPT + right + " (end)"
        assert events.chunks[0]["choices"] == [{"finish_reason": None, "index": 0, "logprobs": None, "text": PROMPT}]
        assert events.values[-1]["choices"][0] == {
            "finish_reason": "stop",
            "index": 0,
            "logprobs": None,
            "text": " (end)",
        }
        assert events.values[-2]["usage"]["completion_tokens"] == 10
        await ready(fleet, "r2")
        answer = (await generate(fleet.decode[0], "r2", echo=True, suffix=" (end)")).json
        assert text_of(answer) == PROMPT + right + " (end)"


async def test_without_a_user_the_engine_makes_an_id():
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        answer = await post(hybrid, COMPLETIONS, {"prompt": "hello", "model": "whatever"})
        assert answer.json["id"].startswith("cmpl-")
        assert (len(answer.json["id"]), answer.json["model"]) == (37, "whatever")
        answer = await post(hybrid, CHAT, {"messages": [{"role": "user", "content": "hello"}]})
        assert answer.json["id"].startswith("chatcmpl-")


async def test_chat():
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello [[length:4]]"}]}], "n": 2}
        answer = (await post(hybrid, CHAT, {**body, "logprobs": True, "top_logprobs": 2})).json
        assert (answer["object"], answer["choices"][0]["finish_reason"]) == ("chat.completion", "stop")
        assert len(answer["choices"][1]["logprobs"]["content"][0]["top_logprobs"]) == 2
        events = await stream(hybrid, CHAT, {**body, "stream_options": {"include_usage": True}})
        said = answer["choices"][0]["message"]["content"]
        assert (events.text(), events.values[0]["object"]) == (said, "chat.completion.chunk")
        assert events.values[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events.usage[0]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


async def test_a_prefix_cache_matches_token_by_token():
    async with pair(more={"prefix_blocks": 100}) as fleet:
        prefill, decode = fleet.instances
        assert text_of(await whole(fleet, "r1", prompt=LONG)) == text_of(await expected(LONG))
        # all of it: nothing is to be sent
        metadata, matched = await prep(decode, "r2", prompt=LONG)
        assert (metadata, matched) == ("WzBd", len(tokens.encode(LONG)) - 1)
        assert text_of((await generate(decode, "r2", prompt=LONG)).json) == text_of(await expected(LONG))
        # part of it, whatever the pages
        other = LONG[:-6] + " way to the sea"
        metadata, matched = await prep(decode, "r3", prompt=other)
        length = len(tokens.encode(other))
        assert matched == len(tokens.encode(LONG[:-6]))
        assert numbers(metadata)[2] == length - 1 - matched
        await send(prefill, decode, "r3", metadata, matched, prompt=other)
        assert text_of((await generate(decode, "r3", prompt=other)).json) == text_of(await expected(other))
        assert decode.engine.loop.counts["wrong_kv"] == 0
        assert decode.engine.state()["prefix_hit_tokens"] == len(tokens.encode(LONG)) - 1 + matched


async def test_several_segments_and_several_models():
    async with pair(segments=3, draft_models=1) as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1", prompt=LONG)
        values = numbers(metadata)
        assert values[0] == 3
        first, second = values[1:7], values[8:]
        assert values[7] == 3
        length = len(tokens.encode(LONG)) - 1
        assert sum(first[1::2]) == sum(second[1::2]) == length
        assert len({*first[::2], *second[::2]}) == 6
        await send(prefill, decode, "r1", metadata, prompt=LONG)
        assert text_of((await generate(decode, "r1", prompt=LONG)).json) == text_of(await expected(LONG))


async def test_ranks_are_those_of_the_world():
    options = [
        Options(engine="microserving", role=role, settings={"num_gpus": gpus, "world": "unequal"})
        for role, gpus in (("prefill", 2), ("decode", 4), ("decode", 1))
    ]
    async with Fleet(options) as fleet:
        prefill, wide, narrow = fleet.instances
        assert [one.engine.recv_rank for one in fleet.instances] == [0, 2, 6]
        assert wide.engine.announce() == "recv_rank 2"
        for decode in (wide, narrow):
            metadata, _ = await prep(decode, "r1")
            await send(prefill, decode, "r1", metadata)
            assert text_of((await generate(decode, "r1")).json) == text_of(await expected())
        with pytest.raises(ValueError, match="are not all free"):
            await Fleet([Options(engine="microserving", settings={"pe_start": 5, "world": "unequal"})]).__aenter__()
    async with Fleet([Options(engine="microserving", settings={"pe_start": 5, "world": "unequal"})]) as fleet:
        assert fleet.hybrid[0].engine.recv_rank == 5


@pytest.mark.parametrize("rank", [99, -1, 0])
async def test_kv_that_goes_to_another_rank_is_missed(rank):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        await send(prefill, decode, "r1", metadata, rank=rank)
        answer = (await generate(decode, "r1")).json
        assert set(text_of(answer).split()) == {"<KV-LOST>"}
        assert prefill.engine.loop.counts == {"sent_nobody": 1} if rank else {"sent_stray": 1, "writes_astray": 1}
        assert await fleet.kv_empty()


async def test_kv_that_is_sent_to_the_second_gpu_is_missed():
    async with pair(num_gpus=2) as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        await send(prefill, decode, "r1", metadata, rank=decode.engine.recv_rank + 1)
        assert "<KV-LOST>" in text_of((await generate(decode, "r1")).json)


@pytest.mark.parametrize("how", ["nothing", "addresses", "prompt", "begin", "another request"])
async def test_without_the_right_kv_the_text_is_visibly_wrong(how):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        begin = -1
        if how == "addresses":
            await send(prefill, decode, "r1", packed([1, 4096, len(IDS) - 1]))
        elif how == "prompt":
            await send(prefill, decode, "r1", metadata, prompt=[*IDS[:-2], 5, 6])
        elif how == "begin":
            await send(prefill, decode, "r1", metadata)
            begin = -2
        elif how == "another request":
            other, _ = await prep(decode, "r2")
            await send(prefill, decode, "r1", other)
        answer = (await generate(decode, "r1", begin)).json
        assert set(text_of(answer).split()) == {"<KV-LOST>"}
        assert decode.engine.loop.counts["wrong_kv"] == 1


async def test_the_last_write_counts():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        await send(prefill, decode, "r1", metadata)
        await send(prefill, decode, "x", metadata, prompt=[*IDS[:-2], 5, 6])
        assert "<KV-LOST>" in text_of((await generate(decode, "r1")).json)


async def test_any_engine_can_do_any_call():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(prefill, "r1")
        await send(decode, prefill, "r1", metadata)
        assert text_of((await generate(prefill, "r1")).json) == text_of(await expected())
        assert (prefill.engine.wrong_role, decode.engine.wrong_role) == (2, 1)
        assert (await post(decode, COMPLETIONS, body_of("r2"))).status == 200


async def test_unknown_fields_are_ignored_and_disagg_config_is_overwritten():
    async with pair() as fleet:
        debug = {"disagg_config": {"kind": "remote_send", "kv_window_begin": 5}, "ignore_eos": True}
        await ready(fleet, "r1", debug_config=debug, colour="green")
        answer = (await generate(fleet.decode[0], "r1", debug_config=debug)).json
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 30)
        # what the calls do can be asked for in an ordinary completion too
        asked = {"disagg_config": {"kind": "prepare_receive", "kv_window_begin": 0, "kv_window_end": -1}}
        answer = await post(fleet.decode[0], COMPLETIONS, body_of("r2", debug_config=asked))
        assert answer.json["usage"]["extra"]["prefix_matched_length"] == 0


async def test_pages_around_the_calls():
    async with one(settings={"more_models": "second,third"}) as fleet:
        hybrid = fleet.hybrid[0]
        await post(hybrid, COMPLETIONS, {**body_of("r1"), "model": "second"})
        listed = (await get(hybrid, "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["sim-model", "second", "third"]
        metrics = (await get(hybrid, "/metrics")).body.decode()
        assert "completion_tokens_sum\t10\n" in metrics
        dumped = await post(hybrid, "/debug/dump_engine_metrics", {"model": "third"})
        assert dumped.json["prompt_tokens_sum"] == len(IDS)
        asked = {"special_request": "query_engine_metrics"}
        answer = await post(hybrid, COMPLETIONS, {**body_of("r2", debug_config=asked), "model": "second"})
        assert answer.json["usage"]["extra"]["completion_tokens_sum"] == 10


async def test_the_key_is_wanted_under_v1_only():
    async with one(settings={"api_key": "secret"}) as fleet:
        hybrid = fleet.hybrid[0]
        assert (await post(hybrid, COMPLETIONS, body_of("r1"))).status == 401
        assert (await post(hybrid, COMPLETIONS, body_of("r1"), {"Authorization": "Bearer secret"})).status == 200
        assert (await post(hybrid, PREP, {**body_of("r2"), "end": -1})).status == 200
        metadata = packed([1, 0, len(IDS) - 1])
        assert (await post(hybrid, SEND, send_body(hybrid, "r3", metadata))).status == 200
        assert (await post(hybrid, GENERATE, {**body_of("r2"), "begin": -1})).status == 200
