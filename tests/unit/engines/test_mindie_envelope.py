"""Prefill's reply, by the cases of the MindIE protocol page §4.3."""

import json

import pytest

from coordinator.engines.mindie.envelope import EnvelopeError, FirstToken, read_envelope

ID = "9314568220134882133"


def reply(**members):
    return json.dumps({"reqId": ID, **members}).encode()


@pytest.mark.parametrize(
    ("stream", "body", "wanted"),
    [
        (True, reply(isStream=True, isLastResp=False, output="data: {}\n\n"), FirstToken(b"data: {}\n\n", last=False)),
        (True, reply(isStream=True, isLastResp=True, output="data: x\n\n"), FirstToken(b"data: x\n\n", last=True)),
        (True, reply(isStream=True, isLastResp=False, output=""), FirstToken(b"", last=False)),
        (False, reply(isStream=False), FirstToken(b"", last=False)),
        (False, reply(isStream=False, isLastResp=False, output="ignored"), FirstToken(b"", last=False)),
        (False, reply(isStream=False, isLastResp=None), FirstToken(b"", last=False)),
        (False, reply(isStream=False, isLastResp=True, output="{}"), FirstToken(b"{}", last=True)),
    ],
)
def test_what_is_due_is_read(stream, body, wanted):
    assert read_envelope(body, ID, stream=stream) == wanted


def test_our_own_stream_flag_counts_and_not_the_engines():
    assert read_envelope(reply(isStream=True), ID, stream=False) == FirstToken(b"", last=False)
    with pytest.raises(EnvelopeError):
        read_envelope(reply(isStream=True), ID, stream=True)


def test_escapes_become_bytes():
    """A vLLM piece ends in an escaped NUL; other text is UTF-8."""
    body = b'{"reqId":"%b","isLastResp":false,"output":"{\\"text\\":[\\"\\u4f60\xe5\xa5\xbd\\"]}\\u0000"}' % ID.encode()
    assert read_envelope(body, ID, stream=True).output == '{"text":["你好"]}\0'.encode()


def test_keys_that_nobody_knows_do_no_harm():
    assert read_envelope(reply(isLastResp=False, output="x", more={"a": [1]}), ID, stream=True).output == b"x"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"this is not JSON", b"[]", b"null", b'{"reqId":5,"isLastResp":false,"output":""}', b"{}", b"\xff",
        b'{"isStream":true,"isLastResp":false,"output":"x"}', b"[" * 100_000,
        reply(isLastResp="no", output="x"), reply(isLastResp=False, output=7), reply(isLastResp=False),
        reply(output="x"), reply()[:-1],
    ],
)  # fmt: skip
def test_everything_else_is_an_error_of_prefill(body):
    with pytest.raises(EnvelopeError):
        read_envelope(body, ID, stream=True)


def test_half_a_surrogate_pair_is_no_crash():
    body = b'{"reqId":"%b","isLastResp":false,"output":"\\ud83d"}' % ID.encode()
    try:
        first = read_envelope(body, ID, stream=True)
    except EnvelopeError:
        return
    assert isinstance(first.output, bytes)


def test_another_requests_reply_is_an_error_and_is_cut_for_the_log():
    with pytest.raises(EnvelopeError) as caught:
        read_envelope(json.dumps({"reqId": "7" * 5000, "isLastResp": True, "output": "x"}).encode(), ID, stream=True)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("members", [{"isLastResp": True}, {"isLastResp": True, "output": ""}])
def test_a_whole_answer_that_is_not_there_is_an_error(members):
    """Else the client would get an empty 200."""
    with pytest.raises(EnvelopeError):
        read_envelope(reply(**members), ID, stream=False)
