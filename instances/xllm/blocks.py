"""Numbers of KV blocks, and the prefix cache with what it tells the service."""

import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import xxhash

from instances.prefix import PrefixCache
from instances.xllm import vocabulary
from instances.xllm.proto.service_pb2 import KvCacheEvent

_SEED = 1024


class BlockIds:
    """Which block numbers are free; how many there may be is the ledger's business."""

    def __init__(self) -> None:
        self._fresh = itertools.count(1)
        self._free: deque[int] = deque()

    def take(self, count: int) -> list[int]:
        """Numbers that nobody has."""
        return [self._free.popleft() if self._free else next(self._fresh) for _ in range(count)]

    def give(self, numbers: Iterable[int]) -> None:
        """They are free again."""
        self._free.extend(numbers)


def chain(wire_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """The hash of each full block, that of the one before it included (xLLM protocol page §8)."""
    hashes: list[bytes] = []
    before = b""
    for start in range(0, len(wire_ids) - block_tokens + 1, block_tokens):
        ids = array("i", wire_ids[start : start + block_tokens])
        # the order of bytes in memory is that of the struct: low half first, each little-endian
        before = xxhash.xxh3_128_digest(before + ids.tobytes(), seed=_SEED)[::-1]
        hashes.append(before)
    return hashes


class TellingCache:
    """The prefix cache of an instance, and the events that heartbeats carry.

    Args:
        prefix: the cache itself.
        capacity_blocks: how many blocks it holds.
        block_tokens: tokens per block.
        tells: whether events are kept.
    """

    def __init__(self, prefix: PrefixCache, capacity_blocks: int, block_tokens: int, *, tells: bool) -> None:
        self._prefix = prefix
        self._capacity = capacity_blocks
        self._block_tokens = block_tokens
        self._tells = tells and capacity_blocks > 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def lookup(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that are cached; its blocks are from now on."""
        if self._tells:
            for key in chain([vocabulary.to_wire(token) for token in prompt], self._block_tokens):
                if key not in self._known:
                    self._change(key, self._removed, self._stored)
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > self._capacity:
                key, _ = self._known.popitem(last=False)
                self._change(key, self._stored, self._removed)
        return self._prefix.lookup(prompt)

    @staticmethod
    def _change(key: bytes, untold: dict[bytes, None], to_tell: dict[bytes, None]) -> None:
        """What is undone before it was told is not told at all."""
        if key in untold:
            del untold[key]
        else:
            to_tell[key] = None

    def events(self) -> KvCacheEvent:
        """What happened since this was asked last."""
        event = KvCacheEvent(stored_cache=list(self._stored), removed_cache=list(self._removed))
        self._stored.clear()
        self._removed.clear()
        return event

    def clear(self) -> None:
        """Forget everything, and tell nobody: as after a restart."""
        for kept in (self._known, self._stored, self._removed):
            kept.clear()
