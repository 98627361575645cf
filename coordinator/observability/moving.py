"""Rates and percentiles over the last seconds, from counters and histograms that only grow."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import msgspec

from coordinator.core.errors import Outcome

from .instruments import Cells
from .metrics import ITL_BUCKETS_S, PREFIX, TTFT_BUCKETS_S, Metrics, Snapshot

RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 30.0
QUANTILES = (0.5, 0.95, 0.99)

REQUESTS = f"{PREFIX}requests_total"
TTFT = f"{PREFIX}time_to_first_token_seconds"
ITL = f"{PREFIX}inter_token_latency_seconds"

CLIENTS_DOING = frozenset((Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT))
_GOOD = CLIENTS_DOING | {Outcome.OK}


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything since the start, all API families and processes together.

    Attributes:
        at_s: monotonic seconds.
        finished: requests that have ended.
        failed: those of them that ended badly through no doing of the client's.
        ttft: observations by bucket, the one above the last bound included.
        itl: the same for the time between tokens.
    """

    at_s: float
    finished: float
    failed: float
    ttft: Sequence[float]
    itl: Sequence[float]


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in seconds; None: nothing was observed."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Moving(msgspec.Struct, frozen=True):
    """What the last seconds were like.

    Attributes:
        requests_s: finished requests a second; None: not known yet, like all others that are None.
        failures_s: those of them that failed through no doing of the client's.
        tokens_s: tokens of streams a second, as far as they can be told apart; a whole answer counts as one.
        ttft_s: time to first token.
        itl_s: time between tokens.
    """

    requests_s: float | None = None
    failures_s: float | None = None
    tokens_s: float | None = None
    ttft_s: Latency = Latency()
    itl_s: Latency = Latency()


def own_part(metrics: Metrics) -> Snapshot:
    """What `totals` needs of this process; cheaper than a snapshot of everything."""
    used = (metrics.requests, metrics.time_to_first_token, metrics.inter_token_latency)
    return {instrument.name: instrument.snapshot() for instrument in used}


def totals(parts: Iterable[Mapping[str, Cells]], at_s: float) -> Totals:
    """The sums over processes; a part may lack what its process has not got."""
    finished = failed = 0.0
    ttft = [0.0] * (len(TTFT_BUCKETS_S) + 1)
    itl = [0.0] * (len(ITL_BUCKETS_S) + 1)
    for part in parts:
        for labels, (count,) in part.get(REQUESTS, {}).items():
            finished += count
            failed += 0 if labels[-1] in _GOOD else count
        for name, sums in ((TTFT, ttft), (ITL, itl)):
            for values in part.get(name, {}).values():
                sums[:] = map(add, sums, values)  # behind the buckets stands the sum in seconds, left out here
    return Totals(at_s, finished, failed, ttft, itl)


class MovingWindow:
    """Remembers the totals of the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[Totals] = deque()

    def take(self, newest: Totals) -> Moving:
        """Add the totals of this moment and say what the last seconds were like."""
        seen = self._seen
        seen.append(newest)
        while len(seen) > 2 and newest.at_s - seen[1].at_s >= LATENCY_WINDOW_S:
            seen.popleft()
        oldest = seen[0]
        recent = next((one for one in reversed(seen) if newest.at_s - one.at_s >= RATE_WINDOW_S), oldest)
        span_s = newest.at_s - recent.at_s
        if span_s <= 0:
            return Moving()
        return Moving(
            requests_s=_rate(newest.finished - recent.finished, span_s),
            failures_s=_rate(newest.failed - recent.failed, span_s),
            tokens_s=_rate(sum(_grown(newest.ttft, recent.ttft)) + sum(_grown(newest.itl, recent.itl)), span_s),
            ttft_s=_latency(TTFT_BUCKETS_S, _grown(newest.ttft, oldest.ttft)),
            itl_s=_latency(ITL_BUCKETS_S, _grown(newest.itl, oldest.itl)),
        )

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """The value below which a share `q` of the observations lies, as Prometheus estimates it: straight in a bucket.

    Args:
        bounds: upper bounds of the buckets.
        counts: observations by bucket, one more than bounds.
        q: from 0 to 1.

    What lies above the last bound is taken for that bound. None: there are no observations.
    """
    whole = sum(counts)
    if not whole:
        return None
    wanted = q * whole
    for index, below in enumerate(accumulate(counts)):
        if below >= wanted and counts[index]:
            break
    else:
        return None
    if index >= len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (wanted - (below - counts[index])) / counts[index]


def _latency(bounds: Sequence[float], counts: Sequence[float]) -> Latency:
    return Latency(*(None if (found := quantile(bounds, counts, q)) is None else round(found, 6) for q in QUANTILES))


def _grown(newest: Sequence[float], before: Sequence[float]) -> list[float]:
    """What has come; never negative, be it that a process has died with what it had counted."""
    return [max(0.0, new - old) for new, old in zip(newest, before, strict=True)]


def _rate(grown: float, span_s: float) -> float:
    return round(max(0.0, grown) / span_s, 3)
