"""Answers of a vLLM pair."""

import json

import pytest

from coordinator.wire.vllm_answers import EngineSaid, check_answer, read_prefill

RECORD = b'{"remote_block_ids":[[1,2],[3,[4,null]]],"big":1234567890123456789, "nothing":null,"f":1.50}'
ANSWER = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}


def answer(**values):
    return read_prefill(json.dumps({**ANSWER, **values}).encode())


def test_the_record_is_read_as_it_is():
    body = b'{"choices":[],"kv_transfer_params":' + RECORD + b"}"
    assert bytes(read_prefill(body).params) == RECORD


@pytest.mark.parametrize("record", [None, {}, [], "x", 7])
def test_a_record_without_content_is_none(record):
    assert answer(kv_transfer_params=record).params is None
    assert answer().params is None


def test_an_answer_that_ended():
    choice = {"index": 0, "text": "", "finish_reason": "stop"}
    assert answer(choices=[choice], kv_transfer_params={}).ended
    assert not answer().ended


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (None, None),
        ({"prompt_tokens": 5}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, b"0"),
        ({"prompt_tokens_details": {"cached_tokens": 96}}, b"96"),
    ],
)
def test_cached_tokens(usage, cached):
    found = answer(usage=usage).cached_tokens
    assert (found if found is None else bytes(found)) == cached


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"{cut", b'{"choices":null}', b"\xff", b"[" * 100_000])
def test_what_is_no_answer(body):
    with pytest.raises(ValueError, match="answer"):
        read_prefill(body)


@pytest.mark.parametrize("read", [read_prefill, check_answer])
def test_a_200_that_is_an_error(read):
    with pytest.raises(EngineSaid, match="no room"):
        read(b'{"error":{"message":"no room"}}')
    assert read(b'{"error":null,"choices":[{}]}') is None or read is read_prefill


@pytest.mark.parametrize("body", [b"", b'{"choices":[{"te', b"[]"])
def test_a_cut_answer_of_decode(body):
    with pytest.raises(ValueError, match="no JSON object"):
        check_answer(body)
