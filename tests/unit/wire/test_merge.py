import json

import pytest
from msgspec import Raw

from coordinator.wire.merge import one_answer, with_prefill
from coordinator.wire.vllm_answers import NOTHING_PREFILLED, Prefilled

DECODED = {
    "id": "d",
    "choices": [{"index": 0, "text": "ab", "prompt_logprobs": None, "logprobs": {"tokens": ["a", "b"]}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
}


def merged(prefilled, **changes):
    return json.loads(with_prefill(json.dumps({**DECODED, **changes}).encode(), prefilled))


def test_the_same_bytes_where_prefill_adds_nothing():
    body = b'{ "not": "even looked at"'
    assert with_prefill(body, NOTHING_PREFILLED) is body


@pytest.mark.parametrize("details", [None, {"cached_tokens": 8, "audio_tokens": 1}])
def test_cached_tokens_are_prefills(details):
    usage = {**DECODED["usage"], "prompt_tokens_details": details}
    found = merged(Prefilled(cached_tokens=Raw(b"3")), usage=usage)
    assert found["usage"] == {**DECODED["usage"], "prompt_tokens_details": {**(details or {}), "cached_tokens": 3}}
    assert {**found, "usage": 0} == {**DECODED, "usage": 0}


def test_an_answer_without_usage_gets_none():
    assert merged(Prefilled(cached_tokens=Raw(b"3")), usage=None)["usage"] is None


def test_prompt_logprobs_are_prefills_and_output_logprobs_are_decodes():
    chat = merged(Prefilled(prompt_logprobs=(Raw(b"[null,{}]"), None)), prompt_logprobs=None)
    assert chat["prompt_logprobs"] == [None, {}]
    text = merged(Prefilled(prompt_logprobs=(None, Raw(b"[null,{}]"))))
    assert text["choices"] == [{**DECODED["choices"][0], "prompt_logprobs": [None, {}]}]


def test_a_batch_becomes_one_answer():
    bodies = [
        {"id": i, "choices": [{"index": 0, "text": i}], "usage": {"prompt_tokens": n, "total_tokens": n + 1, "d": d}}
        for i, n, d in (("x", 10, {"cached_tokens": 4}), ("y", 20, None), ("z", 30, {"cached_tokens": 5, "t": 1.5}))
    ]
    found = json.loads(one_answer([json.dumps(body).encode() for body in bodies]))
    assert found["id"] == "x"
    assert found["choices"] == [{"index": 0, "text": "x"}, {"index": 1, "text": "y"}, {"index": 2, "text": "z"}]
    assert found["usage"] == {"prompt_tokens": 60, "total_tokens": 63, "d": {"cached_tokens": 9, "t": 1.5}}


def test_a_batch_without_usage():
    assert json.loads(one_answer([b'{"choices":[{}]}', b'{"choices":[{}],"usage":null}'])) == {
        "choices": [{"index": 0}, {"index": 1}]
    }


@pytest.mark.parametrize("odd", [b'{"choices":[]}', b"{}", b"[]", b'{"choices":[7]}'])
def test_a_batch_with_an_odd_answer(odd):
    with pytest.raises(ValueError, match=r"choice|object"):
        one_answer([b'{"choices":[{}]}', odd])
