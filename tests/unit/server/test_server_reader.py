import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import get, post

from coordinator.core.errors import (
    BadRequest,
    BodyTooLarge,
    HeadersTooLarge,
    UnknownExpectation,
    UnsupportedEncoding,
)
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader

CHUNKED = b"POST /c?x=1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
SAMPLES = {
    "plain": post(b"hello", "X-Empty:", "X-Two: 1", "X-Two: 2 ", "X-Tab: a\tb"),
    "chunked": CHUNKED,
    "get": get(),
    "upgrade with body": post(b"hello", *UPGRADE),
    "upgrade with chunks": CHUNKED.replace(b"\r\n\r\n3", b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n3"),
    "upgrade without body": get(*UPGRADE),
    "1.0": post(b"hello", version="1.0"),
    "body with an empty line": post(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
}


def read(data, step=None, **limits):
    """Feed until complete; returns the reader and the bytes that are left over."""
    reader = RequestReader(ServerLimits(**limits))
    step = step or len(data)
    for at in range(0, len(data), step):
        rest = reader.feed(data[at : at + step])
        if reader.complete:
            return reader, rest + data[at + step :]
        assert rest == b""
    return reader, b""


def seen(reader):
    return (
        reader.method, reader.target, reader.path, reader.query, reader.headers, reader.body, reader.http_10,
        reader.keep_alive, reader.coding, reader.unread, str(reader.refusal),
    )  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_a_request_is_the_same_however_it_is_cut(name):
    data = SAMPLES[name]
    whole, rest = read(data + b"NEXT")
    assert whole.complete
    assert whole.refusal is None
    assert rest == b"NEXT"
    for step in range(1, len(data)):
        cut, rest = read(data + b"NEXT", step)
        assert seen(cut) == seen(whole), step
        assert rest == b"NEXT", step


def test_what_is_read():
    reader, _ = read(post(b"hello", "X-Empty:", "X-Two: 1", "X-Two: 2 ", target="/v1/x?a=/b?c"))
    assert (reader.method, reader.target, reader.path, reader.query) == ("POST", "/v1/x?a=/b?c", "/v1/x", "a=/b?c")
    assert reader.headers == (
        (b"host", b"a"),
        (b"content-length", b"5"),
        (b"x-empty", b""),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
    )
    assert reader.body == b"hello"
    assert reader.keep_alive
    assert not reader.http_10


@pytest.mark.parametrize("name", ["upgrade with body", "upgrade with chunks"])
def test_an_upgrade_offer_does_not_lose_the_body(name):
    reader, _ = read(SAMPLES[name])
    assert reader.body in (b"hello", b"abc")
    assert reader.keep_alive


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://host/p/q?x", "/p/q", "x"),
        ("http://host:80", "/", ""),
        ("https://host?a=/b", "/", "a=/b"),
        ("/redirect?to=http://host/x", "/redirect", "to=http://host/x"),
        ("*", "*", ""),
        ("/%2e%2e//x", "/%2e%2e//x", ""),
    ],
)
def test_targets(target, path, query):
    method = "OPTIONS" if target == "*" else "GET"
    reader, _ = read(get(target=target, method=method))
    assert reader.refusal is None
    assert (reader.target, reader.path, reader.query) == (target, path, query)


@pytest.mark.parametrize(
    ("version", "connection", "keep"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Close, X-Foo", False),
        ("1.1", "keep-alive, X-Foo", True),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
    ],
)
def test_keep_alive(version, connection, keep):
    reader, _ = read(get(*([f"Connection: {connection}"] if connection else []), version=version))
    assert reader.keep_alive is keep
    assert reader.http_10 is (version == "1.0")


def raw(*lines, body=b""):
    return "\r\n".join(("POST /p HTTP/1.1", "Host: a", *lines)).encode("latin-1") + b"\r\n\r\n" + body


