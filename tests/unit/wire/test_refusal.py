"""What an engine's error answer says."""

import json

import pytest

from coordinator.wire.refusal import MAX_MESSAGE_CHARS, message_of

NOTHING_SAID = "the engine refused the request with status 422"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too long","type":"BadRequest","code":400}}', "too long"),  # OpenAI, vLLM, SGLang
        (b'{"object":"error","message":"too long","type":"BadRequestError"}', "too long"),  # older vLLM
        (b'{"error":"too long","error_type":"Input Validation Error"}', "too long"),  # TGI, MindIE
        (b'{"error":"too long"}', "too long"),  # Triton
        (b'{"message":"Request body too large."}', "Request body too large."),  # MindIE 413
        (b'{"detail":"Not Found"}', "Not Found"),  # FastAPI
        (b'"just a text"', "just a text"),
        (b"Request format is invalid\r\n", "Request format is invalid"),
        ('{"error":"中文"}'.encode(), "中文"),
        (b'{"error":{"error":{"message":"deep"}}}', "deep"),
    ],
)
def test_the_text_is_found(body, text):
    assert message_of(body, 422) == text


def test_a_list_of_problems_is_told_as_it_is():
    problems = [{"loc": ["body", "n"], "msg": "must be 1"}]
    assert message_of(json.dumps({"detail": problems}).encode(), 422) == str(problems)


@pytest.mark.parametrize(
    "body", [b"", b"   ", b"{}", b"[]", b"null", b"7", b"true", b'{"error":{}}', b'{"error":null}', b'{"detail":7}']
)
def test_where_nothing_is_said_a_sentence_stands(body):
    assert message_of(body, 422) == NOTHING_SAID


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error":' * 5000 + b"1" + b"}" * 5000])
def test_nesting_is_survived(body):
    assert 0 < len(message_of(body, 500)) <= MAX_MESSAGE_CHARS


def test_bytes_that_are_no_text_do_no_harm():
    assert message_of(b"\xff\xfe oh", 500).endswith("oh")


def test_a_long_text_is_cut():
    assert len(message_of(json.dumps({"error": "x" * 100_000}).encode(), 500)) == MAX_MESSAGE_CHARS
    assert len(message_of(b"x" * 100_000, 500)) == MAX_MESSAGE_CHARS
