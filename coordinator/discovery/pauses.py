"""How long to wait before the next try."""

import random

SPREAD = 0.5


class Pauses:
    """Pauses that double from one failure to the next, spread at random so that many who wait do not come at once.

    Args:
        first_s: the first one, before it is spread by half of itself to either side.
        longest_s: no pause is longer before it is spread.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause_s * random.uniform(1 - SPREAD, 1 + SPREAD)  # noqa: S311  # no secret

    def reset(self) -> None:
        """It went well: the next failure is a first one."""
        self._next_s = self._first_s
