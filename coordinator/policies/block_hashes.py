"""The names under which xLLM's prefix caches know blocks of a prompt (xLLM protocol page §8)."""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise

BLOCK_TOKENS = 128
SEED = 1024


def block_hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Hashes of the full blocks, each of which covers everything before it; none where xxhash is not installed.

    h0 = XXH3-128(seed, tokens 0), hi = XXH3-128(seed, h(i-1) | tokens i), tokens as 32-bit little-endian numbers, in
    the byte order in which the engine keeps the hash in memory, which is that of the digest turned round.
    """
    try:
        from xxhash import xxh3_128_digest  # noqa: PLC0415  # of use with this policy alone
    except ImportError:
        return ()
    tokens = array("i", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    data = tokens.tobytes()
    step = BLOCK_TOKENS * tokens.itemsize
    hashes: list[bytes] = []
    last = b""
    for start, end in pairwise(range(0, len(data) + 1, step)):
        last = xxh3_128_digest(last + data[start:end], seed=SEED)[::-1]
        hashes.append(last)
    return tuple(hashes)
