import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.errors import BadRequest, BodyTooLarge, HeadersTooLarge
from coordinator.server.chunked import ChunkedBody

WHOLE = b'5\r\nhello\r\n6;name="v;w"\r\n world\r\n000\r\nTrailer: x\r\nOther: y\r\n\r\n'


def read(data, step=None, limit=1000, trailers=200):
    chunked = ChunkedBody(limit, trailers)
    step = step or len(data)
    for at in range(0, len(data), step):
        rest = chunked.feed(data[at : at + step])
        if rest is not None:
            return chunked.body.whole(), rest + data[at + step :]
    return chunked.body.whole(), None


@pytest.mark.parametrize("step", [None, *range(1, len(WHOLE))])
def test_a_body_is_the_same_however_it_is_cut(step):
    assert read(WHOLE + b"GET / HTTP", step) == (b"hello world", b"GET / HTTP")


@pytest.mark.parametrize("end", range(len(WHOLE)))
def test_a_body_without_its_last_byte_is_not_complete(end):
    assert read(WHOLE[:end] or b"", 1 + end)[1] is None


def test_an_empty_body():
    assert read(b"0\r\n\r\n") == (b"", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\n0\n\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"1_0\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"\r\n",
        b";x\r\n",
        b"g\r\n",
        b"1g1\r\n",
        b"-1\r\n",
        b"5\r\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"00000000000000001\r\n",
        b"5\r\nhello\r\n0\r\n\n",
        b"\xb2\r\n",
    ],
)
@pytest.mark.parametrize("step", [None, 1])
def test_loose_framing_is_refused(data, step):
    with pytest.raises(BadRequest) as caught:
        read(data, step)
    assert caught.value.status == 400


def test_a_size_line_without_end_is_refused():
    with pytest.raises(BadRequest):
        read(b"5;" + b"x" * 2000, 100)


def test_a_chunk_beyond_the_limit_is_refused_when_it_is_announced():
    assert read(b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n")[0] == b"x" * 1000
    with pytest.raises(BodyTooLarge):
        read(b"3e9\r\n")
    with pytest.raises(BodyTooLarge):
        read(b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n")
    with pytest.raises(BodyTooLarge):
        read(b"ffffffffffffffff\r\n")


@pytest.mark.parametrize("line", [b"A: b\r\n", b"x" * 300])
def test_trailers_are_bounded(line):
    with pytest.raises(HeadersTooLarge):
        read(b"0\r\n" + line * 100)


PIECES = st.one_of(
    st.integers(1, 40).map(lambda size: b"%x\r\n%b\r\n" % (size, b"d" * size)),
    st.integers(1, 40).map(lambda size: b"%04X;e=1\r\n%b\r\n" % (size, b"\r\n" * (size // 2) + b"x" * (size % 2))),
    st.sampled_from(
        [b"\r\n", b"\n", b"0\r\n", b"2\r\nabc\r\n", b"3\r\na", b"+1\r\nx\r\n", b"1 \r\nx\r\n", b"fff\r\n", b"a"]
    ),
)


@given(st.lists(PIECES, max_size=8).map(b"".join), st.booleans(), st.data())
def test_whatever_comes_ends_in_the_same_way_however_it_is_cut(wire, ends, draw):
    wire += b"0\r\n\r\nGET" if ends else b""
    step = draw.draw(st.integers(1, max(1, len(wire))))

    def outcome(step):
        try:
            return read(wire, step, limit=200)
        except (BadRequest, BodyTooLarge) as error:
            return type(error)

    assert outcome(step) == outcome(1)


class TestManySmallChunks:
    WIRE = b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"

    def test_they_are_taken_in_turns(self):
        chunked, turns = ChunkedBody(10000, 200), 1
        rest = chunked.feed(self.WIRE + b"GET")
        while chunked.behind:
            assert rest is None
            rest = chunked.feed(b"")
            turns += 1
        assert rest == b"GET"
        assert chunked.body.whole() == b"x" * 5000
        assert turns == 21  # of 500 lines each

    def test_what_comes_meanwhile_is_not_lost(self):
        chunked = ChunkedBody(10000, 200)
        assert chunked.feed(self.WIRE[:20000]) is None
        assert chunked.behind
        rest = chunked.feed(self.WIRE[20000:] + b"GET")
        while rest is None:
            rest = chunked.feed(b"")
        assert (chunked.body.whole(), rest) == (b"x" * 5000, b"GET")

    def test_a_few_chunks_are_taken_at_once(self):
        chunked = ChunkedBody(10000, 200)
        assert chunked.feed(b"1\r\nx\r\n" * 240 + b"0\r\n\r\n") == b""
        assert not chunked.behind
