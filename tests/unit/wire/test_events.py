import json

import pytest
from msgspec import Raw

from coordinator.wire.events import MAX_HELD_BYTES, UsageEditor, find_error, is_whole, wants_usage

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"say \\"error\\": \\"usage\\""}}],"usage":null}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}},'
    b'"big":12345678901234567}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("event", "message", "code"),
    [
        (b'data: {"error":{"message":"no room","code":500}}\n\n', "no room", 500),
        (b'data:{"error": "no room", "error_type":"generation"}\n\n', "no room", 0),
        (b'data: {"object":"error","message":"no room","code":400}\n\n', "no room", 400),
        (b'event: error\ndata: {"error":{"message":"no room"}}\n\n', "no room", 0),
        (b'data: {"error":{"message":7,"code":12345}}\n\n', "", 0),
        (b'data: {"error":{"mess', "", 0),
    ],
)
@pytest.mark.parametrize("before", [b"", TOKEN, b": ping\r\n\r\n"])
def test_errors(event, message, code, before):
    found = find_error(before + event)
    assert (found.at, found.message, found.code) == (len(before), message, code)


@pytest.mark.parametrize(
    "data",
    [
        TOKEN,
        DONE,
        b'data: {"error":null,"choices":[]}\n\n',
        b'data: {"choices":[{"delta":{"error":{"message":"inner"}}}]}\n\n',
        b': data: {"error":"comment"}\n\n',
    ],
)
def test_no_errors(data):
    assert find_error(data) is None


def edited(pieces):
    editor = UsageEditor(Raw(b"3"))
    out = [editor.feed(piece) for piece in pieces]
    return b"".join((*out, editor.rest()))


def check(stream):
    events = stream.split(b"\n\n")
    assert events[0] + b"\n\n" == TOKEN
    assert events[2:] == [b"data: [DONE]", b""]
    value = json.loads(events[1][len(b"data: ") :])
    assert value["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}
    assert value["big"] == 12345678901234567


def test_usage_is_edited_wherever_the_stream_is_cut():
    stream = TOKEN + USAGE + DONE
    check(edited([stream]))
    check(edited([bytes([byte]) for byte in stream]))
    for at in range(1, len(stream)):
        check(edited([stream[:at], stream[at:]]))


def test_whole_events_pass_at_once():
    editor = UsageEditor(Raw(b"3"))
    assert editor.feed(TOKEN) is TOKEN
    assert editor.feed(TOKEN + TOKEN[:5]) == TOKEN
    assert editor.feed(TOKEN[5:]) == TOKEN
    assert editor.rest() == b""


def test_what_is_held_back_is_bounded():
    editor = UsageEditor(Raw(b"3"))
    huge = b"data: " + b"x" * MAX_HELD_BYTES
    assert editor.feed(huge) == huge


@pytest.mark.parametrize(
    "event",
    [b'data: {"choices":[],"usage":{cut\n\n', b'data: {"choices":[],"usage":null}\n\n', b': "usage" "choices":[]\n\n'],
)
def test_other_events_stay_byte_for_byte(event):
    assert edited([event]).split() == event.split()


def test_counts_of_every_chunk_stay_out_of_it():
    running = b'data: {"choices":[{"index":0}],"usage":{"completion_tokens":4}}\n\n'
    assert edited([running]) == running


def test_usage_without_details_gets_them():
    found = edited([b'data: {"choices":[],"usage":{"prompt_tokens":9}}\r\n\r\n'])
    assert found == (
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}\r\n\r\n'
    )


def test_ends_of_events():
    assert [is_whole(d) for d in (b"a\n\n", b"a\r\n\r\n", b"a\r\r", b"a\n", b"")] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (None, False),
        (b"null", False),
        (b"{}", False),
        (b'{"include_usage":false}', False),
        (b'{"include_usage":true}', True),
    ],
)
def test_wants_usage(options, wanted):
    assert wants_usage(None if options is None else Raw(options)) is wanted
