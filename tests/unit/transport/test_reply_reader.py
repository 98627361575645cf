import gzip
import zlib
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Notes, chunked, whole

from coordinator.transport.reader import Known, ReplyReader
from coordinator.wire.head_memory import HeadMemory

TEXT = 'data: {"text":"你好🌍"}\n\n'.encode()
PACKED = gzip.compress(TEXT, mtime=0)


def read(*pieces, bodiless=False, max_head_bytes=65536, close=False, notes=None):
    notes = notes or Notes()
    reader = ReplyReader(notes, bodiless=bodiless, max_head_bytes=max_head_bytes)
    for at, piece in enumerate(pieces):
        assert reader.feed(piece, float(at)) is None
        if reader.fault is not None or reader.complete:
            break
    if close:
        reader.close()
    return reader, notes


def each_byte(data):
    return [data[i : i + 1] for i in range(len(data))]


REPLIES = {
    "length": (whole(TEXT), TEXT),
    "empty": (whole(b""), b""),
    "chunked": (chunked(TEXT, b"x", TEXT), TEXT + b"x" + TEXT),
    "chunked, empty": (chunked(), b""),
    "interim first": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n" + whole(TEXT), TEXT),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b""),
    "trailers": (chunked(TEXT, end=False) + b"0\r\nx-sum: 1\r\n\r\n", TEXT),
    "chunk extension": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\n\r\n", b"hi"),
    "gzip": (whole(PACKED, extra=b"content-encoding: gzip\r\n"), TEXT),
    "gzip, chunked": (
        chunked(PACKED[:9], PACKED[9:], extra=b"Content-Encoding: GZIP\r\n"),
        TEXT,
    ),
    "deflate": (whole(zlib.compress(TEXT), extra=b"content-encoding: deflate\r\n"), TEXT),
    "identity": (whole(TEXT, extra=b"content-encoding: identity\r\n"), TEXT),
    "no reason phrase": (b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok", b"ok"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_reply_split_at_every_byte(name):
    data, body = REPLIES[name]
    ways = [[data[:cut], data[cut:]] for cut in range(1, len(data))]
    for pieces in ([data], each_byte(data), *ways):
        reader, notes = read(*pieces)
        assert reader.complete
        assert reader.in_step
        assert reader.keeps_open
        assert notes.body == body
        assert len(notes.heads) == 1


@given(st.data())
def test_reply_split_anywhere(data):
    reply, body = REPLIES[data.draw(st.sampled_from(sorted(REPLIES)))]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(reply) - 1), max_size=12)))
    reader, notes = read(*(reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)))
    assert (reader.complete, reader.in_step, notes.body, len(notes.heads)) == (True, True, body, 1)


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_do_no_harm(pieces):
    reader, notes = read(*pieces, close=True)
    assert notes.ends == 0
    assert notes.errors == []
    assert reader.fault is None or reader.fault.reason == "bad_reply"


def test_head_names_are_lower_case_and_values_as_they_came():
    _, notes = read(b"HTTP/1.1 418 T\r\nX-A: One\r\nx-empty:\r\nX-A: \xe9 two \r\nContent-Length: 0\r\n\r\n")
    status, headers = notes.heads[0]
    assert status == 418
    assert headers == ((b"x-a", b"One"), (b"x-empty", b""), (b"x-a", b"\xe9 two"), (b"content-length", b"0"))


def test_head_of_an_expanded_body_tells_nothing_untrue():
    _, notes = read(REPLIES["gzip"][0])
    assert notes.heads[0][1] == ()


def test_each_chunk_is_passed_on_as_it_is_with_the_time_of_its_read():
    head, _, rest = chunked(b"one", b"two", b"three").partition(b"\r\n\r\n")
    _, notes = read(head + b"\r\n\r\n", rest[:16], rest[16:21], rest[21:])
    assert notes.pieces == [b"one", b"two", b"th", b"ree"]
    assert notes.times == [1.0, 1.0, 2.0, 3.0]


