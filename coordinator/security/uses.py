"""How much each key is used, by all processes together, and whether it may have one more.

The numbers lie in a table with a row for each process, which writes its own row alone; a reader adds them up. Two
processes that admit at the same moment may go one above a limit, each.
"""

import itertools
import time
from collections.abc import Callable
from typing import Final

from coordinator.core.errors import KeyLimitReached
from coordinator.security.keys import Key

SLOTS: Final = 1000
PERIOD_S: Final = 5
PERIODS: Final = 12  # a minute
_WINDOW_S: Final = PERIOD_S * PERIODS
_RING: Final = PERIODS + 1  # the current one and a whole minute before it: no minute can hold more than the limit
_WORDS: Final = _RING + 1
_WORD_BYTES: Final = 8
_COUNT_BITS: Final = 24
_COUNT: Final = (1 << _COUNT_BITS) - 1

Words = memoryview


def size_bytes(rows: int) -> int:
    """Bytes of a table for so many processes."""
    return rows * SLOTS * _WORDS * _WORD_BYTES


def own_words() -> Words:
    """A table for a single process."""
    return memoryview(bytearray(size_bytes(1))).cast("q")


class KeyUses:
    """Admits requests of keys.

    Args:
        words: the table, of 64-bit numbers, zeros at first; shared by all processes.
        row: the row that this process writes.
        clock: monotonic seconds, the same for all processes.
    """

    def __init__(self, words: Words, row: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        width = SLOTS * _WORDS
        self._words = words
        self._own = row * width
        self._bases = tuple(range(0, len(words), width))
        self._clock = clock
        self._in_flight: dict[str, int] = {}
        self._slots: dict[str, int] = {}

    def assign(self, slots: dict[str, int]) -> None:
        """Take the keys' places in the table, by name. A key that has gone leaves its place empty."""
        for name, slot in self._slots.items():
            if slots.get(name) != slot:
                self._clear(slot)
                self._in_flight.pop(name, None)
        self._slots = dict(slots)

    def admit(self, key: Key) -> None:
        """Count one more request of a key, which `release` ends. Hot.

        Raises:
            KeyLimitReached: the key has its fill; nothing was counted.
        """
        at = key.slot * _WORDS
        now_s = self._clock()
        if key.max_in_flight is not None and self._live(at) >= key.max_in_flight:
            raise KeyLimitReached(f"the API key has {key.max_in_flight} requests in flight, its limit", retry_after_s=1)
        if key.requests_per_minute is not None:
            self._count(at, now_s, key.requests_per_minute)
        live = self._in_flight[key.name] = self._in_flight.get(key.name, 0) + 1
        self._words[self._own + at] = live

    def release(self, key: Key) -> None:
        """End what `admit` began."""
        live = self._in_flight.get(key.name)
        if live is None or self._slots.get(key.name, key.slot) != key.slot:
            return  # the key is gone, and its place may be another's
        self._in_flight[key.name] = live - 1
        self._words[self._own + key.slot * _WORDS] = live - 1

    def _live(self, at: int) -> int:
        return sum(self._words[base + at] for base in self._bases)

    def _count(self, at: int, now_s: float, limit: int) -> None:
        words = self._words
        period = int(now_s) // PERIOD_S
        oldest = period - PERIODS
        rings = (words[base + at + 1 : base + at + _WORDS].tolist() for base in self._bases)
        counted = [word for word in itertools.chain.from_iterable(rings) if word >> _COUNT_BITS >= oldest]
        if sum(word & _COUNT for word in counted) >= limit:
            first = min(word for word in counted if word & _COUNT) >> _COUNT_BITS
            wait_s = (first + _RING) * PERIOD_S - now_s
            raise KeyLimitReached(
                f"the API key has made {limit} requests within a minute, its limit",
                retry_after_s=max(1, min(_WINDOW_S + PERIOD_S, int(wait_s) + 1)),
            )
        place = self._own + at + 1 + period % _RING
        word = words[place]
        words[place] = word + 1 if word >> _COUNT_BITS == period else period << _COUNT_BITS | 1

    def _clear(self, slot: int) -> None:
        at = self._own + slot * _WORDS
        for word in range(at, at + _WORDS):
            self._words[word] = 0


def clear_row(words: Words, row: int) -> None:
    """Forget the requests in flight of a process that has ended; what it had admitted within the minute counts on."""
    base = row * SLOTS * _WORDS
    for at in range(base, base + SLOTS * _WORDS, _WORDS):
        words[at] = 0
