import gzip
import zlib

import pytest

from coordinator.transport.expand import MAX_EXPANDED_PER_FEED, PIECE_BYTES, Expander, ExpansionError

TEXT = "你好🌍 ".encode() * 500


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED = {b"gzip": gzip.compress(TEXT), b"x-gzip": gzip.compress(TEXT), b"deflate": zlib.compress(TEXT)}


def expand(encoding, *pieces):
    expander = Expander(encoding)
    return b"".join(b"".join(expander.feed(piece)) for piece in pieces), expander


@pytest.mark.parametrize("encoding", PACKED)
def test_whole_and_byte_by_byte(encoding):
    packed = PACKED[encoding]
    for pieces in ([packed], [packed[i : i + 1] for i in range(len(packed))]):
        text, expander = expand(encoding, *pieces)
        assert text == TEXT
        assert expander.finished


def test_deflate_without_its_zlib_header_split_everywhere():
    packed = raw_deflate(TEXT)
    for cut in range(len(packed) + 1):
        text, expander = expand(b"deflate", packed[:cut], packed[cut:])
        assert text == TEXT
        assert expander.finished


def test_members_of_gzip_in_a_row_split_everywhere():
    packed = gzip.compress(b"one ") + gzip.compress(b"two")
    for cut in range(len(packed) + 1):
        text, expander = expand(b"gzip", packed[:cut], packed[cut:])
        assert text == b"one two"
        assert expander.finished


@pytest.mark.parametrize("encoding", PACKED)
def test_cut_body_is_not_finished(encoding):
    text, expander = expand(encoding, PACKED[encoding][:-1])
    assert text in (TEXT, TEXT[: len(text)])
    assert not expander.finished


@pytest.mark.parametrize("encoding", PACKED)
def test_empty_body_is_finished(encoding):
    assert Expander(encoding).finished


def test_one_byte_of_deflate_is_not_finished():
    assert not expand(b"deflate", b"\x78")[1].finished


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, gzip", b"compress"])
def test_other_encodings_are_refused(encoding):
    with pytest.raises(ExpansionError) as caught:
        Expander(encoding)
    assert not caught.value.bomb


@pytest.mark.parametrize(("encoding", "data"), [(b"gzip", b"not gzip"), (b"deflate", b"\xff\xff\xff")])
def test_corrupt_data(encoding, data):
    with pytest.raises(ExpansionError, match="corrupt") as caught:
        expand(encoding, data)
    assert not caught.value.bomb


def test_data_after_a_deflate_body():
    with pytest.raises(ExpansionError, match="after"):
        expand(b"deflate", zlib.compress(b"x") + b"more")


def test_bomb_is_stopped_at_the_bound():
    bomb = gzip.compress(bytes(4 * MAX_EXPANDED_PER_FEED))
    assert len(bomb) < 100_000
    sizes = []
    with pytest.raises(ExpansionError) as caught:
        sizes.extend(map(len, Expander(b"gzip").feed(bomb)))
    assert caught.value.bomb
    assert max(sizes) <= PIECE_BYTES
    assert sum(sizes) <= MAX_EXPANDED_PER_FEED


def test_output_of_exactly_one_piece_ends():
    plain = bytes(PIECE_BYTES)
    text, expander = expand(b"gzip", gzip.compress(plain))
    assert text == plain
    assert expander.finished
