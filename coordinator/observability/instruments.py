"""Counters and histograms that cost a fraction of a microsecond, and gauges that are read when they are asked for.

Every relayed token is one observation, so cells are plain lists of numbers without locks: they belong to the event
loop's thread. The exposition format is made from them elsewhere, once per scrape.
"""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

Labels = tuple[str, ...]
Cells = dict[Labels, list[float]]
"""What an instrument holds, as plain data: one list of numbers for each combination of label values.

Counter and gauge: `[value]`. Histogram: the count of each bucket (not cumulative, the one above the last bound
included), then the sum in seconds.
"""
Reader = Callable[[], Iterable[tuple[Labels, float]]]

CELL_LIMIT = 1000
OTHER = "other"


class Cell(Protocol):
    """What one combination of label values counts."""

    def values(self) -> list[float]:
        """The numbers, in the layout that `Cells` names."""
        ...


class CounterCell:
    """One counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, n: int = 1) -> None:
        """Count `n` more."""
        self.value += n

    def values(self) -> list[float]:
        """`[value]`."""
        return [self.value]


class HistogramCell:
    """One histogram: how many observations fell into each bucket, and their sum.

    Most observations fall into the bucket of the one before, so that one is asked first, and counted by itself.
    """

    __slots__ = ("_above_s", "_bounds", "_bucket", "_counts", "_in_bucket", "_sum_s", "_up_to_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0
        self._bucket = self._in_bucket = 0
        self._above_s, self._up_to_s = math.inf, -math.inf  # nothing is in there

    def observe(self, value_s: float) -> None:
        """Take in one duration in seconds; a bucket holds its own upper bound, as Prometheus' `le` says."""
        self._sum_s += value_s
        if self._above_s < value_s <= self._up_to_s:
            self._in_bucket += 1
        else:
            self._change_to(bisect_left(self._bounds, value_s))

    def _change_to(self, bucket: int) -> None:
        self._counts[self._bucket] += self._in_bucket
        self._bucket, self._in_bucket = bucket, 1
        self._above_s = self._bounds[bucket - 1] if bucket else -math.inf
        self._up_to_s = self._bounds[bucket] if bucket < len(self._bounds) else math.inf

    def values(self) -> list[float]:
        """Counts of the buckets, then the sum."""
        values = [*self._counts, self._sum_s]
        values[self._bucket] += self._in_bucket
        return values


CellT = TypeVar("CellT", bound=Cell)


class Instrument(Generic[CellT]):
    """Cells by label values, made on demand.

    Label values have to come from bounded sets. As a guard for where one does not, at most `CELL_LIMIT` cells are made;
    whatever comes later is counted in one cell whose label values are all `other`.

    Args:
        name: full metric name.
        help_text: one sentence for the `# HELP` line.
        label_names: names of the labels, in the order in which `labels` takes their values.
        known: combinations that are there from the start, at zero.
    """

    def __init__(
        self, name: str, help_text: str, label_names: Sequence[str] = (), known: Iterable[Sequence[str]] = ()
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.label_names = tuple(label_names)
        self._cells: dict[Labels, CellT] = {}
        for values in known if self.label_names else [()]:
            self.labels(*values)

    def labels(self, *values: str) -> CellT:
        """The cell for these label values; keep it where the same one is needed often.

        Raises:
            ValueError: another number of values than there are labels.
        """
        cell = self._cells.get(values)
        return self._make(values) if cell is None else cell

    def forget(self, label: str, value: str) -> None:
        """Drop the cells whose `label` has this value: what it named is gone. Unknown values are no error."""
        at = self.label_names.index(label)
        for labels in [labels for labels in self._cells if labels[at] == value]:
            del self._cells[labels]

    def snapshot(self) -> Cells:
        """A copy of every cell as plain numbers, fit to be sent to another process and merged there."""
        return {labels: cell.values() for labels, cell in self._cells.items()}

    def merge(self, parts: Iterable[Cells]) -> Cells:
        """The sums over several processes' snapshots of this instrument. Pure: the own cells are not touched.

        Raises:
            ValueError: the snapshots have different buckets.
        """
        return _merged(parts, operator.add)

    def _new(self) -> CellT:
        raise NotImplementedError

    def _make(self, values: Labels) -> CellT:
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not {len(values)} of them")
        if len(self._cells) >= CELL_LIMIT:
            values = (OTHER,) * len(self.label_names)
        # members of enumerations become plain text here, so that snapshots are plain data
        return self._cells.setdefault(tuple(str(value) for value in values), self._new())


class Counter(Instrument[CounterCell]):
    """A number that only grows; its name ends in `_total`."""

    def inc(self, n: int = 1) -> None:
        """Count `n` more on a counter without labels."""
        self.labels().inc(n)

    def _new(self) -> CounterCell:
        return CounterCell()


class Histogram(Instrument[HistogramCell]):
    """Durations in seconds, by bucket.

    Args:
        name: full metric name, ends in `_seconds`.
        help_text: one sentence.
        buckets: upper bounds in seconds, rising; the one for infinity is added by itself.
        label_names: see `Instrument`.
        known: see `Instrument`.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float],
        label_names: Sequence[str] = (),
        known: Iterable[Sequence[str]] = (),
    ) -> None:
        self.buckets = tuple(buckets)
        if not self.buckets or any(low >= high for low, high in zip(self.buckets, self.buckets[1:], strict=False)):
            raise ValueError(f"the buckets of {name} do not rise")
        super().__init__(name, help_text, label_names, known)

    def _new(self) -> HistogramCell:
        return HistogramCell(self.buckets)


class CallbackGauge:
    """A number that somebody else keeps and that is read at each scrape.

    Args:
        name: full metric name.
        help_text: one sentence.
        label_names: names of the labels.
        read: gives label values and number of each series; one that has no labels reads as 0 until there is a reader.
        over_processes: how the numbers of several processes become one: `sum`, or `min` for a state that holds only
            where it holds in each process.
    """

    _WAYS: ClassVar[Mapping[str, Callable[[float, float], float]]] = {"sum": operator.add, "min": min}

    def __init__(
        self,
        name: str,
        help_text: str,
        label_names: Sequence[str] = (),
        read: Reader | None = None,
        *,
        over_processes: str = "sum",
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.label_names = tuple(label_names)
        self.read = read
        self._combine = self._WAYS[over_processes]

    def snapshot(self) -> Cells:
        """What the reader gives at this moment."""
        if self.read is None:
            return {} if self.label_names else {(): [0.0]}
        return {tuple(str(value) for value in labels): [value] for labels, value in self.read()}

    def merge(self, parts: Iterable[Cells]) -> Cells:
        """The numbers of several processes as one. Pure."""
        return _merged(parts, self._combine)


AnyInstrument = Counter | Histogram | CallbackGauge


def _merged(parts: Iterable[Cells], combine: Callable[[float, float], float]) -> Cells:
    total: Cells = {}
    for part in parts:
        for labels, values in part.items():
            known = total.get(labels)
            total[labels] = (
                list(values) if known is None else [combine(a, b) for a, b in zip(known, values, strict=True)]
            )
    return total
