"""Streams that are edited on their way: split at every byte they come out the same."""

import json

import pytest

from coordinator.wire import completion_stream
from coordinator.wire.chat_shape import ChatEditor, chat_logprobs, last_chunk, whole_answer
from coordinator.wire.completion_stream import (
    Before,
    CompletionEditor,
    EventCutter,
    Reading,
    event_start,
    payload,
    split_events,
)

WIRE, CLIENT = "12345", "cmpl-abc"
LOGPROBS = {"text_offset": [4], "token_logprobs": [-0.5], "tokens": ['"}{x'], "top_logprobs": [{"a}": -1.0}]}


def event(text="", finish=None, *, logprobs=None, usage=None, choices=None, end="\n\n"):
    made = [{"finish_reason": finish, "index": 0, "logprobs": logprobs, "text": text}] if choices is None else choices
    shape = {"id": WIRE, "choices": made, "created": 1, "model": "m", "object": "text_completion", "usage": usage}
    return f"data: {json.dumps(shape)}{end}".encode()


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "extra": {"ttft_s": 1}}
STREAM = (
    event("one") + b": a comment\n\n" + event(' "two"\\', logprobs=LOGPROBS) + event("\u4f60\n", "stop")
    + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
)  # fmt: skip


def edited(parts, editor):
    cutter = EventCutter()
    said = b"".join(editor.feed(whole) for whole in map(cutter.feed, parts) if whole)
    rest = cutter.rest()
    return said + (editor.feed(rest) if rest else b"")


def reading(**more):
    return Reading(WIRE, CLIENT, **more)


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_split_at_every_byte_and_in_two_places(end):
    stream = STREAM.replace(b"\n\n", end.encode())
    wanted = edited([stream], CompletionEditor(reading()))
    assert wanted.count(b"data:") == 5
    for at in range(len(stream) + 1):
        editor = CompletionEditor(reading())
        assert edited([stream[:at], stream[at:]], editor) == wanted
        assert editor.text == 'one "two"\\\u4f60\n'
    assert edited([stream[at : at + 1] for at in range(len(stream))], CompletionEditor(reading())) == wanted
    for size in (2, 3, 5, 64):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert edited(pieces, CompletionEditor(reading())) == wanted


def test_a_plain_event_keeps_its_bytes_but_for_the_id():
    came = event(' "quoted" \\u1234', logprobs=LOGPROBS)
    assert CompletionEditor(reading()).feed(came) == came.replace(WIRE.encode(), CLIENT.encode())


