"""Prometheus text, as the engines write it."""

from collections.abc import Iterator, Mapping, Sequence


class Histogram:
    """Cumulative buckets, sum and count."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """How many values were added."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Add a value."""
        index = next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[index] += 1
        self.total += value

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound as shown, cumulative count)."""
        count = 0
        for bound, here in zip([*self.bounds, float("inf")], self.counts, strict=True):
            count += here
            yield "+Inf" if bound == float("inf") else f"{bound:g}", count


def labelled(labels: Mapping[str, str]) -> str:
    """`{a="b",...}`."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def scalar(name: str, kind: str, values: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    """Lines of one counter or gauge; `name` is the metric, a counter's samples get `_total`."""
    sample = f"{name}_total" if kind == "counter" else name
    lines = [f"# HELP {sample} {name.replace('_', ' ')}", f"# TYPE {sample} {kind}"]
    return lines + [f"{sample}{labelled(labels)} {value:g}" for labels, value in values]


def histogram(name: str, labels: Mapping[str, str], values: Histogram) -> list[str]:
    """Lines of one histogram."""
    lines = [f"# HELP {name} {name.replace('_', ' ')}", f"# TYPE {name} histogram"]
    lines += [f"{name}_bucket{labelled({'le': bound, **labels})} {count}" for bound, count in values.buckets()]
    return [*lines, f"{name}_sum{labelled(labels)} {values.total:g}", f"{name}_count{labelled(labels)} {values.count}"]
