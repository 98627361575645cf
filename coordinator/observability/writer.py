"""Log lines to a stream, many with one system call."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from .repeats import Repeats

FLUSH_AFTER_S = 0.1
FLUSH_CHARS = 65536


class LineWriter:
    """Collects lines and writes them at the latest after `FLUSH_AFTER_S` or `FLUSH_CHARS`, and when told to.

    A write from outside an event loop goes out at once. A stream that takes nothing any more (a closed pipe) costs its
    lines, which are counted in `lost`; it never fails a request. May be used from any thread.

    Args:
        stream: where the lines go; it is flushed, but never closed.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.lost = 0
        self._stream = stream
        self._clock = clock
        # re-entrant: the garbage collector may log (a task that nobody awaited) while this thread is in here
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._chars = 0
        self._late_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: str) -> None:
        """Add one line; it has no line end of its own."""
        self.add(line)
        # the age counts where the timer does not fire: its loop is gone or does not get to it
        if self._lines and self._clock() > self._late_s:
            self._look(first=False)

    def add(self, line: str) -> None:
        """The same, for what an event loop's own work writes again and again: such a loop gets to its timer. Hot.

        It takes no lock: appending to a list is one step for all threads, and `flush` takes out what it has seen and
        nothing else. Whoever finds the list empty, or nobody to write it, sees to that under the lock.
        """
        lines = self._lines
        first = not lines
        lines.append(line)
        self._chars += len(line)  # of two threads at once, one may not count: it is no more than a measure
        if first or self._chars >= FLUSH_CHARS or self._timer is None:
            self._look(first=first)

    def flush(self) -> None:
        """Write what is there."""
        with self._lock:
            self._chars = 0
            lines = self._lines[:]
            del self._lines[: len(lines)]
            if lines:
                self._put(lines)

    def _look(self, *, first: bool) -> None:
        """See that the lines get written: soon, or now where there is no loop, or too much, or what is too old."""
        with self._lock:
            now_s = self._clock()
            if first:
                self._late_s = now_s + 2 * FLUSH_AFTER_S
            self._arm()
            if self._timer is None or self._chars >= FLUSH_CHARS or now_s > self._late_s:
                self.flush()

    def _arm(self) -> None:
        # a timer belongs to its loop's thread: it is never cancelled from here, at worst it finds nothing to write
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(FLUSH_AFTER_S, self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._loop is loop:
                self._loop = self._timer = None
            self.flush()

    def _put(self, lines: list[str]) -> None:
        text = "\n".join(lines) + "\n"
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += len(lines)


class LineHandler(logging.Handler):
    """Takes log records to a `LineWriter`; a warning or worse goes out at once, with all before it.

    Args:
        clock: monotonic seconds.

    Attributes:
        belongs_to: fields of the request whose work runs just now; asked for each record that does not name one.
    """

    def __init__(
        self, writer: LineWriter, formatter: logging.Formatter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._writer = writer
        self._repeats = Repeats(self._put, clock=clock)
        self.belongs_to: Callable[[], Mapping[str, str]] | None = None
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write one record; a record that cannot be formatted is named without its content."""
        try:
            if not self._repeats.passes(record):
                return
            if self.belongs_to is not None and "request" not in record.__dict__:
                record.__dict__.update(self.belongs_to())
        except Exception as error:  # noqa: BLE001 - a border: no log call may fail its caller
            self._writer.write(_unreadable(record, error))
            return
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a border: no log call may fail its caller
            line = _unreadable(record, error)
        self._writer.write(line)
        if record.levelno >= logging.WARNING:
            self._writer.flush()

    def flush(self) -> None:
        """Write what is there; `logging` calls this on exit."""
        self._writer.flush()

    def close(self) -> None:
        """Tell what was counted; `logging` calls this on exit."""
        self._repeats.flush()
        super().close()


def _unreadable(record: logging.LogRecord, error: Exception) -> str:
    return f"log record of {record.name} line {record.lineno} is unreadable: {type(error).__name__}"
