"""How much each key is used, by all processes together, and whether it may have one more.

The numbers lie in a table with a row for each process, which writes its own row alone; a reader adds them up. Two
processes that admit at the same moment may go one above a limit, each.
"""

import math
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


class Use:
    """What this process has of one key.

    Attributes:
        at: where its words begin, in this process's row.
        live: requests that are there.
        until_s: end of the last period in which one was admitted.
        period: that period.
        counted: requests of that period and of the minute before it.
        place: where the word of that period is.
        word: what it holds.
    """

    __slots__ = ("at", "counted", "live", "period", "place", "until_s", "word")

    def __init__(self, at: int) -> None:
        self.at = self.place = at
        self.live = self.counted = self.word = 0
        self.until_s = -math.inf
        self.period = -1


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
        self._others = tuple(base - self._own for base in range(0, len(words), width) if base != self._own)
        self._clock = clock
        self._uses: dict[int, Use] = {}
        self._slots: dict[str, int] = {}

    def assign(self, slots: dict[str, int]) -> None:
        """Take the keys' places in the table, by name. A key that has gone leaves its place empty."""
        for name, slot in self._slots.items():
            if slots.get(name) != slot:
                self._clear(slot)
                self._uses.pop(slot, None)
        self._slots = dict(slots)

    def admit(self, key: Key) -> Use:
        """Count one more request of a key, which `release` ends; hot.

        Returns:
            What `release` wants.

        Raises:
            KeyLimitReached: the key has its fill; nothing was counted.
        """
        use = self._uses.get(key.slot)
        if use is None:
            use = self._uses[key.slot] = Use(self._own + key.slot * _WORDS)
        others = self._others
        most = key.max_in_flight
        if most is not None and (use.live + self._live_elsewhere(use.at) if others else use.live) >= most:
            raise KeyLimitReached(f"the API key has {most} requests in flight, its limit", retry_after_s=1)
        most = key.requests_per_minute
        if most is not None:
            clock = self._clock
            now_s = clock()
            if now_s >= use.until_s:
                self._turn(use, now_s)
            if (use.counted + self._minute_elsewhere(use) if others else use.counted) >= most:
                raise KeyLimitReached(
                    f"the API key has made {most} requests within a minute, its limit",
                    retry_after_s=self._free_in_s(use.at, use.period, now_s),
                )
            use.counted += 1
            use.word = self._words[use.place] = use.word + 1
        use.live += 1
        if others:  # nobody else looks there
            self._words[use.at] = use.live
        return use

    def release(self, use: Use) -> None:
        """End what `admit` began."""
        use.live -= 1
        if self._others and self._uses.get((use.at - self._own) // _WORDS) is use:
            self._words[use.at] = use.live  # else its key is gone, and its place may be another's

    def _live_elsewhere(self, at: int) -> int:
        return sum(self._words[at + other] for other in self._others)

    def _minute_elsewhere(self, use: Use) -> int:
        return sum(self._sum(use.at + other, use.period) for other in self._others)

    def _turn(self, use: Use, now_s: float) -> None:
        """Begin another period."""
        period = int(now_s) // PERIOD_S
        use.period = period
        use.until_s = (period + 1) * PERIOD_S
        use.counted = self._sum(use.at, period)
        use.place = use.at + 1 + period % _RING
        word = self._words[use.place]
        use.word = word if word >> _COUNT_BITS == period else period << _COUNT_BITS

    def _recent(self, at: int, period: int) -> list[int]:
        """The words of a row that count for this period: those of a minute before it, and its own."""
        oldest = period - PERIODS
        return [word for word in self._words[at + 1 : at + _WORDS].tolist() if word >> _COUNT_BITS >= oldest]

    def _sum(self, at: int, period: int) -> int:
        return sum(word & _COUNT for word in self._recent(at, period))

    def _free_in_s(self, at: int, period: int, now_s: float) -> int:
        """Seconds until the oldest of those that count does so no longer."""
        words = [word for other in (0, *self._others) for word in self._recent(at + other, period) if word & _COUNT]
        first = min(words) >> _COUNT_BITS
        return max(1, min(_WINDOW_S + PERIOD_S, int((first + _RING) * PERIOD_S - now_s) + 1))

    def _clear(self, slot: int) -> None:
        at = self._own + slot * _WORDS
        for word in range(at, at + _WORDS):
            self._words[word] = 0


def clear_row(words: Words, row: int) -> None:
    """Forget the requests in flight of a process that has ended; what it had admitted within the minute counts on."""
    base = row * SLOTS * _WORDS
    for at in range(base, base + SLOTS * _WORDS, _WORDS):
        words[at] = 0
