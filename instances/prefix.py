"""A prefix cache: which leading part of a prompt needs no prefill."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


class PrefixCache:
    """Block-wise, least recently used goes first; 0 blocks: no cache."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        self._capacity = capacity_blocks
        self._block_tokens = block_tokens
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.asked_tokens = 0
        self.hit_tokens = 0

    def lookup(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that are cached (whole blocks, never all of it); its blocks are from now on."""
        if not self._capacity:
            return 0
        step = self._block_tokens
        chain = blake2b(digest_size=16)
        cached, hitting = 0, True
        for start in range(0, len(prompt) - step + 1, step):
            chain.update(array("Q", prompt[start : start + step]).tobytes())
            key = chain.digest()
            hitting = hitting and key in self._known
            cached += step if hitting else 0
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        cached = min(cached, max(0, len(prompt) - 1))
        self.asked_tokens += len(prompt)
        self.hit_tokens += cached
        return cached

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
