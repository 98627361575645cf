"""The `Date` of answers (RFC 9110 §6.6.1)."""

import time
from collections.abc import Callable
from email.utils import formatdate


class DateLine:
    """The header line that belongs to an answer at this moment, written down once a second.

    Args:
        wall: seconds since the epoch.
    """

    __slots__ = ("_line", "_second", "_wall")

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._second = -1
        self._line = b""

    def __call__(self) -> bytes:
        """`Date: ...`, with its line end."""
        second = int(self._wall())
        if second != self._second:
            self._second = second
            self._line = b"Date: %b\r\n" % formatdate(second, usegmt=True).encode("ascii")
        return self._line
