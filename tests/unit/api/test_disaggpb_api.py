"""disaggpb's own API: what is read of its requests, and what its answers look like."""

import json

import pytest

from coordinator.api.families import FAMILIES
from coordinator.api.generation import generation_of
from coordinator.api.writers import LENGTH, STOP, STOP_STRING, Delta, Usage, writer_of
from coordinator.core.errors import BadRequest
from coordinator.core.request import Deadlines, Request

FAMILY = next(family for family in FAMILIES if family.name == "disaggpb")
PATH = "/v1/completions"


def request(**fields):
    body = json.dumps({"token_ids": [1, 2], **fields}).encode()
    ask = FAMILY.parse(PATH, body)
    return Request("id", "disaggpb", PATH, "", (), body, ask, 0.0, Deadlines(0.0, 0.0, 0.0, 0.0))


def writer():
    asked = request()
    return writer_of(asked, generation_of(asked), "m", 0)


def test_a_request_of_the_page():
    found = generation_of(request(request_id="r1", token_ids=[1, 2, 3], max_new_tokens=10, temperature=0.7))
    assert (found.prompt, found.max_tokens, found.temperature) == ((1, 2, 3), 10, 0.7)
    assert (found.stream, found.return_ids) == (True, True)


def test_what_may_be_left_out():
    found = generation_of(request(max_new_tokens=None, stream=False))
    assert (found.max_tokens, found.temperature, found.stream) == (None, None, False)


def test_token_0_is_a_token():
    assert generation_of(request(token_ids=[0])).prompt == (0,)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2**31}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": "9"}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"token_ids": [2**31]}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": [1, None]}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
    ],
)
def test_what_is_refused(fields, word):
    with pytest.raises(BadRequest) as caught:
        generation_of(request(**fields))
    assert f"`{word}`" in caught.value.message


@pytest.mark.parametrize(
    ("reason", "told"), [(STOP, "stop"), (STOP_STRING, "stop"), (LENGTH, "length"), ("odd", "odd")]
)
def test_streams(reason, told):
    made = writer()
    pieces = [
        made.piece(0, Delta("a", (0,))),
        made.piece(0, Delta("", (7, 8))),
        made.piece(0, Delta("", (9, 2), (), reason)),
    ]
    assert b"".join(pieces).decode() == "".join(
        f"data: {event}\n\n"
        for event in (
            '{"token_id":0,"done":false}', '{"token_id":7,"done":false}', '{"token_id":8,"done":false}',
            '{"token_id":9,"done":false}', f'{{"token_id":2,"done":true,"finish_reason":"{told}"}}',
        )
    )  # fmt: skip
    assert made.tail(Usage(2, 5)) == b""
    assert FAMILY.ends(pieces[-1])
    assert not FAMILY.ends(b"".join(pieces[:-1]))


def test_an_end_without_a_token():
    assert writer().piece(0, Delta("", (), (), STOP)) == b'data: {"done":true,"finish_reason":"stop"}\n\n'


def test_nothing_to_show():
    assert writer().piece(0, Delta("a")) == b""
    assert writer().prompt(0, Delta("prompt", (1, 2))) == b""


def test_whole_answers():
    whole = writer().whole([Delta("ab", (0, 2), (), STOP)], Usage(2, 2))
    assert json.loads(whole) == {"token_ids": [0, 2], "finish_reason": "stop"}
