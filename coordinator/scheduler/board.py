"""Loads of several processes in shared memory: each writes its own row and reads the sums of the others'."""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .load import Load

WORD_BYTES = 8
HEADER_WORDS = 4
VERSION, LIVE, QUEUED = 0, 1, 2
FIELDS = 4


class Figures(NamedTuple):
    """What one or several processes have put on one instance."""

    requests: int
    blocks: int
    tokens: int
    pinned: int


NOTHING = Figures(0, 0, 0, 0)


class LoadBoard:
    """A table with a row per process and a slot per instance.

    No locks: each word has one writer, and a reader that sees half of an update is off by one request for a moment.

    Args:
        memory: shared by all processes, at least `size_bytes(rows, slots)` long, zeros at first.
        own: the row that this process writes; None for one that only reads and clears.
    """

    def __init__(self, memory: mmap.mmap, rows: int, slots: int, own: int | None = None) -> None:
        self._words = memoryview(memory).cast("q")
        self._rows = rows
        self._slots = slots
        self._width = row_words(slots)
        self._base = 0 if own is None else own * self._width
        self._others = [row * self._width for row in range(rows) if row != own]
        self._seen = [-1] * len(self._others)

    @property
    def slots(self) -> int:
        """Instances that the table has room for."""
        return self._slots

    # --- the own row

    def write(self, slot: int, figures: tuple[int, int, int, int]) -> None:
        """Say what this process has on an instance."""
        words, at = self._words, self._base + HEADER_WORDS + slot * FIELDS
        words[at], words[at + 1], words[at + 2], words[at + 3] = figures
        words[self._base + VERSION] += 1

    def write_process(self, live: int, queued: int) -> None:
        """Say how many requests this process has and how many of them wait."""
        self._words[self._base + LIVE] = live
        self._words[self._base + QUEUED] = queued

    # --- all rows

    def changed(self) -> bool:
        """Whether another process has written since the last call."""
        versions = [self._words[base + VERSION] for base in self._others]
        if versions == self._seen:
            return False
        self._seen = versions
        return True

    def others(self, slot: int) -> Figures:
        """What the other processes have on an instance."""
        return self._sum(self._others, slot)

    def total(self, slot: int) -> Figures:
        """What all processes have on an instance."""
        return self._sum(range(0, self._rows * self._width, self._width), slot)

    def live(self) -> int:
        """Requests of all processes."""
        return sum(self._words[base + LIVE] for base in self._bases())

    def live_elsewhere(self) -> int:
        """Requests of the other processes."""
        return sum(self._words[base + LIVE] for base in self._others)

    def queued(self) -> int:
        """Waiting requests of all processes."""
        return sum(self._words[base + QUEUED] for base in self._bases())

    def clear_row(self, row: int) -> None:
        """Forget a process that has died."""
        base = row * self._width
        for at in range(base + LIVE, base + self._width):
            self._words[at] = 0
        self._words[base + VERSION] += 1

    def clear_slot(self, slot: int) -> None:
        """Make a slot ready for another instance."""
        for base in self._bases():
            at = base + HEADER_WORDS + slot * FIELDS
            self._words[at] = self._words[at + 1] = self._words[at + 2] = self._words[at + 3] = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()

    def _bases(self) -> Iterator[int]:
        return iter(range(0, self._rows * self._width, self._width))

    def _sum(self, bases: "list[int] | range", slot: int) -> Figures:
        words, offset = self._words, HEADER_WORDS + slot * FIELDS
        requests = blocks = tokens = pinned = 0
        for base in bases:
            at = base + offset
            requests += words[at]
            blocks += words[at + 1]
            tokens += words[at + 2]
            pinned += words[at + 3]
        return Figures(requests, blocks, tokens, pinned)


def row_words(slots: int) -> int:
    """Words of one row."""
    return HEADER_WORDS + slots * FIELDS


def size_bytes(rows: int, slots: int) -> int:
    """Bytes of the whole table, in whole pages."""
    size = rows * row_words(slots) * WORD_BYTES
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedLoads:
    """Keeps a scheduler's loads and the board in step.

    Attributes:
        interval_s: how old the other processes' figures may be when a request is placed.
    """

    def __init__(self, board: LoadBoard) -> None:
        self.interval_s = 0.002
        self._board = board
        self._slots: dict[object, int] = {}
        self._read_s = -math.inf

    def assign(self, slots: Mapping[object, int]) -> None:
        """Take over where instances stand, by their keys."""
        self._slots = dict(slots)

    def place(self, load: "Load") -> None:
        """Give a load its place and write it there."""
        load.slot = self._slots.get(load.instance.key)
        self.publish(load)

    def publish(self, load: "Load") -> None:
        """Write what this process has on an instance."""
        if load.slot is not None:
            self._board.write(load.slot, load.own)

    def refresh(self, loads: Iterable["Load"], now_s: float) -> list["Load"]:
        """Read what the others have, unless that was done just now; returns the loads that have changed."""
        if now_s - self._read_s < self.interval_s:
            return []
        self._read_s = now_s
        if not self._board.changed():
            return []
        board = self._board
        return [load for load in loads if load.slot is not None and load.take_others(board.others(load.slot))]
