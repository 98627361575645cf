"""What SGLang engines answer: failures behind a 200, and what only prefill knows."""

import json

import pytest

from coordinator.wire.sglang_answers import (
    MAX_HELD_BYTES,
    LogprobsEditor,
    blames_peer,
    bootstrap_port,
    cached_tokens,
    failure_in,
    prompt_logprobs,
    with_logprobs,
)


def event(value):
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def answer(text, *, index=None, **meta):
    value = {"text": text, "meta_info": {"id": "r", "finish_reason": None, **meta}}
    return value if index is None else {**value, "index": index}


# --- failures behind a 200


@pytest.mark.parametrize(
    ("body", "stream", "code", "message"),
    [
        (event({"error": {"message": "too long", "code": 400}}) + DONE, True, 400, "too long"),
        (event(answer("a")) + event({"error": {"message": "gone"}}) + DONE, True, 0, "gone"),
        (b'data: {"object":"error","message":"old style","code":422}\n\n', True, 422, "old style"),
        (event(answer("a", finish_reason={"type": "abort", "message": "Aborted by AbortReq."})), True, 0, "AbortReq"),
        (event({"choices": [{"delta": {}, "finish_reason": "abort"}]}) + DONE, True, 0, "abort"),
        (b'{"error":{"message":"no room"}}', False, 0, "no room"),
        (b' {"object" : "error" , "message":"old style"}', False, 0, "old style"),
        (json.dumps({"choices": [{"finish_reason": "abort"}]}).encode(), False, 0, "abort"),
    ],
)
def test_a_failure_behind_a_200_is_seen(body, stream, code, message):
    found = failure_in(body, stream=stream)
    assert found.code == code
    assert message in found.message


@pytest.mark.parametrize(
    ("body", "stream"),
    [
        (event(answer("a", finish_reason={"type": "length", "length": 1})) + DONE, True),
        (event(answer('data: {"error":{"message":"x"}}')) + DONE, True),
        (event(answer('"finish_reason":"abort"')) + DONE, True),
        (event({"error": None, "choices": []}), True),
        (json.dumps(answer('{"error":{"message":"x"}}')).encode(), False),
        (b'{"error":null,"choices":[]}', False),
        (b"{}", False),
    ],
)
def test_an_answer_is_no_failure(body, stream):
    assert failure_in(body, stream=stream) is None


@pytest.mark.parametrize(
    ("message", "blames"),
    [
        ("Aborted by AbortReq.", True),
        ("status 500: KVTransferError(bootstrap_room=7): Request timed out after 300s in KVPoll.Bootstrapping", True),
        ("Failed to get kvcache from prefill instance, it might be dead", True),
        ("Decode instance could be dead, remote session is not alive", True),
        ("The input is too long", False),
        ("out of memory", False),
        ("", False),
    ],
)
def test_who_blames_the_other_side(message, blames):
    assert blames_peer(message) is blames


# --- logprobs

PROMPT = [[-0.25, 11, None], [-1.5e-7, 9007199254740993, "é"]]


def test_the_prompts_logprobs_come_from_prefill_byte_for_byte():
    prefill = (
        b'{"text":"","meta_info":{"input_token_logprobs": [ [-0.250,11,null],[-1.5e-7,9007199254740993,"\\u00e9"] ],'
        b'"input_top_logprobs":[[]],"output_token_logprobs":[[-9,1,null]]}}'
    )
    decode = b'{"text": "ab","meta_info":{"id": "d","output_token_logprobs":[[-2,1,null],[-3,2,null]]},"x":1e-9}'
    told = prompt_logprobs(prefill, stream=False)
    merged = with_logprobs(decode, told)
    assert b'[ [-0.250,11,null],[-1.5e-7,9007199254740993,"\\u00e9"] ]' in merged
    assert b'"x":1e-9' in merged
    assert json.loads(merged)["meta_info"] == {
        "id": "d",
        "output_token_logprobs": [[-2, 1, None], [-3, 2, None]],
        "input_token_logprobs": [[-0.25, 11, None], [-1.5e-07, 9007199254740993, "é"]],
        "input_top_logprobs": [[]],
    }


@pytest.mark.parametrize("has", [None, [], "absent"])
def test_empty_ones_of_decode_are_replaced_and_others_stay(has):
    own = {} if has == "absent" else {"input_token_logprobs": has}
    told = prompt_logprobs(json.dumps(answer("", input_token_logprobs=PROMPT)).encode(), stream=False)
    merged = json.loads(with_logprobs(json.dumps(answer("a", **own)).encode(), told))
    assert merged["meta_info"]["input_token_logprobs"] == PROMPT
    kept = json.dumps(answer("a", input_token_logprobs=[[1, 2, None]])).encode()
    assert json.loads(with_logprobs(kept, told)) == json.loads(kept)


