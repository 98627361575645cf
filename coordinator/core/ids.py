"""Ids on the engines' wires: always our own."""

import itertools
import secrets

WORKER_BITS = 8
RANDOM_BITS = 55
MOST_DIGITS = 20
_WORKERS = 1 << WORKER_BITS


class WireIds:
    """Unique decimal 64-bit ids: process number in the upper bits, then a counter that starts at a random place.

    Two coordinators, or two runs of one, collide only if their random starts lie within as many ids of each other as
    they make. Digits only and at most 20 of them (MindIE protocol page §3.3).
    """

    def __init__(self, worker: int = 0, start: int | None = None) -> None:
        base = secrets.randbits(RANDOM_BITS - 1) if start is None else start
        self._counter = itertools.count(base + 1)
        self._prefix = worker << RANDOM_BITS

    def next(self) -> str:
        """A fresh id."""
        return str(self._prefix | next(self._counter))


def worker_of(wire_id: bytes) -> int | None:
    """The process number in an id; None for what is no id of ours."""
    if not wire_id.isdigit() or len(wire_id) > MOST_DIGITS:
        return None
    worker = int(wire_id) >> RANDOM_BITS
    return worker if worker < _WORKERS else None
