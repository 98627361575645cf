"""Answers in the shapes of the APIs' own servers; clients' own types read them."""

import json
import math

import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from coordinator.api.families import FAMILIES
from coordinator.api.generation import generation_of
from coordinator.api.writers import LENGTH, STOP, STOP_STRING, Delta, TokenLogprob, Usage, writer_of
from coordinator.core.errors import BadRequest
from coordinator.core.request import Ask, Deadlines, Request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = Usage(3, 2)
BY_NAME = {family.name: family for family in FAMILIES}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/": {"inputs": "hi"},
}
LIKELY = TokenLogprob(5, "a", -0.25, b"a", (TokenLogprob(5, "a", -0.25, b"a"), TokenLogprob(6, "b", -1.5, b"b")))
HALF = TokenLogprob(7, "\ufffd", -0.5, b"\xc3", (TokenLogprob(8, "x", -0.1, b"x"), TokenLogprob(9, "y", -2, b"y")))


def writer(path, api="openai", **fields):
    body = json.dumps({**BODIES.get(path, {}), **fields}).encode()
    stream = bool(fields.get("stream")) or path == "/generate_stream"
    request = Request(
        "id-1", api, path, "", (), body, Ask(stream, None, 1), 0.0, Deadlines(math.inf, math.inf, math.inf, math.inf)
    )
    return writer_of(request, generation_of(request), "llama", 1700000000)