def test_a_batch_is_joined_in_order():
    prefill = json.dumps([answer("", input_token_logprobs=[[-at, at, None]]) for at in (1, 2)]).encode()
    told = prompt_logprobs(prefill, stream=False)
    decode = json.dumps([answer("a"), answer("b"), answer("c")]).encode()
    merged = json.loads(with_logprobs(decode, told))
    assert [one["meta_info"].get("input_token_logprobs") for one in merged] == [[[-1, 1, None]], [[-2, 2, None]], None]
    assert [one["text"] for one in merged] == ["a", "b", "c"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[{]", b"7", b"[]", b'{"meta_info":7}', b'{"text":"a"}'])
def test_what_cannot_be_read_stays_as_it_is(body):
    told = prompt_logprobs(json.dumps(answer("", input_token_logprobs=PROMPT)).encode(), stream=False)
    assert with_logprobs(body, told).replace(b" ", b"") == body
    assert prompt_logprobs(body, stream=False) == {}
    assert prompt_logprobs(body, stream=True) == {}


def test_nothing_told_changes_nothing():
    body = json.dumps(answer("a", input_token_logprobs=[]), indent=3).encode()
    assert with_logprobs(body, prompt_logprobs(body, stream=False)) is body


def stream_of(*texts, index=None):
    return b": ping\n\n" + b"".join(event(answer(text, index=index)) for text in texts) + DONE


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_events_are_joined_wherever_they_are_cut(size):
    prefill = event(answer("", input_token_logprobs=PROMPT)) + event(answer("", input_token_logprobs=[[1, 1, 1]]))
    told = prompt_logprobs(prefill + DONE, stream=True)
    assert list(told) == [0]
    editor = LogprobsEditor(told)
    data = stream_of("你", "你好🌍")
    out = b"".join(editor.feed(data[at : at + size]) for at in range(0, len(data), size)) + editor.rest()
    lines = [line for line in out.split(b"\n\n") if line]
    assert lines[0] == b": ping"
    assert lines[-1] == b"data: [DONE]"
    values = [json.loads(line.removeprefix(b"data: ")) for line in lines[1:-1]]
    assert [value["text"] for value in values] == ["你", "你好🌍"]
    assert all(value["meta_info"]["input_token_logprobs"] == PROMPT for value in values)
    assert out.endswith(b"\n\n")


def test_events_of_a_batch_get_their_own_prompts():
    prefill = event(answer("", index=1, input_token_logprobs=[[-1, 1, None]])) + event(
        answer("", index=0, input_token_logprobs=[[-2, 2, None]])
    )
    editor = LogprobsEditor(prompt_logprobs(prefill, stream=True))
    out = editor.feed(event(answer("a", index=1)) + event(answer("b", index=0)) + event(answer("c", index=2)))
    values = [json.loads(line.removeprefix(b"data: ")) for line in out.split(b"\n\n") if line]
    assert [value["meta_info"].get("input_token_logprobs") for value in values] == [
        [[-1, 1, None]],
        [[-2, 2, None]],
        None,
    ]


def test_a_line_without_end_is_not_held_for_ever():
    editor = LogprobsEditor({})
    assert editor.feed(b"data: " + b"x" * 100) == b""
    assert len(editor.feed(b"x" * MAX_HELD_BYTES)) == MAX_HELD_BYTES + 106
    assert editor.rest() == b""
    assert editor.feed(b'data: {"meta_info":broken}\n') == b'data: {"meta_info":broken}\n'


# --- usage and ports


@pytest.mark.parametrize(
    ("body", "stream", "told"),
    [
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens": 7}}}', False, b"7"),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}', False, None),
        (b'{"usage":{"prompt_tokens_details":null},"x":"\\"cached_tokens\\""}', False, None),
        (b'{"usage":{"prompt_tokens":9}}', False, None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens"', False, None),
        (b'{"x":"cached_tokens","cached_tokens":3}', False, None),
        (
            event({"choices": [1]})
            + event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 5}}})
            + DONE,
            True,
            b"5",
        ),
        (event({"choices": [], "usage": {"prompt_tokens": 3}}) + DONE, True, None),
    ],
)
def test_cached_tokens(body, stream, told):
    found = cached_tokens(body, stream=stream)
    assert (None if found is None else bytes(found)) == told


@pytest.mark.parametrize(
    ("body", "port"),
    [
        (b'{"tp_size":8,"disaggregation_bootstrap_port":9001,"internal_states":[{}]}', 9001),
        (b'{"disaggregation_bootstrap_port":0}', None),
        (b'{"disaggregation_bootstrap_port":70000}', None),
        (b'{"disaggregation_bootstrap_port":"8998"}', None),
        (b'{"disaggregation_bootstrap_port":null}', None),
        (b"{}", None),
        (b"[]", None),
        (b"<html>", None),
    ],
)
def test_bootstrap_port(body, port):
    assert bootstrap_port(body) == port
