"""What a simulated SGLang instance answers by itself: `/generate`, the OpenAI paths, pages, refusals."""

import itertools
import json

import pytest
from openai_client import CHAT, COMPLETIONS, MODEL, Events, call, chat, completion, get, opened, post, stream
from sglang_legs import GENERATE, alone, both, meeting, pair, words

from instances import tokens
from instances.options import Options
from instances.run import Fleet


def ordinary(**more):
    return Fleet([Options(engine="sglang", **more)])


async def native_events(instance, body):
    """The events of a native stream."""
    async with opened(instance, GENERATE, {**body, "stream": True}) as request:
        status, _, headers = await request.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        raw, ended = await request.body()
    assert ended == "terminator"
    *events, done = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n")[:-1]]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


async def test_text_and_ids_give_one_answer():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        by_text = (await post(hybrid, GENERATE, {"text": "the river", "rid": "abc"})).json
        by_ids = (await post(hybrid, GENERATE, {"input_ids": list(tokens.encode("the river"))})).json
        assert by_text["text"] == by_ids["text"] != ""
        meta = by_text["meta_info"]
        assert (meta["id"], meta["prompt_tokens"]) == ("abc", 2)
        assert meta["finish_reason"] == {"type": "stop", "matched": None}
        assert meta["completion_tokens"] == len(by_text["output_ids"])
        assert "input_token_logprobs" not in meta
        limited = (await post(hybrid, GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 3}})).json
        assert limited["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert await fleet.kv_empty()


async def test_each_event_has_the_whole_text_so_far():
    async with ordinary() as fleet:
        body = {"text": "the river"}
        whole = (await post(fleet.hybrid[0], GENERATE, body)).json
        events = await native_events(fleet.hybrid[0], body)
        assert events[-1]["text"] == whole["text"]
        assert [len(event["output_ids"]) for event in events] == list(range(1, len(events) + 1))
        assert all(late["text"].startswith(early["text"]) for early, late in itertools.pairwise(events))
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]


async def test_batches():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        single = [(await post(hybrid, GENERATE, {"text": text})).json["text"] for text in ("one", "two")]
        many = (await post(hybrid, GENERATE, {"text": ["one", "two"]})).json
        assert [one["text"] for one in many] == single
        params = [{"max_new_tokens": 2}, {"max_new_tokens": 3}]
        many = (await post(hybrid, GENERATE, {"text": ["one", "two"], "sampling_params": params})).json
        assert [one["meta_info"]["completion_tokens"] for one in many] == [2, 3]
        events = await native_events(hybrid, {"text": ["one", "two"]})
        last = {event["index"]: event["text"] for event in events}
        assert [last[0], last[1]] == single
        several = (await post(hybrid, GENERATE, {"text": "one", "sampling_params": {"n": 2}})).json
        assert [several[0]["text"], len(several)] == [single[0], 2]
        assert isinstance((await post(hybrid, GENERATE, {"text": ["one"]})).json, list)


