"""What a simulated vLLM instance answers by itself, and what it refuses."""

import asyncio
import json

import pytest
from openai_client import CHAT, COMPLETIONS, MODEL, call, chat, completion, get, post, stream, until

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing


def ordinary(**more):
    return Fleet([Options(engine="vllm", **more)])


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("hello", max_tokens=30)), (COMPLETIONS, completion("hello", max_tokens=30))]
)
async def test_stream_and_whole_answer_agree(path, body):
    async with ordinary() as fleet:
        whole = (await post(fleet.hybrid[0], path, body)).json
        events = await stream(fleet.hybrid[0], path, body)
        choice = whole["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert events.text() == text != ""
        assert events.finish() == choice["finish_reason"]
        assert (events.done, events.ended) == (1, "terminator")
        # nobody asked for usage
        assert all("usage" not in value for value in events.values)
        assert whole["kv_transfer_params"] is None
        assert whole["model"] == MODEL
        assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
        assert await fleet.kv_empty()


async def test_a_chat_stream_begins_with_the_role():
    async with ordinary() as fleet:
        events = await stream(fleet.hybrid[0], CHAT, chat("[[length:2]]"))
        assert events.values[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [value["object"] for value in events.values] == ["chat.completion.chunk"] * 4
        # the end-of-text token has no text and carries the finish reason
        last = events.values[-1]["choices"][0]
        assert (last["delta"], last["finish_reason"]) == ({"content": ""}, "stop")


async def test_usage_comes_in_a_chunk_of_its_own():
    async with ordinary() as fleet:
        options = {"include_usage": True}
        events = await stream(fleet.hybrid[0], CHAT, chat("[[length:9]]", max_tokens=4, stream_options=options))
        assert events.values[-1]["choices"] == []
        assert [usage["completion_tokens"] for usage in events.usage] == [4]
        both = {"include_usage": True, "continuous_usage_stats": True}
        events = await stream(fleet.hybrid[0], CHAT, chat("[[length:9]]", max_tokens=4, stream_options=both))
        assert [value["usage"]["completion_tokens"] for value in events.values] == [0, 1, 2, 3, 4, 4]


async def test_several_choices_and_prompts():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        whole = (await post(hybrid, CHAT, chat("hi", n=3, max_tokens=20))).json
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert len(set(texts)) == 3
        events = await stream(hybrid, CHAT, chat("hi", n=3, max_tokens=20))
        assert [events.text(index) for index in range(3)] == texts
        single = [(await post(hybrid, COMPLETIONS, completion(p))).json["choices"][0]["text"] for p in ("one", "two")]
        many = (await post(hybrid, COMPLETIONS, completion(["one", "two"], n=2))).json
        assert [choice["text"] for choice in many["choices"]][::2] == single
        assert len(many["choices"]) == 4
        ids = (await post(hybrid, "/tokenize", {"prompt": "one"})).json["tokens"]
        for prompt in (ids, [ids], ["one"]):
            whole = (await post(hybrid, COMPLETIONS, completion(prompt))).json
            assert whole["choices"][0]["text"] == single[0]


async def test_limits():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]

        async def made(path, body):
            whole = (await post(hybrid, path, body)).json
            return whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]

        assert await made(CHAT, chat("[[length:99]]", max_tokens=9, max_completion_tokens=5)) == (5, "length")
        assert await made(COMPLETIONS, completion("[[length:99]]")) == (16, "length")
        assert await made(CHAT, chat("[[length:3]]", max_tokens=9)) == (4, "stop")
        assert await made(CHAT, chat("[[length:3]]", max_tokens=9, min_tokens=6)) == (7, "stop")
        assert await made(CHAT, chat("[[length:3]]", max_tokens=9, ignore_eos=True)) == (9, "length")
        assert await made(CHAT, chat("[[length:0]]")) == (1, "stop")


