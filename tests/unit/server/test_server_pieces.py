import random
import tracemalloc

import pytest

from coordinator.server.pieces import LONG_BYTES, Pieces

MIB = 1 << 20


def gathered(data, size):
    pieces = Pieces()
    for at in range(0, len(data), size):
        pieces.add(data[at : at + size])
    return pieces


@pytest.mark.parametrize("size", [1, 7, 1000, 16383, 16384, 16385, 65536, 300000])
def test_the_whole_is_what_came(size):
    data = random.Random(size).randbytes(300000)
    pieces = gathered(data, size)
    assert len(pieces) == len(data)
    assert pieces.whole() == data


def test_small_and_large_pieces_keep_their_order():
    sizes = [random.Random(3).choice([1, 5, 20000, 70000]) for _ in range(200)]
    pieces, wanted = Pieces(), b""
    for number, size in enumerate(sizes):
        piece = bytes([number % 256]) * size
        pieces.add(piece)
        wanted += piece
    assert pieces.whole() == wanted


def test_what_is_long():
    pieces = Pieces()
    pieces.add(bytes(LONG_BYTES - 1))
    assert not pieces.long
    pieces.add(b"x")
    assert pieces.long


@pytest.mark.parametrize("size", [1, 100, 16384, 262144])
def test_memory_is_the_size_of_the_body_whatever_the_pieces(size):
    data = bytes(MIB)
    tracemalloc.start()
    try:
        pieces = gathered(data, size)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(pieces) == MIB
    assert kept < 1.3 * MIB
