"""Bodies, metadata and refusals of the microserving calls."""

import base64
import json

import pytest
from msgspec import Raw

from coordinator.wire.microserving import (
    Prepared,
    debug_config,
    free_body,
    generate_body,
    plain_refusal,
    prepare_body,
    read_prepared,
    send_body,
    window_lengths,
)

FIELDS = {"prompt": Raw(b'"a b"'), "seed": Raw(b"9007199254740993"), "n": Raw(b"2"), "debug_config": Raw(b"{}")}
PREPARED = Prepared("WzEsMCw5XQ==", 3, 9)


def encoded(numbers):
    return base64.b64encode(json.dumps(numbers).encode()).decode()


@pytest.mark.parametrize(
    ("metadata", "lengths"),
    [
        ("WzBd", [0]),
        ("WzEsMCw5XQ==", [9]),
        (encoded([2, 0, 5, 16, 4]), [9]),
        (encoded([1, 0, 9, 1, 64, 9]), [9, 9]),
        (encoded([0, 2, 0, 1, 8, 1]), [0, 2]),
    ],
)
def test_windows_of_each_model(metadata, lengths):
    assert window_lengths(metadata) == lengths


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "!",
        "WzB",
        encoded([]),
        encoded([1, 0]),
        encoded([-1]),
        encoded([1, 0, -9]),
        encoded({"a": 1}),
        encoded([0.5]),
    ],
)
def test_metadata_that_makes_no_sense(metadata):
    with pytest.raises(ValueError, match="kv_append_metadata"):
        window_lengths(metadata)


def test_metadata_is_bounded():
    with pytest.raises(ValueError, match="too long"):
        window_lengths("A" * (17 << 20))


def test_what_decode_answers():
    body = json.dumps({"kv_append_metadata": "WzEsMCw5XQ==", "prefix_matched_length": 3, "more": 1}).encode()
    found = read_prepared(body)
    assert (found.prefix, found.missing, found.window) == (3, 9, 12)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{}",
        b'{"kv_append_metadata": "WzBd"}',
        b'{"kv_append_metadata": 1, "prefix_matched_length": 0}',
        b'{"kv_append_metadata": "WzBd", "prefix_matched_length": -1}',
        b'{"kv_append_metadata": "WzBd", "prefix_matched_length": "0"}',
        json.dumps({"kv_append_metadata": encoded([1, 0, 9, 1, 0, 8]), "prefix_matched_length": 0}).encode(),
    ],
)
def test_what_decode_cannot_have_meant(answer):
    with pytest.raises(ValueError, match=r"prep_recv|kv_append|prefix"):
        read_prepared(answer)


def test_bodies():
    last = {"stream": Raw(b"true"), "suffix": Raw(b'"x"')}
    prepare, send, generate, free = (
        json.loads(body)
        for body in (
            prepare_body(FIELDS, "7", -1),
            send_body(FIELDS, "7", PREPARED, -1, 4),
            generate_body(FIELDS, last, "7", -1),
            free_body(FIELDS, "7", 12),
        )
    )
    assert prepare == {"prompt": "a b", "seed": 9007199254740993, "n": 2, "debug_config": {}, "user": "7", "end": -1}
    assert (send["begin"], send["end"], send["kv_addr_info"], send["recv_rank"]) == (3, -1, "WzEsMCw5XQ==", 4)
    assert "n" not in send
    assert (generate["stream"], generate["suffix"], generate["begin"]) == (True, "x", -1)
    assert (free["stream"], free["begin"]) == (True, 12)


@pytest.mark.parametrize(
    ("given", "top", "kept"),
    [
        (None, None, {}),
        (b"null", None, {}),
        (b'"x"', None, {}),
        (
            b'{"ignore_eos":true,"special_request":"query_engine_metrics","pinned_system_prompt":true}',
            None,
            {"ignore_eos": True},
        ),
        (
            b'{"grammar_execution_mode":"constraint"}',
            b"true",
            {"grammar_execution_mode": "constraint", "ignore_eos": True},
        ),
        (None, b"false", {}),
    ],
)
def test_debug_config(given, top, kept):
    made = debug_config(None if given is None else Raw(given), None if top is None else Raw(top))
    assert json.loads(bytes(made)) == kept


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        (
            json.dumps(json.dumps({"object": "error", "message": "no", "code": 400})).encode(),
            {"object": "error", "message": "no", "code": 400},
        ),
        (
            b'{"detail":[{"loc":["body","end"],"msg":"missing"},{"loc":["body","a",0],"msg":"bad"}]}',
            {"message": "end: missing; a.0: bad"},
        ),
        (b'{"detail":[{"msg":"bad"},7]}', {"message": "bad; 7"}),
        (b'{"detail":[]}', {"message": "refused"}),
        (b'{"detail":"text"}', {"detail": "text"}),
    ],
)
def test_refusals_are_unwrapped(body, becomes):
    assert json.loads(plain_refusal(body)) == becomes


@pytest.mark.parametrize("body", [b"", b"Internal Server Error", b'"{broken"', b'"text"', b"\xff", b"[1]"])
def test_other_refusals_stay_as_they_are(body):
    assert plain_refusal(body) == body
