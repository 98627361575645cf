"""One line for each finished request."""

import logging
import time
from collections.abc import Callable

from .forms import JSON, TEXT, line
from .lines import Stamper
from .record import RequestRecord
from .writer import LineWriter

__all__ = ["AccessLog", "RequestRecord"]


class AccessLog:
    """Writes the line of a finished request at INFO; where that level is off, it costs nothing.

    The line is put together by hand and goes past `logging`, which would take longer than all the rest of it.

    Args:
        log: decides by its level, and names the line.
        writer: takes the line.
        as_json: one JSON object instead of text.
        wall: seconds since the epoch.
    """

    def __init__(
        self, log: logging.Logger, writer: LineWriter, *, as_json: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._name = log.name
        self._writer = writer
        self._wall = wall
        self.as_json = as_json

    @property
    def as_json(self) -> bool:
        """Whether lines are JSON objects; may be set at any time."""
        return self._form is JSON

    @as_json.setter
    def as_json(self, wanted: bool) -> None:
        self._form = JSON if wanted else TEXT
        self._stamper = Stamper(self._form.start)
        self._head = self._form.head(self._name)

    def finished(self, record: RequestRecord) -> None:
        """Log one request; call it once, when nothing more will happen to it."""
        if self._log.isEnabledFor(logging.INFO):
            wall = self._wall
            self._writer.add(line(self._form, self._stamper.at(wall()), self._head, record))
