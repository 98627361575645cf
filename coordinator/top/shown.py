"""What the feed has told so far."""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypedDict, cast

import msgspec

from coordinator.management.live_picture import Figures
from coordinator.observability.recent import MOST_PATHS, Failure, Path

HISTORY = 120


class Instance(TypedDict):
    """A row of the feed (management.live_picture.Row)."""

    id: str
    role: str
    engine: str
    url: str
    model: str
    state: str
    since_s: int
    reason: str
    requests: int
    pinned: int
    blocks: int


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
        self.instances: list[Instance] = []
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
                self.instances[position].update(cast("Instance", self._named(values)))
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
            "instances": self.instances,
            "paths": self.paths,
            "failures": self.failures,
        }

    def _begin(self, data: dict[str, Any]) -> None:
        self.about = data["about"]
        self._columns = data["columns"]
        self.instances = [cast("Instance", self._named(row)) for row in data["rows"]]
        self.paths = _paths(data["paths"])
        at = {name: data["points"].index(name) for name in ("requests_s", "tokens_s")}
        self.rates.clear()
        self.rates.extend((point[at["requests_s"]], point[at["tokens_s"]]) for point in data["history"])

    def _named(self, values: Sequence[object]) -> dict[str, object]:
        """The last columns by name."""
        return dict(zip(self._columns[-len(values) :], values, strict=True))


def _paths(given: object) -> list[Path]:
    return msgspec.convert(given, list[Path])
