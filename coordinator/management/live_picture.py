"""What the live feed shows: one picture a second, sent whole or as what has changed since the one before."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from coordinator.observability.instruments import Cells
from coordinator.observability.moving import Moving, MovingWindow, totals
from coordinator.observability.recent import Failure, Path, Recently

HISTORY = 120
GAP_S = 5.0
"""After a longer time without a look, what was seen before it is history of something else."""


class Row(NamedTuple):
    """One instance; its position in the list stays for as long as the list has the same members.

    Attributes:
        since_s: time of the last change of state, seconds since the epoch, whole.
        reason: why it is not ready; empty if it is.
        requests: what runs on it.
        pinned: requests whose KV it keeps for decode, or has still to release.
        blocks: KV blocks that its requests are counted as.
    """

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


COLUMNS = Row._fields
STEADY = COLUMNS.index("model")  # what stands before it never changes while the list has the same members


@dataclass(frozen=True, slots=True)
class Look:
    """Everything at one moment.

    Attributes:
        ready: whether a request could be placed, and `why` (not).
        stages: requests in each stage.
        bottleneck: the stage that held most of the waiting of late; None: nothing waits.
        parts: the counters of all processes, by metric name.
    """

    rows: Sequence[Row]
    recently: Recently
    parts: Sequence[Mapping[str, Cells]]
    ready: bool
    why: str
    in_flight: int
    queued: int
    stages: Mapping[str, int]
    bottleneck: str | None


class Figures(msgspec.Struct, frozen=True):
    """What fits in one line of text; see `Look` and `Moving`."""

    ready: bool
    why: str
    in_flight: int
    queued: int
    stages: Mapping[str, int]
    bottleneck: str | None
    moving: Moving


Point = tuple[float | None, ...]
POINT = ("requests_s", "failures_s", "tokens_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "in_flight")


class Whole(msgspec.Struct, frozen=True):
    """The data of an event `snapshot`; `history` has the oldest point first, one for each second."""

    n: int
    at_s: float
    about: Mapping[str, object]
    figures: Figures
    columns: Sequence[str]
    rows: Sequence[Row]
    paths: Sequence[Path]
    failures: Sequence[Failure]
    points: Sequence[str]
    history: Sequence[Point]


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of an event `tick`, to be put on the picture `n` - 1.

    `rows`: position, then the columns from `model` on, of each row that has changed. `paths`: those that are new.
    `failures`: all of them, if they have changed.
    """

    n: int
    at_s: float
    figures: Figures
    rows: Sequence[tuple[object, ...]] = ()
    paths: Sequence[Path] = ()
    failures: Sequence[Failure] | None = None


def event(name: str, number: int, data: object) -> bytes:
    """A server-sent event (HTML Living Standard, §9.2); the data is one line of JSON."""
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), number, msgspec.json.encode(data))


class Picture:
    """One picture: encoded at most once in each way, for however many listeners.

    Attributes:
        number: grows by one with each.
        change: the event that makes it of the picture before; None: there is none that would.
    """

    def __init__(self, whole: Whole, before: "Picture | None") -> None:
        self._whole = whole
        self.number = whole.n
        self.change = None if before is None else _change(before._whole, whole)  # noqa: SLF001

    @cached_property
    def whole(self) -> bytes:
        """The event with all of it."""
        return event("snapshot", self.number, self._whole)


def _change(before: Whole, after: Whole) -> bytes | None:
    if len(before.rows) != len(after.rows):
        return None
    changed: list[tuple[object, ...]] = []
    for position, (old, new) in enumerate(zip(before.rows, after.rows, strict=True)):
        if old != new:
            if old[:STEADY] != new[:STEADY]:
                return None
            changed.append((position, *new[STEADY:]))
    known = {(path.at_s, path.id) for path in before.paths}
    paths = tuple(path for path in after.paths if (path.at_s, path.id) not in known)
    failures = None if after.failures == before.failures else after.failures
    return event("tick", after.n, Change(after.n, after.at_s, after.figures, tuple(changed), paths, failures))


class Album:
    """Makes pictures of looks and keeps the figures of the last minutes.

    Args:
        about: what never changes: version and the like.
    """

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = about
        self._window = MovingWindow()
        self._history: deque[Point] = deque(maxlen=HISTORY)
        self._last_s = 0.0
        self.latest: Picture | None = None

    def add(self, look: Look, at_s: float, now_s: float) -> Picture:
        """Make the next picture; `at_s`: seconds since the epoch, `now_s`: monotonic ones."""
        before = self.latest
        if before is not None and now_s - self._last_s > GAP_S:
            self._window.clear()
            self._history.clear()
        self._last_s = now_s
        moving = self._window.take(totals(look.parts, now_s))
        figures = Figures(look.ready, look.why, look.in_flight, look.queued, look.stages, look.bottleneck, moving)
        self._history.append(_point(figures))
        whole = Whole(
            n=1 if before is None else before.number + 1,
            at_s=round(at_s, 3),
            about=self._about,
            figures=figures,
            columns=COLUMNS,
            rows=look.rows,
            paths=look.recently.paths,
            failures=look.recently.failures,
            points=POINT,
            history=tuple(self._history),
        )
        self.latest = Picture(whole, before)
        return self.latest


def _point(figures: Figures) -> Point:
    m = figures.moving
    return (
        m.requests_s, m.failures_s, m.tokens_s, m.ttft_s.p50, m.ttft_s.p95, m.itl_s.p50, m.itl_s.p95,
        figures.in_flight,
    )  # fmt: skip