class TestClose:
    def test_unframed_body_ends_with_the_connection(self):
        for pieces in (
            [b"HTTP/1.0 200 OK\r\n\r\nab"],
            [b"HTTP/1.1 200 OK\r\n\r\na", b"b"],
            each_byte(b"HTTP/1.1 200 OK\r\n\r\nab"),
        ):
            reader, notes = read(*pieces)
            assert not reader.complete
            assert reader.until_close
            reader.close()
            assert reader.complete
            assert notes.body == b"ab"

    @pytest.mark.parametrize("name", ["length", "chunked", "gzip", "interim first"])
    def test_a_cut_framed_body_is_not_complete(self, name):
        data, _ = REPLIES[name]
        for cut in range(len(data)):
            reader, _ = read(data[:cut], close=True)
            assert not reader.complete

    def test_cut_compressed_body(self):
        packed = gzip.compress(TEXT)
        reader, _ = read(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + packed[:-3], close=True)
        assert not reader.complete
        assert reader.fault.reason == "bad_reply"
        reader, _ = read(whole(packed[:-3], extra=b"content-encoding: gzip\r\n"))
        assert not reader.complete
        assert reader.fault.reason == "bad_reply"


class TestReuse:
    def test_connection_close_is_seen(self):
        reader, _ = read(whole(b"x", extra=b"connection: close\r\n"))
        assert reader.complete
        assert not reader.keeps_open

    def test_http_1_0_closes_unless_it_says_otherwise(self):
        assert not read(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n")[0].keeps_open
        assert read(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n\r\n")[0].keeps_open

    @pytest.mark.parametrize("surplus", [b"H", b"garbage", whole(b"second"), b"\x00"])
    @pytest.mark.parametrize("extra", [b"", b"connection: close\r\n"])
    def test_bytes_beyond_the_reply_put_it_out_of_step(self, surplus, extra):
        reader, notes = read(whole(b"first", extra=extra) + surplus)
        assert reader.complete
        assert reader.fault is None
        assert not reader.in_step
        assert notes.body == b"first"
        assert len(notes.heads) == 1

    def test_head_request_has_no_body_whatever_is_announced(self):
        reader, notes = read(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", bodiless=True)
        assert (reader.complete, reader.in_step, notes.body) == (True, True, b"")
        reader, notes = read(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", bodiless=True)
        assert (reader.complete, reader.in_step, notes.body) == (True, False, b"")
        reader, notes = read(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n", bodiless=True)
        assert (reader.complete, reader.fault) == (True, None)


BAD = {
    "garbage": b"SSH-2.0-x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunked": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "bad chunk size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "chunk longer than stated": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    "transfer coding gzip": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "brotli": whole(b"xx", extra=b"content-encoding: br\r\n"),
    "nested encodings": whole(b"xx", extra=b"content-encoding: gzip\r\ncontent-encoding: gzip\r\n"),
    "not gzip": whole(b"xx", extra=b"content-encoding: gzip\r\n") + b"",
    "switch of protocols": b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "bare switch": b"HTTP/1.1 101 S\r\n\r\n",
    "folded header": b"HTTP/1.1 200 OK\r\na: b\r\n c\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("split", [False, True])
def test_bad_reply(name, split):
    data = BAD[name]
    reader, notes = read(*(each_byte(data) if split else [data]))
    assert reader.fault is not None
    assert reader.fault.reason == "bad_reply"
    assert not reader.complete
    assert notes.over == 0


def test_bomb_is_too_large():
    bomb = gzip.compress(bytes(1 << 26))
    reader, notes = read(whole(bomb, extra=b"content-encoding: gzip\r\n"))
    assert reader.fault.reason == "reply_too_large"
    assert len(notes.body) <= 1 << 24


class TestHeadLimit:
    LONG = b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2000 + b"\r\ncontent-length: 2\r\n\r\nok"

    @pytest.mark.parametrize("size", [1, 100, 1500, 5000])
    def test_long_head(self, size):
        pieces = [self.LONG[i : i + size] for i in range(0, len(self.LONG), size)]
        reader, notes = read(*pieces, max_head_bytes=1000)
        assert reader.fault.reason == "bad_reply"
        assert notes.heads == []
        assert read(*pieces, max_head_bytes=3000)[0].complete

    def test_large_body_together_with_the_head_is_no_long_head(self):
        reader, _ = read(whole(bytes(5000)), max_head_bytes=1000)
        assert reader.complete

    def test_endless_interim_replies(self):
        reader, notes = read(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 100, max_head_bytes=1000)
        assert reader.fault.reason == "bad_reply"
        assert notes.heads == []

    def test_endless_trailers(self):
        reader, notes = read(chunked(b"x", end=False), b"0\r\nt: ", *[b"y" * 100] * 20, max_head_bytes=1000)
        assert reader.fault.reason == "bad_reply"
        assert notes.body == b"x"

    def test_a_long_body_of_small_reads_is_no_long_head(self):
        reader, notes = read(chunked(b"x", end=False), *[b"1\r\nx\r\n"] * 1000, b"0\r\n\r\n", max_head_bytes=1000)
        assert reader.complete
        assert len(notes.body) == 1001


class TestSink:
    def test_fault_of_the_sink_is_handed_to_the_caller(self):
        class Broken(Notes):
            def data(self, data, now_s):
                raise ZeroDivisionError

        reader = ReplyReader(Broken(), bodiless=False, max_head_bytes=1000)
        assert isinstance(reader.feed(whole(b"abc"), 0.0), ZeroDivisionError)
        assert reader.fault.reason == "bad_reply"

    def test_released_in_the_middle_of_a_read_nothing_more_is_called(self):
        class Leaver(Notes):
            def data(self, data, now_s):
                super().data(data, now_s)
                reader.release()

        notes = Leaver()
        reader = ReplyReader(notes, bodiless=False, max_head_bytes=1000)
        assert reader.feed(chunked(b"one", b"two"), 0.0) is None
        assert notes.body == b"one"

    def test_released_in_the_middle_of_an_expansion(self):
        class Leaver(Notes):
            def data(self, data, now_s):
                super().data(data, now_s)
                reader.release()

        notes = Leaver()
        reader = ReplyReader(notes, bodiless=False, max_head_bytes=1000)
        reader.feed(whole(gzip.compress(bytes(3 << 20)), extra=b"content-encoding: gzip\r\n"), 0.0)
        assert len(notes.pieces) == 1


class TestKnownHeads:
    DATE = b"Date: Mon, 30 Nov 2026 02:40:05 GMT\r\n"
    FIRST = whole(b"hello", extra=DATE + b"X-A: 1\r\n")

    @staticmethod
    def outcome(reader, notes):
        fault = None if reader.fault is None else reader.fault.reason
        return (
            fault, reader.complete, reader.in_step, reader.keeps_open, reader.until_close, notes.heads, notes.body,
        )  # fmt: skip

    @staticmethod
    def feed(data, last, step=None, **options):
        notes = Notes()
        options = {"bodiless": False, "max_head_bytes": 65536, **options}
        reader = ReplyReader(notes, last=last, **options)
        step = step or len(data)
        for at in range(0, len(data), step):
            reader.feed(data[at : at + step], 0.0)
            if reader.fault is not None or reader.complete:
                break
        reader.close()
        return reader, notes

    def both(self, second, step=None, **options):
        """The outcome of a reply behind `FIRST`, having made sure that it is the same without a memory."""
        last = HeadMemory()
        self.feed(self.FIRST, last)
        assert last.what == Known(200, keeps_open=True)
        known, fresh = (self.outcome(*self.feed(second, memory, step, **options)) for memory in (last, None))
        assert known == fresh
        return known

    FOLLOWERS: ClassVar = {
        "same": FIRST,
        "longer": whole(b"hello, you", extra=DATE + b"X-A: 1\r\n"),
        "empty": whole(b"", extra=DATE + b"X-A: 1\r\n"),
        "later": FIRST.replace(b":05", b":59"),
        "cut": FIRST[:-2],
        "head alone": FIRST[:-5],
        "half a head": FIRST[:30],
        "more than said": FIRST + b"x",
        "two": FIRST + FIRST,
        "chunked": chunked(b"a", b"b"),
        "error": FIRST.replace(b"200 OK", b"500 No"),
        "close": whole(b"hello", extra=DATE + b"X-A: 1\r\nConnection: close\r\n"),
        "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + FIRST,
        "gzip": whole(PACKED, extra=b"content-encoding: gzip\r\n"),
        "two lengths": FIRST.replace(b"X-A: 1", b"Content-Length: 5"),
        "folded date": FIRST.replace(b" GMT", b"\nX: "),
    }

    @pytest.mark.parametrize("name", FOLLOWERS)
    def test_the_next_reply_is_read_as_without_memory(self, name):
        reply = self.FOLLOWERS[name]
        for step in range(1, len(reply) + 1):
            self.both(reply, step)

    def test_a_head_that_is_known_is_found_without_a_parser(self, monkeypatch):
        last = HeadMemory()
        self.feed(self.FIRST, last)
        monkeypatch.setattr("coordinator.transport.reader.HttpResponseParser", None)
        for name in ("same", "longer", "empty", "later", "cut", "head alone", "more than said"):
            self.feed(self.FOLLOWERS[name], last)

    @given(st.data())
    def test_whatever_byte_differs(self, data):
        at = data.draw(st.integers(0, len(self.FIRST) - 1))
        byte = data.draw(st.one_of(st.sampled_from(b"0123456789\r\n\0\t :aA"), st.integers(0, 255)))
        self.both(self.FIRST[:at] + bytes([byte]) + self.FIRST[at + 1 :])

    def test_what_the_request_says_counts_as_well(self):
        assert self.both(self.FIRST[:-5], bodiless=True)[1]
        assert self.both(self.FIRST, max_head_bytes=len(self.FIRST) - 6)

    @pytest.mark.parametrize(
        "reply",
        [
            REPLIES["chunked"][0],
            REPLIES["gzip"][0],
            REPLIES["identity"][0],
            REPLIES["not modified"][0],
            REPLIES["interim first"][0],
            b"HTTP/1.1 200 OK\r\n\r\n",
        ],
    )
    def test_other_replies_are_not_remembered(self, reply):
        last = HeadMemory()
        self.feed(reply, last)
        assert last.what is None

    def test_fault_of_the_sink_is_handed_to_the_caller(self):
        class BrokenHead(Notes):
            def head(self, status, headers):
                raise ZeroDivisionError

        class BrokenData(Notes):
            def data(self, data, now_s):
                raise ZeroDivisionError

        for sink in (BrokenHead(), BrokenData()):
            last = HeadMemory()
            self.feed(self.FIRST, last)
            reader = ReplyReader(sink, bodiless=False, max_head_bytes=1000, last=last)
            assert isinstance(reader.feed(self.FIRST, 0.0), ZeroDivisionError)
            assert reader.fault.reason == "bad_reply"
            assert not reader.complete

    def test_released_at_the_head_nothing_more_is_called(self):
        class Leaver(Notes):
            def head(self, status, headers):
                super().head(status, headers)
                reader.release()

        last, notes = HeadMemory(), Leaver()
        self.feed(self.FIRST, last)
        reader = ReplyReader(notes, bodiless=False, max_head_bytes=1000, last=last)
        assert reader.feed(self.FIRST, 0.0) is None
        assert (len(notes.heads), notes.body) == (1, b"")
