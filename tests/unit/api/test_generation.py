"""Requests read to the end: what each API's fields mean, and what is refused in the client's words."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.families import FAMILIES
from coordinator.api.generation import Generation, generation_of, generations_of
from coordinator.core.errors import BadRequest
from coordinator.core.request import Ask, Deadlines, Request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BY_NAME = {family.name: family for family in FAMILIES}
PATHS = {"chat": ("openai", CHAT), "completions": ("openai", COMPLETIONS), "vllm": ("vllm", "/generate")}
PATHS |= {"tgi": ("tgi", "/generate"), "tgi stream": ("tgi", "/generate_stream"), "tgi root": ("tgi", "/")}
SMALLEST = {"chat": {"messages": USER}, "completions": {"prompt": "hi"}, "vllm": {"prompt": "hi"}}
SMALLEST |= {name: {"inputs": "hi"} for name in ("tgi", "tgi stream", "tgi root")}


def request_of(kind, body):
    api, path = PATHS[kind]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        ask = BY_NAME[api].parse(path, data)
    except BadRequest:
        ask = Ask(stream=False, model=None, prompt_bytes=1)
    return Request("id", api, path, "", (), data, ask, 0.0, Deadlines(math.inf, math.inf, math.inf, math.inf))


def read(kind, body=None, **fields):
    return generation_of(request_of(kind, {**SMALLEST[kind], **fields} if body is None else body))


def tgi(kind="tgi", **parameters):
    return read(kind, parameters=parameters)


# --- what fields mean


def test_the_smallest_requests():
    assert read("chat") == Generation(messages=tuple(USER), add_special_tokens=False)
    assert read("completions") == Generation(prompt="hi", max_tokens=16)
    assert read("vllm") == Generation(prompt="hi", max_tokens=16, echo=True)
    assert read("tgi") == Generation(prompt="hi", max_tokens=100, temperature=0.0, include_stop=True)
    streamed = Generation(prompt="hi", max_tokens=100, temperature=0.0, include_stop=True, stream=True, logprobs=0)
    assert read("tgi stream") == read("tgi root", stream=True) == streamed


@pytest.mark.parametrize("kind", ["chat", "completions", "vllm"])
def test_sampling(kind):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": -5, "presence_penalty": 1, "frequency_penalty": -2,
        "repetition_penalty": 1.1, "n": 3, "stop": ["a", "b"], "stop_token_ids": [5, 6],
        "ignore_eos": True, "skip_special_tokens": False, "stream": True,
    }  # fmt: skip
    found = read(kind, **fields, max_tokens=7, include_stop_str_in_output=True, return_token_ids=True)
    expected = {**fields, "stop": ("a", "b"), "stop_token_ids": (5, 6), "max_tokens": 7}
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.include_stop
    assert found.return_ids


def test_tgi_parameters():
    found = tgi(
        temperature=0.5, top_p=0.9, top_k=40, seed=5, frequency_penalty=0.1, repetition_penalty=1.2, max_new_tokens=9,
        best_of=2, stop=["x"], return_full_text=True, details=True, top_n_tokens=3, do_sample=True,
    )  # fmt: skip
    expected = Generation(
        prompt="hi", temperature=0.5, top_p=0.9, top_k=40, seed=5, frequency_penalty=0.1, repetition_penalty=1.2,
        max_tokens=9, best_of=2, stop=("x",), include_stop=True, echo=True, logprobs=3,
    )  # fmt: skip
    assert found == expected


def test_tgi_samples_only_where_it_is_told_to():
    assert tgi().temperature == 0
    assert tgi(do_sample=True).temperature is tgi(top_k=5).temperature is tgi(top_p=0.5).temperature is None
    assert tgi(stop_sequences=["y"]).stop == ("y",)


@pytest.mark.parametrize("fields", [{"details": True}, {"top_n_tokens": 0, "details": True}])
def test_tgi_tells_log_probabilities_with_details(fields):
    assert tgi(**fields).logprobs == 0
    assert tgi().logprobs is None
    assert tgi(top_n_tokens=2).logprobs == 2


def test_a_stop_text_may_stand_alone_and_nulls_are_nothing():
    assert read("chat", stop="x").stop == ("x",)
    nulls = dict.fromkeys(["stop", "temperature", "n", "logprobs", "tools", "stream_options", "max_tokens", "seed"])
    assert read("chat", **nulls) == read("chat")


def test_limits_of_a_chat_have_two_names():
    assert read("chat", max_tokens=5).max_tokens == 5
    assert read("chat", max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_log_probabilities_are_asked_for_differently():
    assert read("chat", logprobs=True).logprobs == 0
    assert read("chat", logprobs=True, top_logprobs=4).logprobs == 4
    assert read("chat", logprobs=False).logprobs is None
    assert read("completions", logprobs=0).logprobs == 0
    assert read("completions", logprobs=3).logprobs == 3


@pytest.mark.parametrize("top_k", [-1, 0])
def test_all_tokens_is_no_top_k(top_k):
    assert read("vllm", top_k=top_k).top_k is None


def test_what_the_chat_template_is_given():
    tools = [{"type": "function", "function": {"name": "f"}}]
    kwargs = {"enable_thinking": False}
    found = read("chat", tools=tools, chat_template_kwargs=kwargs, add_generation_prompt=False)
    assert (found.tools, found.chat_template_kwargs) == (tuple(tools), kwargs)
    assert not found.add_generation_prompt
    assert read("chat", tools=tools, tool_choice="auto").tools == tuple(tools)
    assert read("chat", tools=tools, tool_choice="none").tools is read("chat", tools=[]).tools is None


def test_usage_at_the_end_of_a_stream():
    assert read("chat", stream=True, stream_options={"include_usage": True}).include_usage
    assert not read("chat", stream=True, stream_options={}).include_usage


@pytest.mark.parametrize("kind", ["completions", "vllm", "chat"])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "text"),
        ([1, 2, 3], (1, 2, 3)),
        (["text"], "text"),
        ([[1, 2]], (1, 2)),
        ("", ""),
        ([2**31 - 1], (2**31 - 1,)),
    ],
)
def test_prompts(kind, prompt, expected):
    assert read(kind, {"prompt": prompt}).prompt == expected


def test_either_path_takes_messages_and_prompts():
    assert read("chat", {"prompt": [1]}) == Generation(prompt=(1,))
    assert read("completions", {"messages": USER}) == Generation(messages=tuple(USER), add_special_tokens=False)
    assert read("completions", {"messages": USER, "prompt": "x"}).prompt == "x"
    assert read("chat", {"messages": USER, "prompt": "x"}).prompt is None


def test_token_ids_for_tgi():
    assert read("tgi", {"inputs": [5, 6]}).prompt == (5, 6)


def test_several_prompts_are_for_those_who_split_them():
    request = request_of("completions", {"prompt": ["a", "b"], "echo": True})
    assert [one.prompt for one in generations_of(request)] == ["a", "b"]
    assert all(one.echo for one in generations_of(request))
    with pytest.raises(BadRequest, match="`prompt` is a list of several"):
        generation_of(request)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": "hot"}, "`temperature` must be a number from 0, at most 100"),
        ({"temperature": -1}, "`temperature` must be"),
        ({"temperature": True}, "`temperature` must be"),
        ({"top_p": 0}, "`top_p` must be a number above 0, at most 1"),
        ({"top_p": 1.5}, "`top_p` must be"),
        ({"top_k": -2}, "`top_k` must be a whole number from -1 to"),
        ({"top_k": 1.5}, "`top_k` must be"),
        ({"seed": 2**64}, "`seed` must be"),
        ({"presence_penalty": 3}, "`presence_penalty` must be a number from -2, at most 2"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be a number above 0"),
        ({"n": 0}, "`n` must be a whole number from 1 to 128"),
        ({"n": 129}, "`n` must be"),
        ({"n": 3, "best_of": 2}, "`best_of` must be at least `n`"),
        ({"best_of": 2, "stream": True}, "`best_of` above `n` and `stream` exclude each other"),
        ({"stop": [""]}, "`stop` must be a string, or a list of at most 64 strings, none of them empty"),
        ({"stop": [1]}, "`stop` must be"),
        ({"stop": ["x"] * 65}, "`stop` must be"),
        ({"stop_token_ids": [-1]}, "`stop_token_ids` must be token ids from 0 to 2147483647"),
        ({"stop_token_ids": 5}, "`stop_token_ids` must be a list of token ids"),
        ({"stream": 1}, "`stream` must be true or false"),
        ({"max_tokens": 0}, "`max_tokens` must be a whole number from 1 to"),
        ({"max_tokens": 2**31}, "`max_tokens` must be"),
        ({"ignore_eos": "yes"}, "`ignore_eos` must be true or false"),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completions", "vllm"])
def test_fields_out_of_range(kind, fields, reason):
    with pytest.raises(BadRequest) as caught:
        read(kind, **fields)
    assert caught.value.message.startswith(reason)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("chat", {"messages": []}, "`messages` must be a list of objects with a role"),
        ("chat", {"messages": "hi"}, "`messages` must be"),
        ("chat", {"messages": [{"content": "x"}]}, "`messages` must be"),
        ("chat", {"messages": None}, "`messages` is missing"),
        ("chat", {"top_logprobs": 2}, "`top_logprobs` needs `logprobs` to be true"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "`top_logprobs` must be a whole number from 0 to 20"),
        ("chat", {"logprobs": 5}, "`logprobs` must be true or false"),
        ("chat", {"stream_options": {"include_usage": True}}, "`stream_options` goes with `stream` only"),
        ("chat", {"stream": True, "stream_options": {"include_usage": 1}}, "`stream_options.include_usage` must be"),
        ("chat", {"response_format": {"type": "json_object"}}, "`response_format` can only be text here"),
        ("chat", {"chat_template": "{{ x }}"}, "`chat_template` is the model's own here"),
        ("chat", {"chat_template_kwargs": []}, "`chat_template_kwargs` must be an object"),
        ("chat", {"tools": {}}, "`tools` must be a list"),
        ("chat", {"tool_choice": "required"}, "`tool_choice` can only be auto or none here"),
        ("chat", {"tool_choice": {"type": "function"}}, "`tool_choice` can only be"),
        ("chat", {"continue_final_message": True}, "`continue_final_message` is not served"),
        ("completions", {"prompt": None}, "`prompt` is missing"),
        ("completions", {"prompt": []}, "`prompt` is empty"),
        ("completions", {"prompt": [[1], []]}, "`prompt` is empty"),
        ("completions", {"prompt": 5}, "`prompt` must be a string, a list of token ids, or a list of prompts"),
        ("completions", {"prompt": [1, "a"]}, "`prompt` must be a string"),
        ("completions", {"prompt": [-1]}, "`prompt` must be token ids from 0"),
        ("completions", {"prompt": [[1], [2**31]]}, "`prompt` must be token ids from 0"),
        ("completions", {"prompt": {"a": 1}}, "`prompt` must be a string"),
        ("completions", {"logprobs": 21}, "`logprobs` must be"),
        ("completions", {"suffix": "x"}, "`suffix` is not served"),
        ("vllm", {"use_beam_search": True}, "`use_beam_search` is not served"),
        ("tgi", {"inputs": ["a", "b"]}, "`inputs` must be one prompt"),
        ("tgi", {"inputs": None}, "`inputs` is missing"),
        ("tgi", {"parameters": 5}, "`parameters` must be an object"),
        ("tgi", {"parameters": {"temperature": 0}}, "`parameters.temperature` must be a number above 0"),
        ("tgi", {"parameters": {"max_new_tokens": 0}}, "`parameters.max_new_tokens` must be a whole number from 1"),
        ("tgi", {"parameters": {"grammar": {"type": "json"}}}, "`parameters.grammar` is not served"),
        ("tgi stream", {"parameters": {"best_of": 2}}, "`parameters.best_of` above 1 and streams exclude"),
    ],
)  # fmt: skip
def test_what_one_api_refuses(kind, fields, reason):
    with pytest.raises(BadRequest) as caught:
        read(kind, **fields)
    assert caught.value.message.startswith(reason)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff"])
def test_what_is_no_object(body):
    with pytest.raises(BadRequest, match="the body must be a JSON object"):
        read("chat", body)


def test_other_apis_are_told_which_ones_there_are():
    request = request_of("chat", SMALLEST["chat"])
    other = Request("id", "triton", "/v2/models/m/generate", "", (), request.body, request.ask, 0.0, request.deadlines)
    with pytest.raises(BadRequest, match="use OpenAI's, TGI's or vLLM's"):
        generation_of(other)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({*Generation.__dataclass_fields__, "inputs", "parameters", "stream_options", "tool_choice", "suffix"})


@given(kind=st.sampled_from(sorted(PATHS)), fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_whatever_a_client_sends_ends_in_a_value_or_a_bad_request(kind, fields):
    try:
        found = generations_of(request_of(kind, {**SMALLEST[kind], **fields}))
    except BadRequest:
        return
    assert all((one.prompt is None) != (one.messages is None) for one in found)
