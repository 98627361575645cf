import pytest

from coordinator.core.instance import Address
from coordinator.transport.request import SMALL_BODY_BYTES, HeaderBlock, encode_call

HOST = Address("10.0.0.1", 1025)


def encode(method=b"POST", target="/v1/completions", headers=(), body=b""):
    return encode_call(method, target, HOST, headers, body)


def test_small_post_is_one_piece_on_the_wire():
    assert encode(headers=[(b"req-id", b"7"), (b"x", b"")], body=b"{}") == (
        b"POST /v1/completions HTTP/1.1\r\nhost: 10.0.0.1:1025\r\nreq-id: 7\r\nx: \r\ncontent-length: 2\r\n\r\n{}",
        b"",
    )


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"PATCH"])
def test_empty_body_has_its_length_stated(method):
    assert encode(method)[0].endswith(b"\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"DELETE"])
def test_no_length_where_no_body_is_meant(method):
    assert encode(method)[0] == method + b" /v1/completions HTTP/1.1\r\nhost: 10.0.0.1:1025\r\n\r\n"


def test_large_body_is_not_copied():
    body = bytes(SMALL_BODY_BYTES)
    head, rest = encode(body=body)
    assert rest is body
    assert head.endswith(b"content-length: 65536\r\n\r\n")


def test_headers_may_come_from_a_generator():
    assert b"\r\na: 1\r\nb: 2\r\n" in encode(headers=((name, value) for name, value in [(b"a", b"1"), (b"b", b"2")]))[0]


def test_target_outside_ascii_is_percent_encoded_and_the_rest_left():
    assert encode(b"GET", "/v2/models/通义%20/x?a=b&c=%2F")[0].startswith(
        b"GET /v2/models/%E9%80%9A%E4%B9%89%20/x?a=b&c=%2F HTTP/1.1\r\n"
    )


@pytest.mark.parametrize("bad", [b"\r", b"\n", b"\r\nx: y", b"\0"])
def test_what_breaks_the_framing_is_refused(bad):
    with pytest.raises(ValueError, match="framing"):
        encode(headers=[(b"x", b"a" + bad)])
    with pytest.raises(ValueError, match="framing"):
        encode(headers=[(b"x" + bad, b"a")])
    with pytest.raises(ValueError, match="framing"):
        encode(target="/a" + bad.decode())


def test_space_in_the_target_is_refused():
    with pytest.raises(ValueError, match="framing"):
        encode(target="/a HTTP/1.1")


def test_headers_that_are_written_down_once_serve_several_requests():
    block = HeaderBlock([(b"a", b"1"), (b"b", b"")])
    for body in (b"{}", b"[]"):
        assert encode(headers=block, body=body) == encode(headers=[(b"a", b"1"), (b"b", b"")], body=body)


@pytest.mark.parametrize("bad", [(b"a\r", b"1"), (b"a", b"1\n"), (b"a", b"1\r\nb: 2"), (b"a\0", b"1")])
def test_a_header_that_breaks_the_framing_is_refused_at_once(bad):
    with pytest.raises(ValueError, match="break the framing"):
        HeaderBlock([bad])
