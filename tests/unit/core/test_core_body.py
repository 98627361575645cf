from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.body import LongBody

PARTS = st.lists(st.binary(max_size=20).map(lambda part: memoryview(part) if len(part) % 2 else part), max_size=8)


@given(PARTS, st.integers(1, 25))
def test_slices_are_the_whole_in_pieces_of_one_size(parts, most_bytes):
    body = LongBody(parts)
    whole = b"".join(parts)
    slices = [b"".join(buffers) for buffers in body.slices(most_bytes)]
    assert slices == [whole[at : at + most_bytes] for at in range(0, len(whole), most_bytes)]
    assert (bytes(body), len(body)) == (whole, len(whole))
    assert list(map(b"".join, body.slices(most_bytes))) == slices  # a request may be sent more than once


def test_slices_copy_nothing():
    whole = bytes(range(256))
    (first, second) = LongBody([memoryview(whole)[:100], whole]).slices(200)
    assert [part.obj is whole for part in (*first, *second)] == [True] * 3
