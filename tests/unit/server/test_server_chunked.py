import pytest

from coordinator.core.errors import BadRequest, BodyTooLarge, HeadersTooLarge
from coordinator.server.chunked import ChunkedBody

WHOLE = b'5\r\nhello\r\n6;name="v;w"\r\n world\r\n000\r\nTrailer: x\r\nOther: y\r\n\r\n'


def read(data, step=None, limit=1000, trailers=200):
    chunked = ChunkedBody(limit, trailers)
    step = step or len(data)
    for at in range(0, len(data), step):
        rest = chunked.feed(data[at : at + step])
        if rest is not None:
            return bytes(chunked.body), rest + data[at + step :]
    return bytes(chunked.body), None


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
