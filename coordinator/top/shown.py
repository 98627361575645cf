"""What the feed has told so far."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.management.live_picture import COLUMNS, HISTORY, Figures, Row
from coordinator.observability.recent import MOST_PATHS, Failure, Path


class Shown:
    """Puts events together.

    Attributes:
        events: how many have come.
        at_s: time of the last one, by the coordinator's clock.
        rates: requests and tokens a second of the last minutes, oldest first; None where nobody knows.
    """

    def __init__(self) -> None:
        self.events = 0
        self.at_s = 0.0
        self.about: dict[str, Any] = {}
        self.figures: Figures | None = None
        self.instances: list[Row] = []
        self.paths: list[Path] = []
        self.failures: list[Failure] = []
        self.rates: deque[tuple[float | None, float | None]] = deque(maxlen=HISTORY)
        self._columns: list[str] = []

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Take an event; raises ValueError (msgspec.ValidationError included), IndexError or KeyError if it is odd."""
        self.figures = msgspec.convert(data["figures"], Figures)
        self.at_s = float(data["at_s"])
        if kind == "snapshot":
            self._begin(data)
        else:
            for position, *values in data.get("rows", ()):
                named = {**self.instances[position]._asdict(), **self._named(values)}
                self.instances[position] = _row(named)
            self.paths = [*_paths(data.get("paths", ())), *self.paths][:MOST_PATHS]
            moving = self.figures.moving
            self.rates.append((moving.requests_s, moving.tokens_s))
        if data.get("failures") is not None:
            self.failures = msgspec.convert(data["failures"], list[Failure])
        self.events += 1

    def as_data(self) -> dict[str, object]:
        """Everything, for programs."""
        return {
            "at_s": self.at_s,
            "about": self.about,
            "figures": self.figures,
            "instances": [one._asdict() for one in self.instances],
            "paths": self.paths,
            "failures": self.failures,
        }

    def _begin(self, data: dict[str, Any]) -> None:
        self.about = data["about"]
        self._columns = data["columns"]
        self.instances = [_row(self._named(row)) for row in data["rows"]]
        self.paths = _paths(data["paths"])
        at = {name: data["points"].index(name) for name in ("requests_s", "tokens_s")}
        self.rates.clear()
        self.rates.extend((point[at["requests_s"]], point[at["tokens_s"]]) for point in data["history"])

    def _named(self, values: Sequence[object]) -> dict[str, object]:
        """The last columns by name."""
        return dict(zip(self._columns[-len(values) :], values, strict=True))


def _row(named: Mapping[str, object]) -> Row:
    """A row of the columns that are known here; a later version may send more."""
    return msgspec.convert([named[column] for column in COLUMNS], Row)


def _paths(given: object) -> list[Path]:
    return msgspec.convert(given, list[Path])
