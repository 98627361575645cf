"""Warnings that come by the hundred: the first ones are written, of the others how many there were."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 10.0
BURST = 20
MESSAGES = 200

Key = tuple[str, str]


@dataclass(slots=True)
class _Window:
    """What has come of one message since it was first written.

    Attributes:
        seen: the texts that were written.
        held: how many were not.
        last: the last one that was not.
    """

    since_s: float
    seen: set[str] = field(default_factory=set)
    held: int = 0
    last: logging.LogRecord | None = None


class Repeats:
    """Decides which records are written.

    A message is what a logger says before the arguments are put in. Within `WINDOW_S` its first `BURST` different texts
    are written, each once; what comes beyond that is counted, and told in one record when the time is over: the last of
    them, with "... repeated N times in M s" behind it. Records below WARNING are not looked at.

    Args:
        write: takes the record that tells the count.
        clock: monotonic seconds.
    """

    def __init__(
        self, write: Callable[[logging.LogRecord], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._windows: dict[Key, _Window] = {}

    def passes(self, record: logging.LogRecord) -> bool:
        """Whether to write this record; if not, it is counted."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock()
        self._tell_over(now_s)
        key = (record.name, str(record.msg))
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= MESSAGES:
                return True  # messages are literals in the code, so this is not to be; better too much than nothing
            window = self._windows[key] = _Window(now_s)
        text = record.getMessage()
        if text not in window.seen and len(window.seen) < BURST:
            window.seen.add(text)
            return True
        window.held += 1
        window.last = record
        if window.held == 1:
            self._look_later(window.since_s + WINDOW_S - now_s)
        return False

    def flush(self) -> None:
        """Tell all counts now."""
        for window in self._windows.values():
            self._tell(window, self._clock())
        self._windows.clear()

    def _tell_over(self, now_s: float) -> None:
        """Tell what has been counted in windows that are over."""
        over = [key for key, window in self._windows.items() if now_s - window.since_s >= WINDOW_S]
        for key in over:
            self._tell(self._windows.pop(key), now_s)

    def _tell(self, window: _Window, now_s: float) -> None:
        last = window.last
        if last is None:
            return
        told = logging.makeLogRecord(last.__dict__)
        text = last.getMessage()
        times = "once" if window.held == 1 else f"{window.held} times"
        told.args = None
        told.msg = f"{text} ... repeated {times} in {max(1, round(now_s - window.since_s))} s"
        self._write(told)

    def _look_later(self, delay_s: float) -> None:
        """Have the count told even if nothing else comes; without an event loop the next record does it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        loop.call_later(max(0.0, delay_s), lambda: self._tell_over(self._clock()))
