import json

import pytest
from msgspec import Raw

from coordinator.wire.json_edit import read_fields
from coordinator.wire.vllm import (
    Way,
    decode_body,
    prefill_body,
    prompts_of,
    release_body,
    way_of,
)

HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RECORD = b'{"remote_block_ids":[[1,2],[3,[4,null]]],"big":1234567890123456789, "nothing":null,"f":1.50}'


def fields(**values):
    return read_fields(json.dumps(values).encode())


def prefilled(**values):
    sent = json.loads(prefill_body(fields(model="m", **values)))
    assert sent.pop("model") == "m"
    assert sent.pop("kv_transfer_params") == HOLD
    return sent


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 64}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_completion_tokens": 64}, {"max_completion_tokens": 1}),
        ({"max_tokens": 64, "max_completion_tokens": 32}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": None, "max_completion_tokens": 1}),
        ({"max_output_tokens": 9}, {"max_output_tokens": 1, "max_tokens": 1}),
        ({"min_tokens": 10}, {"min_tokens": 1, "max_tokens": 1}),
        ({"min_tokens": 0}, {"min_tokens": 0, "max_tokens": 1}),
        ({"min_tokens": "odd"}, {"min_tokens": "odd", "max_tokens": 1}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": False, "max_tokens": 1}),
        ({"tools": [{}], "logprobs": True}, {"tools": [{}], "logprobs": True, "max_tokens": 1}),
    ],
)
def test_prefill_is_asked_for_one_token(given, sent):
    assert prefilled(**given) == sent


def test_values_on_prefill_are_the_clients_bytes():
    body = b'{"seed":9007199254740993,"top_p":1e-9,"x_vendor":{"a":null,"b":[1,{"c":"\xc3\xa9"}]},"max_tokens":5}'
    sent = prefill_body(read_fields(body))
    assert sent.startswith(b'{"seed":9007199254740993,"top_p":1e-9,"x_vendor":{"a":null,"b":[1,{"c":"\xc3\xa9"}]},')


def test_decode_gets_the_clients_body_and_the_record_as_it_is():
    body = b'{"stream":true,"max_tokens":5,"seed":9007199254740993}'
    assert decode_body(read_fields(body), Raw(RECORD)) == body[:-1] + b',"kv_transfer_params":' + RECORD + b"}"
    assert decode_body(read_fields(body), None) == body


def test_a_clients_own_record_reaches_no_engine():
    given = fields(prompt="p", kv_transfer_params={"remote_host": "evil"})
    assert b"evil" not in prefill_body(given)
    assert b"kv_transfer_params" not in decode_body(given, None)
    assert json.loads(decode_body(given, Raw(b'{"mine":1}')))["kv_transfer_params"] == {"mine": 1}


def test_a_release_is_one_token_with_the_record():
    given = fields(prompt="p", max_tokens=7, stream_options={}, prompt_logprobs=2, cache_salt="theirs")
    sent = json.loads(release_body(given, Raw(b'{"mine":1}'), "77"))
    record = {"mine": 1}
    assert sent == {"prompt": "p", "max_tokens": 1, "stream": True, "cache_salt": "77", "kv_transfer_params": record}


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"messages": []}, Way.PAIR),
        ({"prompt": "a"}, Way.PAIR),
        ({"prompt": ["a"]}, Way.PAIR),
        ({"prompt": [1, 2, 3]}, Way.PAIR),
        ({"prompt": [[1, 2]]}, Way.PAIR),
        ({"prompt": []}, Way.PAIR),
        ({"prompt": "a", "n": 1, "best_of": 1}, Way.PAIR),
        ({"prompt": "a", "n": None, "echo": True}, Way.PAIR),
        ({"prompt": "a", "logprobs": 3}, Way.PAIR),
        ({"prompt": ["a", "b"]}, Way.SPLIT),
        ({"prompt": [[1, 2], [3]]}, Way.SPLIT),
        ({"prompt": ["a", "b"], "n": 1, "stream": False}, Way.SPLIT),
        ({"prompt": ["a", "b"], "stream": True}, Way.ALONE),
        ({"prompt": ["a", "b"], "n": 2}, Way.ALONE),
        ({"prompt": ["a", "b"], "prompt_embeds": "x"}, Way.ALONE),
        ({"prompt_embeds": ["x", "y"]}, Way.ALONE),
        ({"messages": [], "n": 2}, Way.ALONE),
        ({"prompt": "a", "best_of": 2}, Way.ALONE),
        ({"prompt": "a", "use_beam_search": True}, Way.ALONE),
        ({"prompt": "a", "echo": True, "logprobs": 0}, Way.ALONE),
    ],
)
def test_way(given, way):
    assert way_of(fields(**given)) is way


def test_prompts_are_the_clients_bytes():
    assert [bytes(p) for p in prompts_of(read_fields(b'{"prompt":[ "a\\u00e9", [1,2] ]}'))] == [b'"a\\u00e9"', b"[1,2]"]
