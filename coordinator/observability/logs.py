"""Set-up of the logs: one stream, text or JSON, one line per record.

Modules log with `logging.getLogger("pd_coordinator.<package>")` and give fields as `extra`:
`log.warning("instance is down", extra={"instance": "p0"})`.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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

    def __init__(self, level: int, style: Style, stream: TextIO, levels: Mapping[str, int]) -> None:
        self._writer = LineWriter(stream)
        self._handler = LineHandler(self._writer, TextFormatter())
        self._restore: list[Callable[[], None]] = []
        self._own_levels: dict[str, int] = {}
        for name in (ROOT, *LIBRARIES):
            self._take(name)
        self.access = AccessLog(logging.getLogger(f"{ROOT}.access"), self._writer)
        self._set(level, style, levels)

    def apply(self, level: str, style: Style, levels: Mapping[str, str]) -> None:
        """Go by these from the next line on.

        Args:
            level: of all loggers of ours, and of libraries where it is higher than warning.
            style: text or json.
            levels: of single loggers, and of those below them, by name.

        Raises:
            ValueError: no such level or style; nothing has changed.
        """
        if style not in ("text", "json"):
            raise ValueError(f"no such log format: {style}")
        numbers = {name: level_number(found) for name, found in levels.items()}
        self._set(level_number(level), style, numbers)

    def belongs_to(self, find: Callable[[], Mapping[str, str]]) -> None:
        """Have lines that are written while a request is worked on carry these fields: its id, and its trace's."""
        self._handler.belongs_to = find

    def _set(self, level: int, style: Style, levels: Mapping[str, int]) -> None:
        for name in self._own_levels:
            logging.getLogger(name).setLevel(self._own_levels[name])
        self._own_levels = {}
        logging.getLogger(ROOT).setLevel(level)
        for library in LIBRARIES:
            logging.getLogger(library).setLevel(max(level, logging.WARNING))
        for name, own in levels.items():
            log = logging.getLogger(name)
            self._own_levels[name] = log.level
            log.setLevel(own)
        self._handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        self.access.as_json = style == "json"

    @property
    def lost(self) -> int:
        """Lines that the stream did not take."""
        return self._writer.lost

    def flush(self) -> None:
        """Write what is buffered; before a fork or an exit that runs no exit handlers."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and leave the loggers as they were before. Idempotent."""
        for name, level in self._own_levels.items():
            logging.getLogger(name).setLevel(level)
        self._own_levels = {}
        while self._restore:
            self._restore.pop()()
        self._handler.close()
        self._writer.flush()

    def _take(self, name: str) -> None:
        log = logging.getLogger(name)
        before = (log.level, log.propagate)

        def give_back() -> None:
            log.removeHandler(self._handler)
            log.setLevel(before[0])
            log.propagate = before[1]

        log.addHandler(self._handler)
        log.propagate = False
        self._restore.append(give_back)


def configure(
    level: str = "info",
    style: Style = "text",
    stream: TextIO | None = None,
    levels: Mapping[str, str] = MappingProxyType({}),
) -> Logs:
    """Send the logs to a stream (standard error by default) until the result is closed.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`, in any case.
        style: `text` or `json`.
        stream: where lines go.
        levels: those of single loggers, by name.

    Raises:
        ValueError: no such level or style.
    """
    numbers = {name: level_number(found) for name, found in levels.items()}
    number = level_number(level)
    if style not in ("text", "json"):
        raise ValueError(f"no such log format: {style}")
    return Logs(number, style, sys.stderr if stream is None else stream, numbers)


def level_number(level: str) -> int:
    """The number of a level by its name, in any case; raises ValueError."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if not number:
        raise ValueError(f"no such log level: {level}")
    return number


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
