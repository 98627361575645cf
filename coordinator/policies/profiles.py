"""What instances can do, by the measurements that they register (xLLM protocol page §8).

A quadratic for the time to first token over the prompt's length, a plane for the time per output token over the number
of requests and their tokens, each fitted by least squares.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from coordinator.core.instance import Instance

LEAST_PIVOT = 1e-12
MOST_FITS = 4096  # of instances that are remembered

Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """TTFT in ms = c0 + c1·length + c2·length²."""

    coefficients: tuple[float, ...]

    @classmethod
    def of(cls, instance: Instance) -> Self | None:
        """The profile of an instance; None: it has registered none, or too few points."""
        fitted = _quadratic(_points(instance, "ttft_profiling_data", 2))
        return None if fitted is None else cls(fitted)

    def ttft_ms(self, tokens: float) -> float:
        """Predicted time for a prompt of so many tokens, never below 0."""
        c0, c1, c2 = self.coefficients
        return max(0.0, c0 + c1 * tokens + c2 * tokens * tokens)


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """TPOT in ms = c0 + c1·requests + c2·tokens."""

    coefficients: tuple[float, ...]

    @classmethod
    def of(cls, instance: Instance) -> Self | None:
        """The profile of an instance; None: it has registered none, or too few points.

        Points are [length, batch, ms]: a batch of so many requests of that length each.
        """
        fitted = _plane(_points(instance, "tpot_profiling_data", 3))
        return None if fitted is None else cls(fitted)

    def tpot_ms(self, requests: float, tokens: float) -> float:
        """Predicted time per token with so many requests and tokens in all, never below 0."""
        c0, c1, c2 = self.coefficients
        return max(0.0, c0 + c1 * requests + c2 * tokens)


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> tuple[float, ...] | None:
    """The coefficients that fit best; None where the points do not determine them.

    Columns are scaled to 1 first: squares of lengths and constants would drown each other.
    """
    if not rows:
        return None
    size = len(rows[0])
    scales = [max(abs(row[at]) for row in rows) or 1.0 for at in range(size)]
    scaled = [[row[at] / scales[at] for at in range(size)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * y for row, y in zip(scaled, wanted, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda line: abs(matrix[line][column]))
        if abs(matrix[pivot][column]) < LEAST_PIVOT:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for line in range(size):
            if line != column:
                factor = matrix[line][column] / matrix[column][column]
                matrix[line] = [a - factor * b for a, b in zip(matrix[line], matrix[column], strict=True)]
    return tuple(matrix[at][size] / matrix[at][at] / scales[at] for at in range(size))


@functools.lru_cache(MOST_FITS)
def _quadratic(points: Points) -> tuple[float, ...] | None:
    return least_squares([(1.0, length, length * length) for length, _ in points], [ms for _, ms in points])


@functools.lru_cache(MOST_FITS)
def _plane(points: Points) -> tuple[float, ...] | None:
    return least_squares([(1.0, batch, length * batch) for length, batch, _ in points], [ms for *_, ms in points])


def _points(instance: Instance, key: str, size: int) -> Points:
    given = instance.options.get(key, ())
    if not isinstance(given, Sequence):
        return ()
    return tuple(tuple(point) for point in given if len(point) == size)
