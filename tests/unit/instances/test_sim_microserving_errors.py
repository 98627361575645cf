"""What a real MLC engine refuses, dies of, or answers all the same (microserving protocol page §7)."""

import asyncio
import json

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
    packed,
    pair,
    prep,
    send,
    send_body,
)
from mindie_client import call
from openai_client import get, opened, post, until

from instances import tokens

IDS = list(tokens.encode(PROMPT))
LENGTH = len(IDS)
RIGHT = packed([1, 0, LENGTH - 1])
OWN = {PREP: {"end": -1}, SEND: {"begin": 0, "end": -1, "kv_addr_info": RIGHT, "recv_rank": 0}, GENERATE: {"begin": -1}}
CALLS = list(OWN)
FIELDS = [(path, name) for path, fields in OWN.items() for name in fields]


def full(path, user="r1", **more):
    return {**body_of(user), **OWN.get(path, {}), **more}


# --- 422


@pytest.mark.parametrize(("path", "name"), [*FIELDS, *((path, "prompt") for path in [*CALLS, COMPLETIONS])])
async def test_a_missing_field_is_named(path, name):
    async with one() as fleet:
        body = full(path)
        del body[name]
        answer = await post(fleet.hybrid[0], path, body)
        assert (answer.status, answer.headers["content-type"].split(";")[0]) == (422, "application/json")
        assert answer.json == {
            "detail": [{"type": "missing", "loc": ["body", name], "msg": "Field required", "input": body}]
        }


@pytest.mark.parametrize(
    ("wrong", "kind", "loc"),
    [
        ({"n": "many"}, "int_parsing", ["n"]),
        ({"n": 1.5}, "int_from_float", ["n"]),
        ({"end": None}, "int_type", ["end"]),
        ({"user": 7}, "string_type", ["user"]),
        ({"prompt": None}, "string_type", ["prompt", "str"]),
        ({"prompt": [[1, 2]]}, "string_type", ["prompt", "str"]),
        ({"stream": "perhaps"}, "bool_parsing", ["stream"]),
        ({"stream_options": {}}, "missing", ["stream_options", "include_usage"]),
        ({"logprobs": 6}, "value_error", []),
        ({"logprobs": -1}, "value_error", []),
        ({"presence_penalty": 2.5}, "value_error", ["presence_penalty"]),
        ({"frequency_penalty": -3}, "value_error", ["frequency_penalty"]),
        ({"logit_bias": {"5": 101}}, "value_error", ["logit_bias"]),
        ({"logit_bias": {"x": 1}}, "int_parsing", ["logit_bias", "x", "[key]"]),
        ({"response_format": {"type": "xml"}}, "literal_error", ["response_format", "type"]),
        ({"debug_config": {"special_request": "tea"}}, "literal_error", ["debug_config", "special_request"]),
        ({"debug_config": 5}, "model_type", ["debug_config"]),
    ],
)
async def test_wrong_values_are_refused_as_fastapi_does(wrong, kind, loc):
    async with one() as fleet:
        answer = await post(fleet.hybrid[0], PREP, full(PREP, **wrong))
        assert answer.status == 422
        first = answer.json["detail"][0]
        assert (first["type"], first["loc"]) == (kind, ["body", *loc])
        assert first.get("ctx") == {"error": {}} if kind == "value_error" else True


async def test_bodies_that_are_no_objects():
    async with one() as fleet:
        hybrid, kind = fleet.hybrid[0], {"Content-Type": "application/json"}
        broken = await call(hybrid, "POST", PREP, b'{"end": }', kind)
        assert (broken.status, broken.json["detail"][0]["type"]) == (422, "json_invalid")
        assert broken.json["detail"][0]["loc"] == ["body", 8]
        nothing = await call(hybrid, "POST", PREP, b"", kind)
        assert nothing.json["detail"] == [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}]
        array = await call(hybrid, "POST", PREP, b"[1]", kind)
        assert array.json["detail"][0]["type"] == "model_attributes_type"
        form = await call(hybrid, "POST", PREP, b'{"end":1}', {"Content-Type": "text/plain"})
        assert (form.status, form.json["detail"][0]["input"]) == (422, '{"end":1}')
        bare = await call(hybrid, "POST", PREP, json.dumps(full(PREP)).encode())
        assert bare.status == 200


