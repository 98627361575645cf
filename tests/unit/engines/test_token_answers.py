"""From requests to token ids, and from tokens to answers: text, stops, limits, usage, with and without a tokenizer."""

import json
import math

import pytest
from engine_world import request
from hypothesis import given
from hypothesis import strategies as st
from token_folders import library, write_folder

from coordinator.api.writers import TokenLogprob, Usage, writer_of
from coordinator.core.errors import BadRequest
from coordinator.engines.token_answers import IdLogprob, TokenAnswers
from coordinator.engines.token_prompts import read_token_request
from coordinator.tokens import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("model"), eos=[EOS]))


class Sink:
    """Implements as much of core.ports.Out as is used here."""

    def __init__(self):
        self.pieces, self.times, self.tail, self.body, self.tokens = [], [], None, None, []

    def piece(self, data, now_s, *, token=True):
        assert data
        assert self.tail is None
        self.pieces.append(data)
        self.times.append(now_s)
        self.tokens.append(token)

    def finish(self, data, now_s, *, token=True, after=b""):
        assert self.tail is None
        self.tail = data
        self.tokens.append(token)

    def whole(self, body, now_s, content_type=b"application/json"):
        assert not self.pieces
        self.body = json.loads(body)
        self.times.append(now_s)

    @property
    def chunks(self):
        lines = (b"".join(self.pieces) + (self.tail or b"")).decode().split("\n\n")
        data = [line.removeprefix("data:").strip() for line in lines if line]
        return [json.loads(one) for one in data if one != "[DONE]"]

    @property
    def text(self):
        """The text of answer 0."""
        choices = [one["choices"][0] for one in self.chunks if one["choices"] and not one["choices"][0]["index"]]
        return "".join([one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices])

    @property
    def finish_reasons(self):
        found = [
            (one["choices"][0]["index"], one["choices"][0]["finish_reason"]) for one in self.chunks if one["choices"]
        ]
        return {index: reason for index, reason in found if reason}


def asked(path=CHAT, api="openai", **fields):
    given_ = {"prompt": "hi"} if path != CHAT else {"messages": [{"role": "user", "content": "hi"}]}
    body = {} if api == "tgi" else given_
    stream = fields.get("stream", False) or path == "/generate_stream"
    return request(api=api, path=path, body=json.dumps({**body, **fields}).encode(), stream=stream)


async def begin(tokenizer, path=CHAT, api="openai", **fields):
    """(answers, sink) of a request."""
    given_ = asked(path, api, **fields)
    read = await read_token_request(given_, tokenizer)
    sink = Sink()
    return TokenAnswers(read, writer_of(given_, read.generation, "m", 0), sink), sink


def ids_of(text):
    return library("byte_level").encode(text, add_special_tokens=False).ids


# --- prompts


async def test_a_text_prompt_has_the_tokenizers_marks_and_a_chat_those_of_its_template(tokenizer):
    read = await read_token_request(asked(COMPLETIONS, prompt="hello"), tokenizer)
    assert read.prompt.ids == tuple(library("byte_level").encode("hello").ids)
    assert read.prompt.text == "hello"
    chat = await read_token_request(asked(), tokenizer)
    assert chat.prompt.text == "<s>[user] hi\n[assistant] "
    assert tokenizer.decode(chat.prompt.ids, skip_special=False) == chat.prompt.text
    assert chat.prompt.ids.count(0) == 1


async def test_marks_can_be_left_out(tokenizer):
    read = await read_token_request(asked(COMPLETIONS, prompt="hello", add_special_tokens=False), tokenizer)
    assert read.prompt.ids == tuple(ids_of("hello"))


async def test_token_ids_are_taken_as_they_are(tokenizer):
    ids = ids_of("hello")
    read = await read_token_request(asked(COMPLETIONS, prompt=ids), tokenizer)
    assert (read.prompt.ids, read.prompt.text) == (tuple(ids), "")
    echoed = await read_token_request(asked(COMPLETIONS, prompt=ids, echo=True), tokenizer)
    assert echoed.prompt.text == "hello"
    assert not read.generation.return_ids


async def test_token_ids_that_the_model_does_not_have(tokenizer):
    with pytest.raises(BadRequest, match=r"the prompt has a token id above \d+, the model's highest"):
        await read_token_request(asked(COMPLETIONS, prompt=[5, tokenizer.highest_id + 1]), tokenizer)


