"""Loads of several processes in shared memory: each writes its own row and reads the sums of the others'."""

import mmap
from collections.abc import Iterable
from typing import NamedTuple

WORD_BYTES = 8
VERSION, LIVE, QUEUED, VIEW, BEAT = range(5)
HEADER_WORDS = 8
JOURNAL = 256
FIELDS = 5
FAULTS = 4


class Figures(NamedTuple):
    """What one or several processes have put on one instance."""

    requests: int
    blocks: int
    tokens: int
    pinned: int


NOTHING = Figures(0, 0, 0, 0)


class LoadBoard:
    """A table with a row per process and a slot per instance.

    A row is a header, a journal of the slots that were written last, and the slots. No locks: each word has one writer,
    and a reader that sees half of an update is off by one request until its next look.

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
        self._bases = [row * self._width for row in range(rows)]
        self._others = [base for row, base in enumerate(self._bases) if row != own]
        self._seen = [-1] * len(self._others)
        self._version = self._words[self._base + VERSION]

    @property
    def slots(self) -> int:
        """Instances that the table has room for."""
        return self._slots

    # --- the own row

    def write(self, slot: int, figures: tuple[int, int, int, int]) -> None:
        """Say what this process has on an instance. Hot."""
        words, base, version = self._words, self._base, self._version
        at = base + HEADER_WORDS + JOURNAL + slot * FIELDS
        words[at], words[at + 1], words[at + 2], words[at + 3] = figures
        words[base + HEADER_WORDS + version % JOURNAL] = slot
        words[base + VERSION] = self._version = version + 1

    def write_live(self, live: int) -> None:
        """Say how many requests this process has."""
        self._words[self._base + LIVE] = live

    def write_queued(self, queued: int) -> None:
        """Say how many of them wait for an instance."""
        self._words[self._base + QUEUED] = queued

    def write_view(self, number: int) -> None:
        """Say which picture of the cluster this process goes by."""
        self._words[self._base + VIEW] = number

    def beat(self) -> None:
        """Say that this process is alive."""
        self._words[self._base + BEAT] += 1

    def count_fault(self, slot: int) -> None:
        """Say that a request of this process has failed there."""
        self._words[self._base + HEADER_WORDS + JOURNAL + slot * FIELDS + FAULTS] += 1

    # --- all rows

    def changes(self) -> set[int] | None:
        """Slots that other processes have written since the last call; None: too many to tell."""
        words, seen = self._words, self._seen
        slots: set[int] = set()
        complete = True
        for index, base in enumerate(self._others):
            version, known = words[base + VERSION], seen[index]
            if version == known:
                continue
            seen[index] = version
            if known < 0 or version - known > JOURNAL // 2:  # the writer goes on meanwhile: half is left to it
                complete = False
            else:
                journal = base + HEADER_WORDS
                slots.update(words[journal + number % JOURNAL] for number in range(known, version))
        return slots if complete else None

    def others(self, slot: int) -> Figures:
        """What the other processes have on an instance."""
        return self._sum(self._others, slot)

    def total(self, slot: int) -> Figures:
        """What all processes have on an instance."""
        return self._sum(self._bases, slot)

    def faults(self, slot: int) -> int:
        """Failed requests of all processes there; it differs from what it was before if there were new ones."""
        words, offset = self._words, HEADER_WORDS + JOURNAL + slot * FIELDS + FAULTS
        return sum(words[base + offset] for base in self._bases)

    def live(self) -> int:
        """Requests of all processes."""
        return sum(self._words[base + LIVE] for base in self._bases)

    def live_elsewhere(self) -> int:
        """Requests of the other processes."""
        return sum(self._words[base + LIVE] for base in self._others)

    def queued(self) -> int:
        """Waiting requests of all processes."""
        return sum(self._words[base + QUEUED] for base in self._bases)

    def queued_elsewhere(self) -> int:
        """Waiting requests of the other processes."""
        return sum(self._words[base + QUEUED] for base in self._others)

    def live_of(self, row: int) -> int:
        """Requests of one process."""
        return self._words[self._bases[row] + LIVE]

    def view_of(self, row: int) -> int:
        """The picture of the cluster that a process goes by; 0: none yet."""
        return self._words[self._bases[row] + VIEW]

    def beat_of(self, row: int) -> int:
        """A number that changes while a process is alive."""
        return self._words[self._bases[row] + BEAT]

    def clear_row(self, row: int) -> None:
        """Forget a process that has ended; its place may be taken by another."""
        base = self._bases[row]
        for at in range(base + LIVE, base + self._width):
            self._words[at] = 0
        self._words[base + VERSION] += JOURNAL  # more than anybody follows by the journal: all is read again

    def clear_slot(self, slot: int) -> None:
        """Make a slot ready for another instance."""
        for base in self._bases:
            at = base + HEADER_WORDS + JOURNAL + slot * FIELDS
            for word in range(at, at + FIELDS):
                self._words[word] = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()

    def _sum(self, bases: Iterable[int], slot: int) -> Figures:
        words, offset = self._words, HEADER_WORDS + JOURNAL + slot * FIELDS
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
    return HEADER_WORDS + JOURNAL + slots * FIELDS


def size_bytes(rows: int, slots: int) -> int:
    """Bytes of the whole table, in whole pages."""
    size = rows * row_words(slots) * WORD_BYTES
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