@pytest.mark.parametrize(
    "wrong", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"stream_options": {"include_usage": True}}]
)
async def test_chat_has_checks_of_its_own(wrong):
    async with one() as fleet:
        body = {"messages": [{"role": "user", "content": "hi"}], **wrong}
        assert (await post(fleet.hybrid[0], CHAT, body)).status == 422
        assert (await post(fleet.hybrid[0], CHAT, {"messages": [{"role": "ghost"}]})).status == 422


# --- 400


@pytest.mark.parametrize("path", [*CALLS, COMPLETIONS])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt": []}, "Invalid request prompt []"),
        ({"best_of": 2}, 'Request fields "best_of" are not supported right now.'),
        ({"prompt": [1] * 65}, "Request prompt has 65 tokens in total, larger than the model input length limit 64."),
    ],
)
async def test_bad_requests_are_json_within_a_json_string(path, wrong, says):
    async with one(settings={"max_sequence_length": 64}) as fleet:
        answer = await post(fleet.hybrid[0], path, full(path, **wrong))
        assert answer.status == 400
        assert answer.body.startswith(b'"{\\"object\\":\\"error\\",\\"message\\":')
        assert error_of(answer) == {"object": "error", "message": says, "code": 400}
        assert not fleet.hybrid[0].engine.loop.dead


async def test_a_model_that_is_not_served():
    async with pair(more_models="other") as fleet:
        prefill, decode = fleet.instances
        wrong = {"model": "third"}
        assert (await post(decode, PREP, full(PREP, **wrong))).status == 500
        sent = await post(prefill, SEND, full(SEND, **wrong))
        assert (sent.status, sent.json) == (200, {})
        answer = await post(decode, GENERATE, full(GENERATE, **wrong))
        assert (answer.status, error_of(answer)["message"]) == (400, 'The requested model "third" is not served.')
        assert (await post(decode, PREP, full(PREP, model="other"))).status == 200
    async with pair() as fleet:  # one model takes every name
        assert (await post(fleet.decode[0], PREP, full(PREP, model="third"))).status == 200


# --- 500


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("debug", [None, "absent"])
async def test_debug_config_must_be_an_object(path, debug):
    async with one() as fleet:
        body = full(path, debug_config=None)
        if debug == "absent":
            del body["debug_config"]
        answer = await post(fleet.hybrid[0], path, body)
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
        assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", [PREP, SEND])
async def test_a_suffix_too_early_is_a_500_after_the_work(path):
    async with pair() as fleet:
        prefill, decode = fleet.instances
        if path == PREP:
            assert (await post(decode, PREP, full(PREP, suffix="!"))).status == 500
            metadata = RIGHT
        else:
            metadata, _ = await prep(decode, "r1")
            body = send_body(decode, "r1", metadata, suffix="!")
            assert (await post(prefill, SEND, body)).status == 500
        # the reservation is an orphan, the KV was sent
        assert decode.ledger.count("pinned") == 1
        if path == PREP:
            await send(prefill, decode, "r1", metadata)
        assert (await generate(decode, "r1")).json["choices"] == (await expected())["choices"]


@pytest.mark.parametrize("wrong", [{"prompt": ""}, {"n": 0}, {"temperature": -1}, {"top_p": 1.5}, {"seed": 2**63}])
async def test_what_the_engine_cannot_make_a_request_of(wrong):
    async with one() as fleet:
        assert (await post(fleet.hybrid[0], COMPLETIONS, full(COMPLETIONS, **wrong))).status == 500
        assert not fleet.hybrid[0].engine.loop.dead


@pytest.mark.parametrize("metadata", ["%%%", "WzEs", packed({"a": 1}), packed([1, 0]), packed([-1]), packed([1.5])])
async def test_metadata_that_cannot_be_read(metadata):
    async with one() as fleet:
        assert (await post(fleet.hybrid[0], SEND, full(SEND, kv_addr_info=metadata))).status == 500
        assert not fleet.hybrid[0].engine.loop.dead


