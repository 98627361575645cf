"""Set-up of the logs: one stream, text or JSON, one line per record.

Modules log with `logging.getLogger("pd_coordinator.<package>")` and give fields as `extra`:
`log.warning("instance is down", extra={"instance": "p0"})`.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from .access import AccessLog
from .formats import ROOT, JsonFormatter, TextFormatter
from .writer import LineHandler, LineWriter

LIBRARIES = ("asyncio", "aiohttp")
"""Loggers of libraries that report through the same stream, warnings and worse only."""

Style = Literal["text", "json"]


class Logs:
    """The logs of this process, from set-up to `close`.

    Attributes:
        access: the log of finished requests.
    """

    def __init__(self, level: int, style: Style, stream: TextIO) -> None:
        self._writer = LineWriter(stream)
        self._handler = LineHandler(self._writer, JsonFormatter() if style == "json" else TextFormatter())
        self._restore: list[Callable[[], None]] = []
        self._take(ROOT, level)
        for library in LIBRARIES:
            self._take(library, max(level, logging.WARNING))
        self.access = AccessLog(logging.getLogger(f"{ROOT}.access"), self._writer, as_json=style == "json")

    @property
    def lost(self) -> int:
        """Lines that the stream did not take."""
        return self._writer.lost

    def flush(self) -> None:
        """Write what is buffered; before a fork or an exit that runs no exit handlers."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and leave the loggers as they were before. Idempotent."""
        while self._restore:
            self._restore.pop()()
        self._handler.close()
        self._writer.flush()

    def _take(self, name: str, level: int) -> None:
        log = logging.getLogger(name)
        before = (log.level, log.propagate)

        def give_back() -> None:
            log.removeHandler(self._handler)
            log.setLevel(before[0])
            log.propagate = before[1]

        log.addHandler(self._handler)
        log.setLevel(level)
        log.propagate = False
        self._restore.append(give_back)


def configure(level: str = "info", style: Style = "text", stream: TextIO | None = None) -> Logs:
    """Send the logs to a stream (standard error by default) until the result is closed.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`, in any case.
        style: `text` or `json`.
        stream: where lines go.

    Raises:
        ValueError: no such level or style.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if not number:
        raise ValueError(f"no such log level: {level}")
    if style not in ("text", "json"):
        raise ValueError(f"no such log format: {style}")
    return Logs(number, style, sys.stderr if stream is None else stream)


class LimitedLog:
    """A logger for what may happen a thousand times a second: the first one is logged, then one per interval.

    Each message (the text before its arguments are put in) is counted for itself; the line that comes after a pause
    says in `left_out` how many were not written.

    Args:
        log: where the lines go.
        interval_s: the shortest time between two lines of one message.
        clock: monotonic seconds.
    """

    MESSAGES = 100

    def __init__(
        self, log: logging.Logger, interval_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, args: Sequence[object] = (), **fields: object) -> bool:
        """Log `message % args` with these fields, or count it as left out; tells whether it was logged."""
        if not self._log.isEnabledFor(level):
            return False
        # messages are literals in the code; should one be made up on the fly, those share a count
        key = message if message in self._seen or len(self._seen) < self.MESSAGES else ""
        now_s = self._clock()
        next_s, left_out = self._seen.get(key, (now_s, 0))
        if now_s < next_s:
            self._seen[key] = (next_s, left_out + 1)
            return False
        self._seen[key] = (now_s + self._interval_s, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.log(level, message, *args, extra=fields, stacklevel=2)
        return True

    def warning(self, message: str, *args: object, **fields: object) -> bool:
        """`log` at the level of a warning."""
        return self.log(logging.WARNING, message, args, **fields)

    def info(self, message: str, *args: object, **fields: object) -> bool:
        """`log` at the level of information."""
        return self.log(logging.INFO, message, args, **fields)