async def test_an_empty_prompt(tokenizer):
    with pytest.raises(BadRequest, match="the prompt is empty"):
        await read_token_request(asked(COMPLETIONS, prompt="", add_special_tokens=False), tokenizer)


@pytest.mark.parametrize(
    "given_",
    [
        asked(),
        asked(COMPLETIONS, prompt="hi"),
        asked("/generate", "vllm", prompt="hi"),
        asked("/generate_stream", "tgi", inputs="hi"),
    ],
    ids=["chat", "completions", "vllm", "tgi"],
)
async def test_without_a_tokenizer_text_is_refused_with_the_reason(given_):
    with pytest.raises(BadRequest, match=r"must be a list of token ids; .* the operator can set `cluster\.tokenizer`"):
        await read_token_request(given_, None)


# --- streams


async def test_a_stream_of_tokens(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, stream_options={"include_usage": True})
    ids = ids_of("hello 😀 world")
    for at, token in enumerate(ids):
        assert answers.tokens(0, [token], 10.0 + at) is False
    assert not answers.complete
    assert answers.tokens(0, [EOS], 50.0) is True
    assert answers.complete
    answers.end()
    assert sink.text == "hello 😀 world"
    assert sink.finish_reasons == {0: "stop"}
    assert sink.chunks[-1]["usage"]["completion_tokens"] == len(ids) + 1
    assert (answers.first_s, answers.last_s) == (10.0, 50.0)
    assert set(sink.times) <= {10.0 + at for at in range(len(ids))} | {50.0}
    assert sink.tail.endswith(b"data: [DONE]\n\n")
    assert sink.tokens[-1] is False


async def test_half_a_character_is_no_piece(tokenizer):
    answers, sink = await begin(tokenizer, stream=True)
    *first, last = ids_of("😀")[-4:]
    for token in first:
        answers.tokens(0, [token], 1.0)
    assert sink.pieces == []
    answers.tokens(0, [last], 2.0)
    assert "😀" in sink.text
    answers.tokens(0, first, 3.0)
    answers.tokens(0, [], 4.0, finish_reason="length")
    assert sink.text.endswith("\ufffd")


async def test_what_comes_after_the_end_is_ignored(tokenizer):
    answers, sink = await begin(tokenizer, stream=True)
    answers.tokens(0, ids_of("hello"), 1.0, finish_reason="length")
    assert answers.tokens(0, ids_of("more"), 2.0)
    assert answers.text(0, "more", [5], 2.0)
    answers.end()
    assert sink.text == "hello"
    assert answers.usage() == Usage(answers.usage().prompt_tokens, len(ids_of("hello")))


@given(data=st.data())
async def test_pieces_of_any_size_make_the_same_answer(tokenizer, data):
    stop = data.draw(st.sampled_from([[], ["wor"], ["o w", "zz"], ["hello world!"], ["d"], ["xyz"]]))
    include = data.draw(st.booleans())
    ids = ids_of("hello world 世界")
    text = "hello world 世界"
    answers, sink = await begin(tokenizer, stream=True, stop=stop or None, include_stop_str_in_output=include)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        if answers.tokens(0, ids[a:b], 1.0):
            break
    answers.tokens(0, [EOS], 1.0)
    found = [(text.index(one), one) for one in stop if one in text]
    expected = text[: min(found)[0]] + (min(found)[1] if include else "") if found else text
    assert sink.text == expected
    assert sink.finish_reasons == {0: "stop"}


async def test_a_stop_text_ends_the_answer_and_tells_the_engine(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, stop=["lo w"])
    flags = [answers.tokens(0, [token], 1.0) for token in ids_of("hello world")]
    assert flags.index(True) < len(flags)
    assert flags == sorted(flags)
    assert sink.text == "hel"