async def test_a_stream_without_chunks():
    async with pair(decode=["zero_chunks"]) as fleet:
        for stream, status in ((True, 500), (False, 200)):
            await prep(fleet.decode[0], "r1")
            answer = await generate(fleet.decode[0], "r1", stream=stream)
            assert answer.status == status
        assert (answer.json["choices"][0]["finish_reason"], answer.json["usage"]) == (None, None)
        assert await fleet.kv_empty()
    async with one() as fleet:  # a special request without a usage chunk has none either
        debug = {"special_request": "query_engine_metrics"}
        body = body_of("r1", stream=True, debug_config=debug)
        assert (await post(fleet.hybrid[0], COMPLETIONS, body)).status == 500


# --- without --enable-debug, without disaggregation, at the longest length


async def test_without_enable_debug_everything_is_an_ordinary_completion():
    async with pair(enable_debug=0) as fleet:
        prefill, decode = fleet.instances
        assert (await post(decode, PREP, full(PREP))).status == 500
        assert decode.engine.loop.made_tokens == 10
        sent = await post(prefill, SEND, full(SEND))
        assert (sent.status, sent.json, prefill.engine.loop.made_tokens) == (200, {}, 10)
        answer = (await generate(decode, "r1")).json
        assert answer["choices"] == (await expected())["choices"]
        assert answer["usage"]["extra"] is None
        assert (await post(decode, PREP, full(PREP, debug_config=None))).status == 500
        assert (await post(decode, "/debug/reset_engine", {"model": "x"})).status == 404
        assert await fleet.kv_empty()


async def test_without_disaggregation_prep_recv_hangs():
    async with pair(disagg=0) as fleet:
        assert await never_answers(fleet.decode[0], PREP, full(PREP))
        assert (await post(fleet.decode[0], COMPLETIONS, full(COMPLETIONS, "r2"))).status == 200
        assert (await get(fleet.decode[0], "/metrics")).status == 200


async def test_a_prompt_of_the_greatest_length():
    async with pair(max_sequence_length=LENGTH) as fleet:
        prefill, decode = fleet.instances
        assert (await post(decode, PREP, full(PREP))).status == 500
        sent = await post(prefill, SEND, full(SEND))
        assert (sent.status, sent.json, prefill.engine.loop.counts) == (200, {}, {})
        answer = (await post(decode, COMPLETIONS, full(COMPLETIONS))).json
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "extra": None}
        assert answer["usage"] == usage
        assert await fleet.kv_empty()


# --- ids


async def test_a_duplicate_of_a_live_user_ends_both():
    async with pair(decode=["stall@2"]) as fleet:
        prefill, decode = fleet.instances
        metadata, _ = await prep(decode, "r1")
        await send(prefill, decode, "r1", metadata)
        async with opened(decode, GENERATE, full(GENERATE, stream=True)) as first:
            await first.head()
            await until(lambda: decode.engine.loop.running)
            second = await post(decode, GENERATE, full(GENERATE))
            assert (second.status, second.body) == (500, b"Internal Server Error")
            # the first is aborted; its stream never finishes
            assert await fleet.kv_empty()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await first.body()
        assert decode.engine.loop.counts["duplicates"] == 1
        assert decode.ledger.released[-1]["why"] == "aborted: duplicate user"
        await prep(decode, "r1")  # the id is free again


async def test_a_duplicate_of_a_prep_recv_that_waits():
    async with one(role="decode", blocks=401) as fleet:
        decode = fleet.decode[0]
        await prep(decode, "r0")
        async with opened(decode, PREP, full(PREP)) as first:
            await until(lambda: decode.ledger.waiting == 1)
            assert (await post(decode, PREP, full(PREP))).status == 500
            await until(lambda: decode.ledger.waiting == 0)
            await generate(decode, "r0")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await first.head()
        assert await fleet.kv_empty()