def events(data):
    """The values of a stream's events; `[DONE]` as text."""
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    found = [line.removeprefix("data:").strip() for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def stream(made, deltas, usage=USAGE):
    return b"".join([made.piece(0, delta) for delta in deltas]) + made.tail(usage)


TEXT = [Delta("Hel", (1,)), Delta("", (2,)), Delta('lo "', (3, 4)), Delta("", (0,), (), STOP)]

# --- chat


def test_a_chat_stream_is_role_content_finish_and_done():
    chunks = events(stream(writer(CHAT, stream=True), TEXT))
    assert chunks.pop() == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": 'lo "'}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    head = {"id": "chatcmpl-id-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "llama"}
    for chunk in chunks:
        assert {name: chunk[name] for name in head} == head
        assert chunk.keys() == head.keys() | {"choices"}
        assert ChatCompletionChunk.model_validate(chunk, strict=True).choices[0].logprobs is None


def test_a_usage_chunk_has_no_choices():
    options = {"include_usage": True}
    made = writer(CHAT, stream=True, stream_options=options)
    *_, chunk, done = events(stream(made, TEXT, Usage(3, 5, cached_tokens=2)))
    assert done == "[DONE]"
    assert chunk["choices"] == []
    usage = ChatCompletionChunk.model_validate(chunk, strict=True).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert chunk["usage"].keys() == {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}


def test_each_choice_has_its_role_and_its_end():
    made = writer(CHAT, stream=True, n=2)
    data = made.piece(1, Delta("b", (1,))) + made.piece(0, Delta("a", (1,))) + made.piece(1, Delta("c", (), (), LENGTH))
    told = [(one["choices"][0]["index"], one["choices"][0]["delta"]) for one in events(data)]
    role = {"role": "assistant", "content": ""}
    assert told == [(1, role), (1, {"content": "b"}), (0, role), (0, {"content": "a"}), (1, {"content": "c"}), (1, {})]


def test_nothing_is_written_while_there_is_nothing_to_show():
    for path in (CHAT, COMPLETIONS):
        assert writer(path, stream=True).piece(0, Delta("", (1,))) == b""


def test_an_answer_without_text_still_has_role_and_finish():
    first, second = events(writer(CHAT, stream=True).piece(0, Delta("", (), (), LENGTH)))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert second["choices"][0]["finish_reason"] == "length"


def test_the_log_probabilities_of_a_chat():
    made = writer(CHAT, stream=True, logprobs=True, top_logprobs=1)
    _, chunk, half, _ = events(
        made.piece(0, Delta("a", (5,), (LIKELY,))) + made.piece(0, Delta("", (7,), (HALF,), STOP))
    )
    assert chunk["choices"][0]["logprobs"] == {
        "content": [
            {"token": "a", "logprob": -0.25, "bytes": [97],
             "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}]},
        ]
    }  # fmt: skip
    assert half["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xC3]
    assert half["choices"][0]["delta"] == {"content": ""}
    for one in (chunk, half):
        assert ChatCompletionChunk.model_validate(one, strict=True).choices[0].logprobs.content


def test_log_probabilities_that_the_engine_does_not_tell_are_null():
    unknown = TokenLogprob(5, "a", None)
    made = writer(CHAT, stream=True, logprobs=True)
    assert events(made.piece(0, Delta("a", (5,), (unknown,))))[1]["choices"][0]["logprobs"] is None
    mixed = events(made.piece(0, Delta("a", (5, 5), (unknown, LIKELY._replace(logprob=-math.inf)))))[0]
    assert [one["logprob"] for one in mixed["choices"][0]["logprobs"]["content"]] == [-9999.0, -9999.0]


def test_a_whole_chat():
    made = writer(CHAT, logprobs=True, n=2)
    body = json.loads(made.whole([Delta("a", (5,), (LIKELY,), STOP), Delta("", (), (), LENGTH)], USAGE))
    read = ChatCompletion.model_validate(body, strict=True)
    assert [choice.finish_reason for choice in read.choices] == ["stop", "length"]
    assert [choice.message.content for choice in read.choices] == ["a", ""]
    assert [choice.index for choice in read.choices] == [0, 1]
    assert read.choices[0].logprobs.content[0].top_logprobs == []
    assert read.usage.total_tokens == 5
    assert (body["id"], body["object"]) == ("chatcmpl-id-1", "chat.completion")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_text_is_a_stop_in_openais_words(path):
    whole = json.loads(writer(path).whole([Delta("a", (), (), STOP_STRING)], USAGE))
    assert whole["choices"][0]["finish_reason"] == "stop"
    last = events(writer(path, stream=True).piece(0, Delta("a", (), (), STOP_STRING)))[-1]
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids_where_they_are_wanted(path):
    made = writer(path, stream=True, return_token_ids=True)
    told = [one["choices"][0].get("token_ids") for one in events(made.piece(0, Delta("", (5, 6))))]
    assert told[-1] == [5, 6]
    whole = json.loads(writer(path, return_token_ids=True).whole([Delta("", (5, 6), (), STOP)], USAGE))
    assert whole["choices"][0]["token_ids"] == [5, 6]


# --- completions


def test_a_stream_of_completions():
    chunks = events(stream(writer(COMPLETIONS, stream=True, stream_options={"include_usage": True}), TEXT))
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)
    assert [one["choices"] for one in chunks] == [
        [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": 'lo "', "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
    ]
    for chunk in (*chunks, usage):
        assert (chunk["id"], chunk["object"]) == ("cmpl-id-1", "text_completion")
        assert Completion.model_construct(**chunk).model == "llama"


def test_log_probabilities_of_completions_are_parallel_lists():
    made = writer(COMPLETIONS, logprobs=1, stream=True)
    rest = HALF._replace(token_id=10, data=b"\xa9", top=())
    first, second = events(
        made.piece(0, Delta("a", (5, 7), (LIKELY, HALF))) + made.piece(0, Delta("éa", (10, 5), (rest, LIKELY), LENGTH))
    )
    assert first["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.25, -0.5],
        "tokens": ["a", "\ufffd"],
        "top_logprobs": [{"a": -0.25}, {"x": -0.1, "\ufffd": -0.5}],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [2, 2]


def test_a_whole_completion():
    made = writer(COMPLETIONS, logprobs=2)
    read = Completion.model_validate_json(
        made.whole([Delta("aa", (5, 5), (LIKELY, LIKELY), LENGTH)], USAGE), strict=True
    )
    assert read.choices[0].text == "aa"
    assert read.choices[0].logprobs.text_offset == [0, 1]
    assert read.choices[0].logprobs.top_logprobs == [{"a": -0.25, "b": -1.5}] * 2
    assert read.usage.completion_tokens == 2


def test_an_echo_is_a_chunk_before_the_answer_and_the_beginning_of_a_whole_one():
    prompt = Delta("hi", (1, 2), (TokenLogprob(1, "h", None, b"h"), TokenLogprob(2, "i", None, b"i")))
    made = writer(COMPLETIONS, echo=True, logprobs=0, stream=True)
    echoed, answer = events(made.prompt(0, prompt) + made.piece(0, Delta("a", (5,), (LIKELY,))))
    assert echoed["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}
    assert answer["choices"][0]["logprobs"]["text_offset"] == [2]
    made = writer(COMPLETIONS, echo=True, logprobs=0)
    made.prompt(0, prompt)
    [choice] = json.loads(made.whole([Delta("a", (5,), (LIKELY,), STOP)], USAGE))["choices"]
    assert choice["text"] == "hia"
    assert choice["logprobs"]["token_logprobs"] == [None, None, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["top_logprobs"] == [None, None, {"a": -0.25}]


# --- TGI


def test_a_tgi_stream_has_an_event_for_each_token_and_the_whole_text_in_the_last():
    made = writer("/generate_stream", "tgi")
    data = b"".join([made.piece(0, delta) for delta in TEXT]) + made.tail(USAGE)
    assert data.startswith(b'data:{"index":1,"token":{"id":1,"text":"Hel","logprob":null,"special":false}')
    told = events(data)
    assert [(one["index"], one["token"]["id"], one["token"]["text"], one["token"]["special"]) for one in told] == [
        (1, 1, "Hel", False), (2, 2, "", False), (3, 3, "", False), (4, 4, 'lo "', False), (5, 0, "", True),
    ]  # fmt: skip
    assert [one["generated_text"] for one in told] == [None] * 4 + ['Hello "']
    assert told[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 2,
        "seed": None,
        "input_length": 3,
    }
    for one in told:
        assert TextGenerationStreamOutput.parse_obj_as_instance(one).token.id == one["token"]["id"]
    assert made.tail_has_token


def test_tokens_of_tgi_have_their_alternatives():
    made = writer("/generate_stream", "tgi", parameters={"top_n_tokens": 2})
    [event] = events(made.piece(0, Delta("a", (5,), (LIKELY,))))
    assert event["token"]["logprob"] == -0.25
    assert [one["text"] for one in event["top_tokens"]] == ["a", "b"]
    assert TextGenerationStreamOutput.parse_obj_as_instance(event).top_tokens[1].id == 6


@pytest.mark.parametrize(
    ("reason", "word"), [(STOP, "eos_token"), (STOP_STRING, "stop_sequence"), (LENGTH, "length"), ("odd", "odd")]
)
def test_tgi_has_its_own_words_for_an_end(reason, word):
    made = writer("/generate_stream", "tgi")
    made.piece(0, Delta("a", (5,), (), reason))
    assert events(made.tail(None))[0]["details"]["finish_reason"] == word


def test_text_without_ids_is_an_event_too():
    made = writer("/generate_stream", "tgi")
    [event] = events(made.piece(0, Delta("ab")))
    assert (event["token"]["text"], event["token"]["id"]) == ("ab", None)


def test_a_whole_answer_of_tgi():
    answer = [Delta("aa", (5, 5), (LIKELY, LIKELY), LENGTH)]
    assert json.loads(writer("/generate", "tgi", inputs="hi").whole(answer, USAGE)) == {"generated_text": "aa"}
    assert json.loads(writer("/", "tgi").whole(answer, USAGE)) == [{"generated_text": "aa"}]
    told = json.loads(
        writer("/generate", "tgi", inputs="hi", parameters={"details": True, "seed": 5}).whole(answer, USAGE)
    )
    details = TextGenerationOutput.parse_obj_as_instance(told).details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 2, 5)
    assert [token.text for token in details.tokens] == ["a", "a"]
    assert "top_tokens" not in told["details"]
    more = writer("/generate", "tgi", inputs="hi", parameters={"details": True, "top_n_tokens": 1}).whole(answer, USAGE)
    assert [[one["id"] for one in top] for top in json.loads(more)["details"]["top_tokens"]] == [[5], [5]]


def test_the_full_text_of_tgi_begins_with_the_prompt():
    made = writer("/generate_stream", "tgi", parameters={"return_full_text": True})
    assert made.prompt(0, Delta("hi ")) == b""
    made.piece(0, Delta("a", (5,), (), STOP))
    assert events(made.tail(USAGE))[0]["generated_text"] == "hi a"
    made = writer("/", "tgi", parameters={"return_full_text": True})
    made.prompt(0, Delta("hi "))
    assert json.loads(made.whole([Delta("a", (), (), STOP)], USAGE)) == [{"generated_text": "hi a"}]


# --- vLLM


def test_documents_of_vllm_have_the_prompt_and_all_texts_so_far():
    made = writer("/generate", "vllm", prompt="hi", n=2, stream=True)
    assert made.prompt(0, Delta("hi ")) == made.prompt(1, Delta("hi ")) == b""
    data = made.piece(0, Delta("a")) + made.piece(1, Delta("b")) + made.piece(0, Delta("", (0,), (), STOP))
    assert data.split(b"\0") == [b'{"text":["hi a","hi "]}', b'{"text":["hi a","hi b"]}', b""]
    assert made.tail(USAGE) == b""


def test_a_whole_answer_of_vllm():
    made = writer("/generate", "vllm", prompt="hi", return_token_ids=True)
    made.prompt(0, Delta("hi "))
    assert json.loads(made.whole([Delta("a", (5,), (), STOP)], USAGE)) == {"text": ["hi a"], "token_ids": [[5]]}


def test_token_ids_of_vllm_streams():
    made = writer("/generate", "vllm", prompt=[1], stream=True, return_token_ids=True)
    assert [json.loads(made.piece(0, Delta("", ids))[:-1]) for ids in ((5,), (6, 7))] == [
        {"text": [""], "token_ids": [[5]]}, {"text": [""], "token_ids": [[5, 6, 7]]},
    ]  # fmt: skip


# --- all of them


@pytest.mark.parametrize(
    ("path", "api", "fields"),
    [
        (CHAT, "openai", {"stream": True}),
        (COMPLETIONS, "openai", {"stream": True}),
        (COMPLETIONS, "openai", {"stream": True, "logprobs": 1}),
        ("/generate_stream", "tgi", {}),
        ("/generate", "vllm", {"prompt": "hi", "stream": True}),
    ],
)
def test_the_family_takes_the_stream_for_a_whole_one_at_its_end_only(path, api, fields):
    made, family = writer(path, api, **fields), BY_NAME[api]
    opened = made.piece(0, Delta("a", (5,), (LIKELY,)))
    ended = made.piece(0, Delta("b", (0,), (), STOP)) + made.tail(USAGE)
    assert family.ends(ended)
    assert ended.endswith(family.ends_with)
    if api != "vllm":
        assert not family.ends(opened)
        assert not family.only_opens(opened)


@pytest.mark.parametrize("text", ["\ud83d", "é😀\u2028\0", '\\"/'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_any_text_can_be_written(path, text):
    data = writer(path, stream=True).piece(0, Delta(text, (5,)))
    choice = events(data)[-1]["choices"][0]
    shown = choice["delta"]["content"] if path == CHAT else choice["text"]
    assert shown == text.encode("utf-8", "replace").decode()


def test_apis_without_a_writer_are_told_which_ones_there_are():
    request = Request("id", "triton", "/v2/models/m/generate", "", (), b"{}", Ask(False, None, 1), 0.0, None)
    with pytest.raises(BadRequest, match="use OpenAI's, TGI's or vLLM's"):
        writer_of(request, generation_of_chat(), "m", 0)


def generation_of_chat():
    body = json.dumps(BODIES[CHAT]).encode()
    return generation_of(Request("id", "openai", CHAT, "", (), body, Ask(False, None, 1), 0.0, None))
