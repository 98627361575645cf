"""A read that is one small chunk goes past the parser, and comes to what it comes to byte by byte, where none does."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Notes, chunked

from coordinator.transport.reader import ReplyReader

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
CHUNKED = HEAD + b"\r\n"
LAST = b"0\r\n\r\n"


def chunk(body):
    return b"%x\r\n%b\r\n" % (len(body), body)


def read(pieces, head=CHUNKED):
    """The head is a read of its own, or begins the first one: `head` is empty then."""
    notes = Notes()
    reader = ReplyReader(notes, bodiless=False, max_head_bytes=1000)
    for at, piece in enumerate((head, *pieces) if head else pieces):
        assert reader.feed(piece, float(at)) is None
        if reader.complete or reader.fault is not None:
            break
    return reader, notes


def outcome(reader, notes):
    fault = None if reader.fault is None else reader.fault.reason
    return fault, reader.complete, reader.in_step, reader.keeps_open, notes.body


def same(pieces, head=CHUNKED):
    """The outcome of these reads, having made sure that it is that of their bytes one by one."""
    whole = outcome(*read(pieces, head))
    assert whole == outcome(*read([bytes([byte]) for byte in b"".join(pieces)], head))
    return whole


@given(st.lists(st.binary(min_size=1, max_size=1100), max_size=6), st.data())
def test_any_chunks_in_any_reads(bodies, data):
    reads = []
    for piece in (CHUNKED, *map(chunk, bodies), LAST):
        if reads and data.draw(st.sampled_from((False, False, False, True)), label="joined"):
            reads[-1] += piece
        elif data.draw(st.sampled_from((False, False, False, True)), label="cut"):
            at = data.draw(st.integers(1, len(piece) - 1))
            reads += [piece[:at], piece[at:]]
        else:
            reads.append(piece)
    assert same(reads, b"") == (None, True, True, True, b"".join(bodies))


@pytest.mark.parametrize("size", [1, 14, 15, 16, 17, 254, 255, 256, 257, 1022, 1023, 1024, 4095, 4096])
def test_chunks_of_every_length_of_size_line(size):
    assert same([chunk(b"x" * size)] * 3 + [LAST]) == (None, True, True, True, b"x" * size * 3)


@given(st.sampled_from((b"a", b"data: {}\n\n", b"x" * 17, b"x" * 260)), st.data())
def test_whatever_byte_differs(body, data):
    second = chunk(body)
    at = data.draw(st.integers(0, len(second) - 1))
    byte = data.draw(st.one_of(st.sampled_from(b"0123456789abcdefABCDEF\r\n; \0"), st.integers(0, 255)))
    same([chunk(b"first"), second[:at] + bytes([byte]) + second[at + 1 :], chunk(b"third"), LAST])


@pytest.mark.parametrize(
    "second",
    [
        b"0A\r\n0123456789\r\n", b"A\r\n0123456789\r\n", b"a;b=c\r\n0123456789\r\n", b"00a\r\n0123456789\r\n",
        b"5\r\n01234\r", b"5\r\n01234\n\n", b"5\r\n01234\r\r", b"5\r\n012345\r\n", b"5\r\n0123\r\n", b"\r\n",
        b"6\r\n\r\n\r\n\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_like_a_chunk_and_is_not_just_one(second):
    same([chunk(b"first"), second, chunk(b"third"), LAST])


def test_what_looks_like_a_chunk_inside_of_a_large_one():
    inside = chunk(b"not the end")
    assert same([b"%x\r\n" % (3 * len(inside)), inside, inside, inside, b"\r\n", LAST])[-1] == inside * 3


@pytest.mark.parametrize("start", [b"1a\r\n", b"1c\r\n\r\n", b"1e\r\n\r\n\r\n", b"1a;a=b\r\n"])
def test_what_looks_like_a_chunk_behind_the_head(start):
    rest = chunk(b"one") + chunk(b"two") + chunk(b"three")
    assert same([CHUNKED + start, chunk(b"one"), chunk(b"two"), chunk(b"three"), b"\r\n", LAST], b"")[1]
    assert same([CHUNKED + start + rest, b"\r\n", LAST], b"")[-1].endswith(rest)


@pytest.mark.parametrize("framing", [b"content-length: 16", b"x-a: b", b"transfer-encoding: gzip, chunked"])
def test_a_body_that_is_not_in_chunks(framing):
    same([chunk(b"one"), chunk(b"two")], b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)


def test_what_looks_like_a_chunk_among_the_trailers():
    assert same([chunk(b"first"), b"0\r\n", chunk(b"second"), b"\r\n"])[0] == "bad_reply"
    assert same([chunk(b"first"), LAST, chunk(b"second")])[-1] == b"first"


def test_a_compressed_body():
    packed = gzip.compress(b"a text" * 9, mtime=0)
    pieces = [chunk(packed[:20]), chunk(packed[20:]), LAST]
    assert same(pieces, HEAD + b"content-encoding: gzip\r\n\r\n") == (None, True, True, True, b"a text" * 9)


def test_each_read_has_its_time():
    _, notes = read([chunk(b"one"), chunk(b"two"), chunk(b"three")])
    assert notes.times == [1.0, 2.0, 3.0]


def test_another_sink_takes_over_between_two_chunks():
    reader, first = read([chunk(b"one"), chunk(b"two")])
    reader.sink = second = Notes()
    second.heads.append(None)
    reader.feed(chunk(b"three"), 0.0)
    assert (first.body, second.body) == (b"onetwo", b"three")


def test_released_between_two_chunks_nothing_more_is_called():
    reader, notes = read([chunk(b"one"), chunk(b"two")])
    assert reader.release() is notes
    reader.feed(chunk(b"three"), 0.0)
    assert notes.body == b"onetwo"


def test_fault_of_the_sink_is_handed_to_the_caller():
    class Broken(Notes):
        def data(self, data, now_s):
            if self.pieces:
                raise ZeroDivisionError
            super().data(data, now_s)

    reader = ReplyReader(Broken(), bodiless=False, max_head_bytes=1000)
    assert reader.feed(chunked(b"one", end=False), 0.0) is None
    assert isinstance(reader.feed(chunk(b"two"), 0.0), ZeroDivisionError)
    assert reader.fault.reason == "bad_reply"
    reader.feed(chunk(b"three"), 0.0)
    assert not reader.complete


@pytest.mark.uncompiled  # takes the parser away
def test_the_parser_does_not_see_it():
    reader, notes = read([chunk(b"one")])
    reader._parser = object()
    assert reader.feed(chunk(b"two"), 0.0) is None
    assert notes.body == b"onetwo"