def test_extra_is_taken_out_and_nothing_else():
    said = CompletionEditor(reading()).feed(event(choices=[], usage=USAGE))
    assert json.loads(payload(said))["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    text = event("extra") + event('"extra"')
    assert [
        json.loads(payload(one)) | {"id": WIRE} for one in split_events(CompletionEditor(reading()).feed(text))
    ] == [json.loads(payload(one)) for one in split_events(text)]


def test_what_is_hidden_was_counted():
    editor = CompletionEditor(reading(hide=True))
    said = editor.feed(event("x", logprobs=LOGPROBS) + event("y", logprobs={**LOGPROBS, "token_logprobs": [-1, None]}))
    assert editor.tokens == 3
    assert [json.loads(payload(one))["choices"][0]["logprobs"] for one in split_events(said)] == [None, None]
    assert [json.loads(payload(one))["choices"][0]["text"] for one in split_events(said)] == ["x", "y"]


def test_preempt_ends_it_in_the_middle_of_a_read():
    editor = CompletionEditor(reading())
    said = editor.feed(
        event("a") + event(" preempt") + event('"preempt"') + event("\ufffd", "preempt") + event(choices=[], usage={})
    )
    assert editor.preempted
    assert editor.text == 'a preempt"preempt"'
    assert said.count(b"data:") == 3


def test_preempt_as_the_first_event():
    editor = CompletionEditor(reading())
    assert editor.feed(event("", "preempt") + b"data: [DONE]\n\n") == b""
    assert editor.preempted
    assert editor.text == ""


def test_an_echo_is_no_generated_text():
    editor = CompletionEditor(reading(echo=True))
    editor.feed(event("the prompt"))
    assert editor.text == ""
    assert editor.prompted
    editor.feed(event(" said") + event(" more"))
    assert editor.text == " said more"


@pytest.mark.parametrize(
    ("before", "counts"),
    [
        (Before(5, 2, 7), (7, 4, 11)),
        (Before(5, 2, None), (7, 4, 11)),
        (Before(5, None, 7), (7, 4, 11)),
        (Before(5, 0, 9), (9, 2, 11)),
    ],
)
def test_usage_of_the_whole_answer(before, counts):
    said = CompletionEditor(reading(before=before)).feed(event(choices=[], usage=USAGE))
    usage = json.loads(payload(said))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == counts
    assert "extra" not in usage


def test_offsets_go_on_where_the_text_does():
    said = CompletionEditor(reading(before=Before(10, 3, 7))).feed(event("x", logprobs=LOGPROBS) + event("y"))
    first, second = (json.loads(payload(one))["choices"][0] for one in split_events(said))
    assert first["logprobs"]["text_offset"] == [14]
    assert first["logprobs"]["tokens"] == LOGPROBS["tokens"]
    assert second["logprobs"] is None


def test_an_event_is_bounded(monkeypatch):
    monkeypatch.setattr(completion_stream, "MAX_EVENT_BYTES", 100)
    cutter = EventCutter()
    assert cutter.feed(b"data: " + b"x" * 50) == b""
    with pytest.raises(ValueError, match="too long"):
        cutter.feed(b"x" * 100)


def test_a_large_event_in_many_reads_is_fast_and_whole():
    cutter = EventCutter()
    big = event("x" * 3_000_000)
    parts = [big[at : at + 65536] for at in range(0, len(big), 65536)]
    assert b"".join(map(cutter.feed, parts)) == big


def test_payloads():
    assert payload(b"data: {}\n\n") == b"{}"
    assert payload(b'data: {"a":\ndata: 1}\n\n') == b'{"a":\n1}'
    assert payload(b"data: [DONE]\n\n") is None
    assert payload(b": {}\n\n") is None
    assert event_start(b"a\n\nb\r\n\r\ncde", 9) == 8


# --- chat


def test_chat_chunks_split_at_every_byte():
    wanted = edited([STREAM], ChatEditor(reading(), greeted=False))
    chunks = [json.loads(found) for found in map(payload, split_events(wanted)) if found]
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
        {"role": "assistant", "content": "one"}, {"content": ' "two"\\'}, {"content": "\u4f60\n"}
    ]  # fmt: skip
    assert chunks[2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[3]["choices"] == []
    assert wanted.endswith(b"data: [DONE]\n\n")
    for at in range(len(STREAM) + 1):
        assert edited([STREAM[:at], STREAM[at:]], ChatEditor(reading(), greeted=False)) == wanted


def test_who_was_greeted_is_not_greeted_again():
    said = ChatEditor(reading(), greeted=True).feed(event("x") + event("", "length"))
    deltas = [json.loads(payload(one))["choices"][0]["delta"] for one in split_events(said)]
    assert deltas == [{"content": "x"}, {}]


def test_log_probabilities_in_the_shape_of_chat():
    from msgspec import Raw

    made = json.loads(bytes(chat_logprobs(Raw(json.dumps(LOGPROBS).encode()))))
    [entry] = made["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ('"}{x', -0.5, list(b'"}{x'))
    assert entry["top_logprobs"] == [{"token": "a}", "logprob": -1.0, "bytes": [97, 125]}]
    assert bytes(chat_logprobs(None)) == b"null"
    assert bytes(chat_logprobs(Raw(b"[1]"))) == b"null"


def test_whole_answers():
    body = json.loads(payload(event("hi", "stop", usage=USAGE)))
    answer, preempted = whole_answer(json.dumps(body).encode(), reading(), chat=False)
    assert not preempted
    assert json.loads(answer) == {**body, "id": CLIENT, "usage": {k: v for k, v in USAGE.items() if k != "extra"}}
    chat, _ = whole_answer(json.dumps(body).encode(), reading(), chat=True)
    assert json.loads(chat)["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert json.loads(chat)["object"] == "chat.completion"
    body["choices"][0]["finish_reason"] = "preempt"
    assert whole_answer(json.dumps(body).encode(), reading(), chat=False) == (b"", True)


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"choices": []}', b'{"choices": [1]}', b"x"])
def test_what_is_no_answer(body):
    with pytest.raises(ValueError, match=r"choices|JSON"):
        whole_answer(body, reading(), chat=False)


@pytest.mark.parametrize("chat", [True, False])
def test_the_end_of_an_answer_whose_tokens_are_all_there(chat):
    made = last_chunk(CLIENT, "m", suffix=" fin", counts=(3, 4), chat=chat, created_s=1)
    first, second = (json.loads(payload(one)) for one in split_events(made))
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["choices"][0].get("text") == (None if chat else " fin")
    assert second["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert len(list(split_events(last_chunk(CLIENT, None, suffix="", counts=None, chat=chat, created_s=1)))) == 1