async def test_echo_and_log_probabilities():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        body = completion("the river", max_tokens=4, echo=True, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        choice = (await post(hybrid, COMPLETIONS, body)).json["choices"][0]
        assert choice["text"].startswith("the river")
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"][:2] == [0, 3]
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == 2
        del body["prompt_logprobs"]
        events = await stream(hybrid, COMPLETIONS, body)
        assert events.text() == choice["text"]
        streamed = [choice["logprobs"] for value in events.chunks for choice in value["choices"]]
        for key in ("tokens", "token_logprobs", "text_offset"):
            assert [item for part in streamed for item in part[key]] == logprobs[key]
        body = chat("hi", max_tokens=3, logprobs=True, top_logprobs=2, prompt_logprobs=0)
        whole = (await post(hybrid, CHAT, body)).json
        content = whole["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        assert whole["prompt_logprobs"][0] is None


async def test_tools_and_unknown_fields_pass():
    async with ordinary() as fleet:
        tools = [{"type": "function", "function": {"name": "weather"}}]
        body = chat(
            "hi", tools=tools, tool_choice="auto", x_vendor={"a": None}, response_format={"type": "text"}, seed=None
        )
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": [{"type": "text", "text": "sunny"}]},
        ]
        answer = await post(fleet.hybrid[0], CHAT, body)
        assert answer.json["choices"][0]["message"]["tool_calls"] == []
        recorded = json.loads(next(iter(fleet.hybrid[0].records)).body)
        assert recorded == body


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, chat("hi", stream_options={"include_usage": True}), "Stream options can only be defined"),
        (CHAT, chat("hi", min_tokens=10, max_tokens=1), "min_tokens must be less than or equal to max_tokens=1"),
        (CHAT, chat("hi", max_tokens=0), "max_tokens must be"),
        (CHAT, chat("hi", max_tokens="5"), "max_tokens: Input should be a valid integer"),
        (CHAT, chat("hi", max_tokens=5.0), "valid integer"),
        (CHAT, chat("hi", max_tokens=10**6), "maximum context length"),
        (CHAT, chat("hi", temperature=-1), "temperature must be"),
        (CHAT, chat("hi", top_p=0), "top_p must be in (0"),
        (CHAT, chat("hi", n=0), "n must be"),
        (CHAT, chat("hi", stream="yes"), "stream: Input should be a valid boolean"),
        (CHAT, chat("hi", top_logprobs=2), "`logprobs` must be set"),
        (CHAT, chat("hi", stop=[1]), "stop: Input should be"),
        (CHAT, chat("hi", tools=[{"type": "function"}]), "tools: each must have"),
        (CHAT, {"model": MODEL}, "messages: Input should be"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user"}]}, "content must be"),
        (CHAT, chat("hi", kv_transfer_params=[1]), "kv_transfer_params: Input should be a valid dictionary"),
        (CHAT, chat("hi", kv_transfer_params={"do_remote_decode": 1}), "do_remote_decode: Input should be"),
        (CHAT, chat("hi", kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": True}), "exclude"),
        (COMPLETIONS, {"model": MODEL}, "prompt: Input should be"),
        (COMPLETIONS, completion([]), "prompt: Input should be"),
        (COMPLETIONS, completion("hi", prompt_logprobs=1, stream=True), "not available when `stream=True`"),
        (COMPLETIONS, b"[1]", "valid dictionary"),
        (COMPLETIONS, b"{bad", "JSON decode error"),
        (COMPLETIONS, b"[" * 100_000, "JSON decode error"),
    ],
)
async def test_refusals(path, body, says):
    async with ordinary() as fleet:
        answer = await post(fleet.hybrid[0], path, body)
        error = answer.json["error"]
        assert (answer.status, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert says in error["message"]
        assert fleet.hybrid[0].ledger.most_used_blocks == 0


async def test_what_the_server_itself_refuses():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        answer = await post(hybrid, CHAT, {**chat("hi"), "model": "nope"})
        assert (answer.status, answer.json["error"]["type"]) == (404, "NotFoundError")
        # a body that is not declared as JSON, and a compressed one
        payload = json.dumps(chat("hi")).encode()
        assert (await call(hybrid, "POST", CHAT, payload, {"Content-Type": "text/plain"})).status == 400
        assert (await call(hybrid, "POST", CHAT, payload)).status == 400
        assert (await get(hybrid, f"/v1/models/{MODEL}")).status == 404
        assert (await get(hybrid, CHAT)).status == 405


async def test_pages():
    async with ordinary(settings={"max_model_len": "4096"}) as fleet:
        hybrid = fleet.hybrid[0]
        assert (await get(hybrid, "/health")).status == 200
        assert (await get(hybrid, "/version")).json == {"version": "0.32.0"}
        model = (await get(hybrid, "/v1/models")).json["data"][0]
        assert (model["id"], model["max_model_len"]) == (MODEL, 4096)
        tokens = (await post(hybrid, "/tokenize", {"prompt": "hello 🙂", "return_token_strs": True})).json
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert (await post(hybrid, "/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": "hello 🙂"}
        by_chat = (await post(hybrid, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json
        assert by_chat["count"] > 1
        assert (await post(hybrid, "/tokenize", {})).status == 400


async def test_metrics():
    async with ordinary() as fleet:
        await post(fleet.hybrid[0], CHAT, chat("[[length:3]]"))
        page = (await get(fleet.hybrid[0], "/metrics")).body.decode()
        label = 'engine="0",model_name="sim-model"'
        assert f"vllm:generation_tokens_total{{{label}}} 4\n" in page
        assert f'vllm:request_success_total{{{label},finished_reason="stop"}} 1\n' in page
        assert f"vllm:time_to_first_token_seconds_count{{{label}}} 1\n" in page
        assert f"vllm:nixl_xfer_time_seconds_count{{{label}}} 0\n" in page
        assert f"vllm:num_requests_running{{{label}}} 0\n" in page


async def test_requests_wait_for_blocks_in_order_of_arrival():
    slow = Timing(decode_ms=1)
    async with ordinary(blocks=2, block_tokens=64, timing=slow) as fleet:
        hybrid = fleet.hybrid[0]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(hybrid, CHAT, chat("[[length:20]]", max_tokens=30))) for _ in range(6)]
        assert {task.result().status for task in tasks} == {200}
        assert hybrid.ledger.most_used_blocks <= 2
        answer = await post(hybrid, CHAT, chat("x " * 500))
        assert (answer.status, "exist" in answer.json["error"]["message"]) == (400, True)
        await until(lambda: hybrid.ledger.used_blocks == 0)


async def test_during_the_start_it_is_not_there():
    async with ordinary(startup_s=60) as fleet:
        assert (await get(fleet.hybrid[0], "/health")).status == 503
        assert (await post(fleet.hybrid[0], CHAT, chat("hi"))).status == 503