async def test_log_probabilities_of_the_prompt_are_on_prefill_only():
    body = {"text": "the quiet river", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    async with pair() as fleet:
        on_prefill, on_decode = (answer.json["meta_info"] for answer in await both(fleet, GENERATE, body))
        assert [entry[1] for entry in on_prefill["input_token_logprobs"]] == list(tokens.encode("the quiet river"))
        assert on_prefill["input_token_logprobs"][0][0] is None
        assert "input_token_logprobs" not in on_decode
        assert "input_top_logprobs" not in on_decode
        assert len(on_decode["output_token_logprobs"]) == on_decode["completion_tokens"] > 1
        assert on_decode["output_token_logprobs"][:1] == on_prefill["output_token_logprobs"]
        # by default the last prompt token only
        del body["logprob_start_len"]
        on_prefill, _ = (answer.json["meta_info"] for answer in await both(fleet, GENERATE, body))
        assert len(on_prefill["input_token_logprobs"]) == 1


async def test_openai_streams_have_the_finish_reason_apart():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        options = {"include_usage": True}
        events = await stream(hybrid, CHAT, chat("hi", max_tokens=3, ignore_eos=True, stream_options=options))
        *texts, last = events.chunks
        assert last["choices"][0]["delta"] == {}
        assert (last["choices"][0]["finish_reason"], events.finish()) == ("length", "length")
        assert all(value["choices"][0]["finish_reason"] is None for value in texts)
        assert [usage["completion_tokens"] for usage in events.usage] == [3]
        whole = (await post(hybrid, CHAT, chat("hi", max_tokens=3, ignore_eos=True))).json
        assert whole["choices"][0]["message"]["content"] == events.text()
        events = await stream(hybrid, COMPLETIONS, completion("hi"))
        assert events.text() == (await post(hybrid, COMPLETIONS, completion("hi"))).json["choices"][0]["text"]
        # unlike vLLM: usage without a stream is no error, and any model name will do
        body = {**chat("hi"), "model": "nope", "stream_options": {"include_usage": True}}
        assert (await post(hybrid, CHAT, body)).status == 200


async def test_streams_of_both_legs():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        for path, body in ((CHAT, chat("hello")), (GENERATE, {"text": "hello"})):
            right = words(path, await alone(path, body))[0]
            legs = {**body, **meeting(prefill), "stream": True}
            async with opened(prefill, path, legs) as one, opened(decode, path, legs) as two:
                await one.head()
                await two.head()
                on_prefill, on_decode = Events(*await one.body()), Events(*await two.body())
            assert (on_prefill.done, on_decode.done) == (1, 1)
            if path == CHAT:
                assert on_decode.text() == right
                assert on_prefill.finish() == "length"
                assert right.startswith(on_prefill.text())
            else:
                assert on_decode.values[-1]["text"] == right
                assert on_prefill.values[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "Either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "Either text or input_ids"),
        ({"text": 5}, "text: Input should be"),
        ({"text": []}, "text: Input should be"),
        ({"text": [[1]]}, "text: Input should be"),
        ({"input_ids": "a"}, "input_ids: Input should be"),
        ({"input_ids": [1, "a"]}, "input_ids: Input should be"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "unexpected keyword argument 'max_tokens'"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params: Input should be"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}}, "min_new_tokens must be"),
        ({"text": "a", "stream": 1}, "stream: Input should be"),
        ({"text": "a " * 50}, "longer than the model's context length"),
    ],
)
async def test_native_refusals(body, says):
    async with ordinary(settings={"context_length": 40}) as fleet:
        answer = await post(fleet.hybrid[0], GENERATE, body)
        assert answer.status == 400
        # the native path has a shape of its own
        assert says in answer.json["error"]["message"]
        assert "object" not in answer.json


async def test_openai_refusals():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        for body in (chat("hi", max_tokens="5"), chat("hi", top_p=2), {"messages": []}, b"{bad", b"[]"):
            answer = await post(hybrid, CHAT, body)
            assert (answer.status, answer.json["object"], answer.json["type"]) == (400, "error", "BadRequest")
        assert (await call(hybrid, "POST", CHAT, b"{}", {"Content-Type": "text/plain"})).status == 400


async def test_pages():
    async with pair(dp_size=2) as fleet:
        prefill, decode = fleet.instances
        for path in ("/get_server_info", "/server_info"):
            info = (await get(prefill, path)).json
            assert info["disaggregation_bootstrap_port"] == prefill.engine.bootstrap_port != prefill.port
            assert (info["disaggregation_mode"], info["dp_size"]) == ("prefill", 2)
        assert (await get(decode, "/get_server_info")).json["disaggregation_mode"] == "decode"
        assert (await get(prefill, "/get_model_info")).json["model_path"] == MODEL
        assert (await get(prefill, "/v1/models")).json["data"][0]["id"] == MODEL
        for path in ("/health", "/health_generate"):
            assert (await get(prefill, path)).status == 200
        assert prefill.engine.announce() == f"bootstrap port {prefill.engine.bootstrap_port}"
        await both(fleet, CHAT, chat("[[length:3]]"))
        page = (await get(decode, "/metrics")).body.decode()
        assert 'sglang:generation_tokens_total{model_name="sim-model",engine_type="decode"} 4\n' in page
        assert "sglang:num_decode_transfer_queue_reqs{" in page
        assert 'sglang:generation_tokens_total{model_name="sim-model",engine_type="prefill"} 1\n' in (
            (await get(prefill, "/metrics")).body.decode()
        )