async def test_a_second_prep_recv_for_an_id_is_not_kept():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        first, _ = await prep(decode, "r1")
        second, _ = await prep(decode, "r1")
        assert first != second
        await send(prefill, decode, "r1", second)
        answer = (await generate(decode, "r1")).json
        assert set(answer["choices"][0]["text"].split()) == {"<KV-LOST>"}
        assert decode.engine.loop.counts["reused_ids"] == 1
        assert await fleet.kv_empty()


async def test_an_id_may_be_used_again_after_its_end():
    async with pair(decode=["#1:preempt@2"]) as fleet:
        prefill, decode = fleet.instances
        for finish in ("preempt", "stop", "stop"):
            metadata, _ = await prep(decode, "r1")
            await send(prefill, decode, "r1", metadata)
            assert (await generate_stream(decode, "r1")).finish() == finish


# --- assertions that end the engine


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (PREP, {"end": LENGTH}),
        (PREP, {"end": -LENGTH - 1}),
        (PREP, {"end": 99}),
        (SEND, {"begin": LENGTH - 1}),
        (SEND, {"begin": 3, "end": 3, "kv_addr_info": packed([0])}),
        (SEND, {"end": LENGTH, "kv_addr_info": packed([1, 0, LENGTH])}),
        (SEND, {"begin": -2}),
        (SEND, {"begin": 1}),
        (SEND, {"kv_addr_info": packed([1, 0, 3])}),
        (SEND, {"kv_addr_info": packed([1, 0, LENGTH - 1, 1, 0, LENGTH - 1])}),
        (SEND, {"kv_addr_info": packed([])}),
        (GENERATE, {}),
        (GENERATE, {"stream": True}),
    ],
)
async def test_the_engine_dies_behind_living_http(path, wrong):
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        assert await never_answers(hybrid, path, full(path, **wrong))
        assert hybrid.engine.loop.dead
        assert (await get(hybrid, "/v1/models")).status == 200
        assert (await get(hybrid, "/sim/state")).json["dead"]
        for other, body in ((COMPLETIONS, full(COMPLETIONS, "r2")), ("/debug/reset_engine", {"model": "m"})):
            assert await never_answers(hybrid, other, body, 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await get(hybrid, "/metrics")
        # what the HTTP server refuses by itself it still refuses
        assert (await post(hybrid, PREP, {})).status == 422
        assert (await post(hybrid, PREP, full(PREP, "r3", prompt=[]))).status == 400


@pytest.mark.parametrize("begin", [LENGTH, -LENGTH - 1])
async def test_a_begin_out_of_the_prompt_is_fatal(begin):
    async with one(role="decode") as fleet:
        decode = fleet.decode[0]
        await prep(decode, "r1")
        assert await never_answers(decode, GENERATE, full(GENERATE, begin=begin))
        assert decode.engine.loop.dead
        assert decode.ledger.count("pinned") == 1


async def test_a_crash_brings_the_engine_back():
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        await post(hybrid, PREP, full(PREP, "r0"))
        assert (await post(hybrid, "/sim/act", {"do": "die"})).status == 200
        assert (await post(hybrid, "/sim/reset", {})).status == 200
        assert hybrid.ledger.used_blocks == 0
        assert (await post(hybrid, COMPLETIONS, full(COMPLETIONS))).status == 200


# --- routes


async def test_other_paths_and_methods():
    async with one() as fleet:
        hybrid = fleet.hybrid[0]
        gone = await get(hybrid, "/v1/embeddings")
        assert (gone.status, gone.json) == (404, {"detail": "Not Found"})
        wrong = await get(hybrid, PREP)
        assert (wrong.status, wrong.json) == (405, {"detail": "Method Not Allowed"})
        for body in ({}, [1], "text"):
            answer = await post(hybrid, "/debug/reset_engine", body)
            assert (answer.status, error_of(answer)["message"][:15]) == (400, "Invalid request")
    async with one(settings={"more_models": "b"}) as fleet:
        assert (await post(fleet.hybrid[0], "/debug/reset_engine", {"model": "c"})).status == 500
