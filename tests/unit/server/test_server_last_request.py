"""A connection that knows the head of its last request reads the next one exactly as one that does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import Wire, get, post

HEADERS = ("Authorization: Bearer abc", "X-Empty:", "X-Two: 1", "X-Two: 2 ")
FIRST = post(b"hello", *HEADERS, target="/v1/x?a=1")


def seen(exchange):
    return (
        exchange.method, exchange.target, exchange.path, exchange.query, exchange.headers, exchange.body,
        exchange.http_10, exchange.peer, str(exchange.refusal), exchange._reusable,
    )  # fmt: skip


async def answer(exchange):
    exchange.respond(200, (), b"ok")


async def after(first, second, step=None, **limits):
    """What becomes of `second` on a connection that has served `first`, or nothing (None)."""
    wire = Wire(answer, **limits)
    if first is not None:
        await wire.feed(first)
        assert len(wire.exchanges) == 1
        wire.exchanges.clear()
        wire.transport.writes.clear()
    await wire.feed(second, step)
    told = [seen(exchange) for exchange in wire.exchanges], wire.sent, wire.transport.closed, wire.transport.eof
    await wire.aclose()
    return told, wire


FOLLOWERS = {
    "the same": FIRST,
    "another length": post(b"hello, you", *HEADERS, target="/v1/x?a=1"),
    "no body": post(b"", *HEADERS, target="/v1/x?a=1"),
    "another path": post(b"hello", *HEADERS, target="/v1/y?a=1"),
    "another key": FIRST.replace(b"abc", b"abd"),
    "one header more": post(b"hello", *HEADERS, "X-More: 1", target="/v1/x?a=1"),
    "empty lines first": b"\r\n\r\n" + FIRST,
    "two at once": FIRST + FIRST,
    "one and a half": FIRST + FIRST[:-3],
    "half": FIRST[:-3],
    "no end of the head": FIRST[: FIRST.index(b"\r\n\r\n") + 3],
    "a get": get(),
    "two lengths": FIRST.replace(b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 5"),
    "a list of lengths": FIRST.replace(b"Content-Length: 5", b"Content-Length: 5, 5"),
    "a signed length": FIRST.replace(b"Content-Length: 5", b"Content-Length: +5"),
    "a huge length": FIRST.replace(b"Content-Length: 5", b"Content-Length: 99999999999999999999"),
    "chunks": FIRST.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "both": FIRST.replace(b"Content-Length: 5", b"Content-Length: 5\r\nTransfer-Encoding: chunked"),
}


@pytest.mark.parametrize("name", FOLLOWERS)
async def test_the_second_request_is_read_as_the_first(name):
    for step in (None, 1, 7):
        known, _ = await after(FIRST, FOLLOWERS[name], step)
        fresh, _ = await after(None, FOLLOWERS[name], step)
        assert known == fresh


@given(st.data())
@settings(max_examples=300, deadline=None)
async def test_whatever_byte_differs(data):
    at = data.draw(st.integers(0, len(FIRST) - 1))
    byte = data.draw(st.one_of(st.sampled_from(b"0123456789\r\n\0\t :aA"), st.integers(0, 255)))
    second = FIRST[:at] + bytes([byte]) + FIRST[at + 1 :]
    known, _ = await after(FIRST, second)
    fresh, _ = await after(None, second)
    assert known == fresh


@pytest.mark.parametrize(
    "first",
    [
        post(b"hello", "Expect: 100-continue"),
        post(b"hello", "Content-Encoding: identity"),
        FOLLOWERS["chunks"][: FOLLOWERS["chunks"].index(b"hello")] + b"5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["expectation", "coding", "chunks"],
)
async def test_heads_that_need_a_look_each_time(first):
    wire = Wire(answer)
    for _ in range(2):
        await wire.feed(first)
        assert wire.connection._last.what is None
    assert seen(wire.exchanges[0]) == seen(wire.exchanges[1])
    assert wire.exchange.body == b"hello"
    await wire.aclose()


async def test_limits_hold_for_known_heads_too():
    longer = post(b"x" * 50, *HEADERS, target="/v1/x?a=1")
    known, wire = await after(FIRST, longer, max_body_bytes=20)
    fresh, _ = await after(None, longer, max_body_bytes=20)
    assert known == fresh
    assert wire.exchange.refusal.code == "body_too_large"


async def test_a_refused_request_is_not_remembered():
    wire = Wire(answer, max_body_bytes=4)
    await wire.feed(FIRST)
    assert wire.connection._last.what is None
    await wire.aclose()


async def test_what_was_made_of_a_head_is_found_with_the_next_of_its_kind_alone():
    wire = Wire(answer)
    await wire.feed(FIRST)
    assert wire.exchange.kept is None
    made = object()
    wire.exchange.keep(made)
    await wire.feed(FOLLOWERS["another length"])
    assert wire.exchange.kept is made
    await wire.feed(FOLLOWERS["another key"])
    assert wire.exchange.kept is None
    await wire.feed(FIRST)
    assert wire.exchange.kept is None
    await wire.aclose()


async def test_no_body_is_kept_beside_the_handler_s():
    wire = Wire(answer)
    for body in (b"hello", b"hello"):
        await wire.feed(post(body))
        assert wire.connection._last.what.body == b""
    await wire.aclose()