async def test_a_stop_text_of_tgi_is_shown_and_named(tokenizer):
    answers, sink = await begin(tokenizer, "/generate_stream", "tgi", inputs="hi", parameters={"stop": ["o"]})
    for token in ids_of("hello"):
        answers.tokens(0, [token], 1.0)
    answers.end()
    last = sink.chunks[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == ("hello", "stop_sequence")
    assert last["details"]["input_length"] == len(library("byte_level").encode("hi").ids)
    assert sink.tokens[-1] is True


@pytest.mark.parametrize(
    ("limit", "ids", "reason", "finish"),
    [
        (3, [40, 41, 42], None, "length"),
        (3, [40, 41, 42], "stop", "stop"),
        (3, [40, 41, EOS], None, "stop"),
        (3, [40, 41, 42, 43], "stop", "length"),
        (3, [40, EOS, 42, 43], None, "stop"),
        (3, [40, 41, 42, EOS], None, "length"),
    ],
)
async def test_the_last_allowed_token_ends_the_answer(tokenizer, limit, ids, reason, finish):
    answers, sink = await begin(tokenizer, stream=True, max_tokens=limit)
    assert answers.tokens(0, ids, 1.0, finish_reason=reason)
    assert sink.finish_reasons == {0: finish}
    assert answers.usage().completion_tokens == (ids.index(EOS) + 1 if finish == "stop" and EOS in ids else limit)


async def test_limits_hold_token_by_token(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, max_tokens=3)
    assert [answers.tokens(0, [token], 1.0) for token in (40, 41, 42, 43)] == [False, False, True, True]
    assert sink.finish_reasons == {0: "length"}


async def test_stop_tokens_have_no_text_unless_they_are_wanted(tokenizer):
    [stop] = [one for one in range(40, 100) if tokenizer.token_text(one) == "h"]
    for include, text in ((False, "e"), (True, "eh")):
        answers, sink = await begin(tokenizer, stream=True, stop_token_ids=[stop], include_stop_str_in_output=include)
        assert answers.tokens(0, [*ids_of("e"), stop], 1.0)
        assert sink.text == text
        assert sink.finish_reasons == {0: "stop"}


async def test_the_models_own_end_can_be_ignored_and_special_tokens_shown(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, ignore_eos=True)
    assert answers.tokens(0, [*ids_of("a"), EOS, *ids_of("b")], 1.0) is False
    assert sink.text == "ab"
    answers, sink = await begin(tokenizer, stream=True, ignore_eos=True, skip_special_tokens=False)
    answers.tokens(0, [*ids_of("a"), EOS, *ids_of("b")], 1.0)
    assert sink.text == "a</s>b"


async def test_several_answers_end_each_on_its_own(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, n=2)
    answers.tokens(1, ids_of("one"), 1.0)
    answers.tokens(0, [*ids_of("two"), EOS], 1.0)
    assert not answers.complete
    with pytest.raises(ValueError, match="an answer has no end"):
        answers.end()
    assert sink.tail is None
    answers.tokens(1, [], 2.0, finish_reason="length")
    answers.end()
    assert sink.finish_reasons == {0: "stop", 1: "length"}
    assert answers.usage().completion_tokens == len(ids_of("one")) + len(ids_of("two")) + 1


@pytest.mark.parametrize("index", [-1, 1])
async def test_answers_that_were_not_asked_for(tokenizer, index):
    answers, _ = await begin(tokenizer)
    for take in (lambda: answers.tokens(index, [5], 1.0), lambda: answers.text(index, "x", [5], 1.0)):
        with pytest.raises(ValueError, match="was not asked for"):
            take()


async def test_the_engines_own_figures_are_told(tokenizer):
    answers, sink = await begin(tokenizer)
    answers.tokens(0, [EOS], 1.0)
    answers.end(answers.usage(cached_tokens=7))
    assert sink.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    answers, sink = await begin(tokenizer)
    answers.tokens(0, [EOS], 1.0)
    answers.end(Usage(100, 200))
    assert sink.body["usage"]["total_tokens"] == 300


# --- log probabilities, echo


async def test_log_probabilities_have_texts(tokenizer):
    answers, sink = await begin(tokenizer, logprobs=True, top_logprobs=2)
    [token], [other] = ids_of("h"), ids_of("e")
    answers.tokens(0, [token], 1.0, logprobs=[IdLogprob(token, -0.5, [(token, -0.5), (other, -1.0)])])
    answers.tokens(0, [EOS], 1.0)
    answers.end()
    first, last = sink.body["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("h", [104], -0.5)
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [("h", -0.5), ("e", -1.0)]
    assert last["token"] == "</s>"


async def test_log_probabilities_that_nobody_asked_for_are_dropped(tokenizer):
    answers, sink = await begin(tokenizer)
    answers.tokens(0, [*ids_of("h"), EOS], 1.0, logprobs=[IdLogprob(5, -0.5), IdLogprob(6, -0.5)])
    answers.end()
    assert sink.body["choices"][0]["logprobs"] is None


async def test_an_echo(tokenizer):
    answers, sink = await begin(tokenizer, COMPLETIONS, prompt="hello", echo=True, stream=True)
    answers.tokens(0, [*ids_of(" world"), EOS], 1.0)
    answers.end()
    assert sink.text == "hello world"
    answers, sink = await begin(tokenizer, COMPLETIONS, prompt="hello", echo=True, logprobs=0, n=2)
    for index in range(2):
        answers.tokens(index, [*ids_of(" world"), EOS], 1.0)
    answers.end()
    assert [one["text"] for one in sink.body["choices"]] == ["hello world"] * 2


async def test_vllm_tells_prompt_and_answer(tokenizer):
    answers, sink = await begin(tokenizer, "/generate", "vllm", prompt=ids_of("hello"))
    answers.tokens(0, [*ids_of(" world"), EOS], 1.0)
    answers.end()
    assert sink.body == {"text": ["hello world"]}


# --- engines that make text


async def test_text_of_the_engine_goes_on_as_it_is(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, logprobs=True)
    told = TokenLogprob(5, "he", -0.5)
    assert not answers.text(0, "he", [5], 1.0, logprobs=[told])
    assert not answers.text(0, "", [6], 2.0)
    assert answers.text(0, "llo", [7, EOS], 3.0, finish_reason="stop")
    answers.end()
    assert sink.text == "hello"
    assert answers.usage().completion_tokens == 4
    assert sink.chunks[1]["choices"][0]["logprobs"]["content"][0]["token"] == "he"


async def test_stop_texts_and_limits_hold_there_too(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, stop=["STOP"])
    assert not answers.text(0, "one ST", [5], 1.0)
    assert sink.text == "one "
    assert answers.text(0, "OP two", [6], 1.0)
    assert (sink.text, sink.finish_reasons) == ("one ", {0: "stop"})
    answers, sink = await begin(tokenizer, max_tokens=2)
    assert not answers.text(0, "a", [5], 1.0)
    assert answers.text(0, "b", [6], 1.0)
    answers.end()
    assert sink.body["choices"][0]["finish_reason"] == "length"


async def test_what_was_held_back_is_told_at_the_end(tokenizer):
    answers, sink = await begin(tokenizer, stream=True, stop=["STOP"])
    answers.text(0, "one ST", [5], 1.0)
    answers.text(0, "", [], 1.0, finish_reason="length")
    assert sink.text == "one ST"


# --- without a tokenizer


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_in_ids_out(stream):
    answers, sink = await begin(None, COMPLETIONS, prompt=[1, 2, 3], stream=stream, max_tokens=3)
    flags = [answers.tokens(0, [token], 1.0) for token in (7, 0, 9)]
    assert flags == [False, False, True]
    answers.end()
    choices = [one["choices"][0] for one in sink.chunks] if stream else sink.body["choices"]
    assert [token for one in choices for token in one["token_ids"]] == [7, 0, 9]
    assert {one["text"] for one in choices} == {""}
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert sink.body["usage"]["prompt_tokens"] == 3


async def test_stop_tokens_end_an_answer_without_a_tokenizer():
    answers, sink = await begin(None, COMPLETIONS, prompt=[1], stop_token_ids=[9])
    assert answers.tokens(0, [8, 9, 10], 1.0)
    answers.end()
    assert sink.body["choices"][0]["token_ids"] == [8, 9]
    assert sink.body["choices"][0]["finish_reason"] == "stop"


async def test_tgi_and_vllm_tell_ids_too():
    answers, sink = await begin(None, "/generate_stream", "tgi", inputs=[1, 2])
    answers.tokens(0, [7], 1.0)
    answers.tokens(0, [8], 2.0, finish_reason="stop")
    answers.end()
    assert [one["token"]["id"] for one in sink.chunks] == [7, 8]
    assert sink.chunks[-1]["generated_text"] == ""
    answers, sink = await begin(None, "/generate", "vllm", prompt=[1, 2])
    answers.tokens(0, [7, 8], 1.0, finish_reason="stop")
    answers.end()
    assert sink.body == {"text": [""], "token_ids": [[7, 8]]}


async def test_log_probabilities_without_a_tokenizer_name_the_ids():
    answers, sink = await begin(None, COMPLETIONS, prompt=[1], logprobs=1)
    answers.tokens(0, [7], 1.0, logprobs=[IdLogprob(7, -0.5, [(8, -0.25)])], finish_reason="stop")
    answers.end()
    told = sink.body["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:7"]
    assert told["top_logprobs"] == [{"token_id:8": -0.25, "token_id:7": -0.5}]


async def test_before_the_first_token_there_is_no_time():
    answers, _ = await begin(None, COMPLETIONS, prompt=[1])
    assert math.isnan(answers.first_s)
    assert math.isnan(answers.last_s)