SMUGGLING = {
    "length and chunks": raw("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks and length": raw("Transfer-Encoding: chunked", "Content-Length: 5", body=b"0\r\n\r\n"),
    "the same in an upgrade": raw(*UPGRADE[:2], "Content-Length: 5", "Transfer-Encoding: chunked"),
    "two lengths": raw("Content-Length: 5", "Content-Length: 6", body=b"hello"),
    "one length twice": raw("Content-Length: 5", "Content-Length: 5", body=b"hello"),
    "a list of lengths": raw("Content-Length: 5, 5", body=b"hello"),
    "a signed length": raw("Content-Length: +5", body=b"hello"),
    "a negative length": raw("Content-Length: -5", body=b"hello"),
    "a hex length": raw("Content-Length: 0x5", body=b"hello"),
    "an empty length": raw("Content-Length:", body=b"hello"),
    "a coding behind chunks": raw("Transfer-Encoding: chunked, gzip"),
    "a coding before chunks": raw("Transfer-Encoding: gzip, chunked"),
    "an unknown coding": raw("Transfer-Encoding: xchunked"),
    "identity and chunks": raw("Transfer-Encoding: identity", "Transfer-Encoding: chunked"),
    "an odd blank": raw("Transfer-Encoding: \x0bchunked"),
    "a space before the colon": raw("Transfer-Encoding : chunked"),
    "a folded header": raw("X: a", " Transfer-Encoding: chunked"),
    "bare line feeds": b"POST /p HTTP/1.1\nHost: a\nContent-Length: 5\n\nhello\r\n\r\n",
    "one bare line feed": b"POST /p HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    "a NUL in a value": raw("X: a\0b"),
    "a carriage return in a value": raw("X: a\rb"),
    "two hosts": raw("Host: b", "Content-Length: 0"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "chunks in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
@pytest.mark.parametrize("step", [None, 1])
def test_ambiguous_requests_are_refused_and_nothing_behind_them_is_read(name, step):
    reader, _ = read(SMUGGLING[name], step)
    assert reader.complete
    assert isinstance(reader.refusal, BadRequest)
    assert reader.refusal.status == 400
    assert reader.unread
    assert reader.body == b""


GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "words": b"hello there\r\n\r\n",
    "an unknown method": b"METHOD3 /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "a wrong version": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "http/2.0": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "connect": b"CONNECT host:443 HTTP/1.1\r\nHost: host\r\n\r\n",
    "a target with bytes": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("step", [None, 1])
def test_garbage_is_refused(name, step):
    reader, _ = read(GARBAGE[name], step)
    assert isinstance(reader.refusal, BadRequest)
    assert reader.unread
    if name in ("tls", "words", "an unknown method", "connect"):
        assert reader.path == ""


def test_the_path_is_known_where_the_request_line_was_good():
    reader, _ = read(SMUGGLING["two lengths"])
    assert (reader.method, reader.path) == ("POST", "/p")


@pytest.mark.parametrize("step", [None, 1, 7])
def test_the_head_is_bounded(step):
    data = get("X: " + "x" * 200, target="/p")
    assert read(data, step, max_header_bytes=len(data))[0].refusal is None
    reader, _ = read(data, step, max_header_bytes=len(data) - 1)
    assert isinstance(reader.refusal, HeadersTooLarge)
    assert reader.path == "/p"
    assert reader.unread


def test_a_request_line_without_end_is_refused():
    reader, _ = read(b"GET /" + b"x" * 4000, 100, max_header_bytes=1000)
    assert isinstance(reader.refusal, HeadersTooLarge)
    assert reader.path == ""


def test_a_body_above_the_limit_is_refused_when_it_is_announced():
    head = post(b"x" * 100).removesuffix(b"x" * 100)
    assert read(head + b"x" * 100, max_body_bytes=100)[0].refusal is None
    reader, _ = read(head, max_body_bytes=99)
    assert isinstance(reader.refusal, BodyTooLarge)
    assert (reader.path, reader.unread) == ("/v1/x", True)
    reader, _ = read(raw("Content-Length: " + "9" * 18))
    assert isinstance(reader.refusal, BodyTooLarge)


def test_chunks_above_the_limit_are_refused():
    reader, _ = read(CHUNKED, max_body_bytes=2)
    assert isinstance(reader.refusal, BodyTooLarge)
    assert reader.unread


def test_broken_chunks_are_refused():
    reader, _ = read(CHUNKED.replace(b"3\r\n", b"zz\r\n"))
    assert isinstance(reader.refusal, BadRequest)
    assert reader.body == b""


def test_expect():
    def head(*lines, version="1.1"):
        return read(post(b"hello", *lines, version=version).removesuffix(b"hello"))[0]

    assert head("Expect: 100-Continue").wants_continue
    assert not head().wants_continue
    assert not head("Expect: 100-continue", version="1.0").wants_continue
    for bad in (["Expect: bogus"], ["Expect: 100-continue", "Expect: 100-continue"], ["Expect:"]):
        reader = head(*bad)
        assert isinstance(reader.refusal, UnknownExpectation)
        assert reader.refusal.status == 417
    assert head("Expect: bogus", version="1.0").refusal is None
    assert not read(get("Expect: 100-continue"))[0].wants_continue


def test_what_cannot_be_met_is_said_without_inviting_the_body():
    too_large, _ = read(raw("Content-Length: 500", "Expect: 100-continue"), max_body_bytes=100)
    assert isinstance(too_large.refusal, BodyTooLarge)
    unread, _ = read(raw("Content-Length: 50", "Expect: 100-continue", "Content-Encoding: br"))
    assert isinstance(unread.refusal, UnsupportedEncoding)
    assert not too_large.wants_continue
    assert not unread.wants_continue


def test_content_encoding():
    assert read(post(b"x", "Content-Encoding: gzip"))[0].coding == "gzip"
    assert read(post(b"x", "Content-Encoding: identity"))[0].coding is None
    assert read(get("Content-Encoding: br"))[0].refusal is None
    assert isinstance(read(post(b"x", "Content-Encoding: br"))[0].refusal, UnsupportedEncoding)


def test_a_refusal_is_final_and_keeps_no_body():
    reader, rest = read(post(b"hello", "Content-Encoding: br") + get())
    assert reader.unread
    assert (reader.body, rest) == (b"", b"")


@given(st.sampled_from(sorted(SAMPLES) + sorted(SMUGGLING)), st.data())
def test_no_damage_makes_the_reader_raise_or_depend_on_the_cut(name, data):
    whole = bytearray({**SAMPLES, **SMUGGLING}[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    if not whole.lstrip(b"\r\n"):
        return
    once, rest = read(bytes(whole))
    cut, rest_of_cut = read(bytes(whole), data.draw(st.integers(1, 20)))
    assert once.complete == cut.complete
    if once.complete and once.refusal is None:
        assert seen(once) == seen(cut)
        assert rest == rest_of_cut
        assert len(rest) < len(whole)
    elif once.complete:
        assert type(once.refusal) is type(cut.refusal)
