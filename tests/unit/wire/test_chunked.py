"""The chunk decoder: borders kept, every split, limits, broken framing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.chunked import ChunkDecoder, ChunkError


def framed(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks)


def test_chunks_come_out_as_the_sender_made_them() -> None:
    decoder = ChunkDecoder(1000)
    assert decoder.feed(framed(b"one", b"two\r\n", b"")[:-5]) == [b"one", b"two\r\n"]
    assert not decoder.ended


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 64])
def test_every_split_gives_the_same_chunks(size: int) -> None:
    chunks = [b"a", b"bb\r\n", b"x" * 300, b"\0", b"5\r\nfalse"]
    raw = framed(*chunks) + b"0\r\n\r\n"
    decoder, got = ChunkDecoder(1000), []
    for at in range(0, len(raw), size):
        got += decoder.feed(raw[at : at + size])
    assert got == chunks
    assert decoder.ended


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.lists(st.integers(0, 500), max_size=20))
def test_random_splits(chunks: list[bytes], cuts: list[int]) -> None:
    raw = framed(*chunks) + b"0\r\n\r\n"
    points = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    decoder, got = ChunkDecoder(1000), []
    for start, stop in itertools.pairwise(points):
        got += decoder.feed(raw[start:stop])
    assert got == chunks
    assert decoder.ended


def test_a_large_chunk_is_joined_once_its_bytes_are_there() -> None:
    body = bytes(range(256)) * 4096
    raw = framed(body, b"next")
    decoder, got = ChunkDecoder(1 << 21), []
    for at in range(0, len(raw), 65536):
        got += decoder.feed(raw[at : at + 65536])
    assert got == [body, b"next"]


@pytest.mark.parametrize("step", [1, 3, 100, 4096, 10**6])
def test_a_chunk_above_the_limit_is_skipped_and_named(step: int) -> None:
    big = b"reqId:7\0data:" + b"z" * 50_000
    raw = framed(b"before", big, b"after") + b"0\r\n\r\n"
    decoder, got, named = ChunkDecoder(1000), [], []
    for at in range(0, len(raw), step):
        got += decoder.feed(raw[at : at + step])
        named += decoder.oversized
        decoder.oversized.clear()
    assert got == [b"before", b"after"]
    assert named == [big[: ChunkDecoder.HEAD_BYTES]]
    assert decoder.ended


def test_extensions_and_trailers_are_read_over() -> None:
    decoder = ChunkDecoder(100)
    assert decoder.feed(b"3;name=value\r\nabc\r\n0\r\nExpires: never\r\n") == [b"abc"]
    assert not decoder.ended
    assert decoder.feed(b"\r\n") == []
    assert decoder.ended


@pytest.mark.parametrize(
    "raw",
    [b"zz\r\nab\r\n", b"-1\r\nab\r\n", b"0x3\r\nabc\r\n", b"1_0\r\n", b"3\r\nabcd\r\n", b"\r\nabc", b"9" * 300],
)
def test_broken_framing(raw: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkDecoder(1000).feed(raw)


def test_an_endless_trailer_is_refused() -> None:
    decoder = ChunkDecoder(100)
    assert decoder.feed(b"0\r\n" + b"a: b\r\n" * 100) == []
    with pytest.raises(ChunkError):
        decoder.feed(b"a: b\r\n" * 5000)
