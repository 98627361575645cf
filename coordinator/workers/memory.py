"""The memory that all processes share: the board of loads, and behind it the uses of keys."""

import mmap

from coordinator import scheduler
from coordinator.security import uses


def size_bytes(workers: int, slots: int) -> int:
    """How much is needed for so many workers and instances."""
    return scheduler.size_bytes(workers, slots) + uses.size_bytes(workers)


def uses_words(memory: mmap.mmap, workers: int, slots: int) -> uses.Words:
    """The part that counts what keys are used for."""
    start = scheduler.size_bytes(workers, slots)
    return memoryview(memory)[start : start + uses.size_bytes(workers)].cast("q")
