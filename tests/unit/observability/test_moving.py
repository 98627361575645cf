"""Rates and percentiles over the last seconds."""

import random
import statistics

import pytest

from coordinator.core.errors import Outcome
from coordinator.observability.metrics import ITL_BUCKETS_S, TTFT_BUCKETS_S, Metrics
from coordinator.observability.moving import (
    LATENCY_WINDOW_S,
    RATE_WINDOW_S,
    MovingWindow,
    own_part,
    quantile,
    totals,
)


@pytest.fixture
def metrics():
    return Metrics(["openai", "tgi"])


@pytest.fixture
def window():
    return MovingWindow()


def see(window, metrics, at_s):
    return window.take(totals([own_part(metrics)], at_s))


class TestTotals:
    def test_families_and_processes_are_summed(self, metrics):
        other = Metrics(["openai"])
        for each in (metrics, other):
            each.for_api("openai").outcome(Outcome.OK).inc(2)
            each.for_api("openai").ttft.observe(0.02)
        metrics.for_api("tgi").itl.observe(0.004)
        whole = totals([own_part(metrics), own_part(other)], 1.0)
        assert (whole.at_s, whole.finished, whole.failed) == (1.0, 4, 0)
        assert whole.ttft[2] == sum(whole.ttft) == 2
        assert whole.itl[2] == sum(whole.itl) == 1
        assert (len(whole.ttft), len(whole.itl)) == (len(TTFT_BUCKETS_S) + 1, len(ITL_BUCKETS_S) + 1)

    @pytest.mark.parametrize("outcome", Outcome)
    def test_what_clients_do_is_no_failure(self, metrics, outcome):
        metrics.for_api("openai").outcome(outcome).inc()
        clients = outcome in (Outcome.OK, Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT)
        assert totals([own_part(metrics)], 1.0).failed == (0 if clients else 1)

    def test_a_part_may_be_empty(self):
        assert totals([{}], 1.0).finished == 0
        assert sum(totals([], 1.0).ttft) == 0

    def test_the_part_is_that_of_a_whole_snapshot(self, metrics):
        metrics.for_api("openai").ttft.observe(0.2)
        assert own_part(metrics).items() <= metrics.snapshot().items()


class TestWindow:
    def test_nothing_is_known_at_first(self, window, metrics):
        moving = see(window, metrics, 10.0)
        assert (moving.requests_s, moving.tokens_s, moving.ttft_s.p50) == (None, None, None)

    def test_rates_are_those_of_the_last_seconds(self, window, metrics):
        cells = metrics.for_api("openai")
        see(window, metrics, 0.0)
        cells.outcome(Outcome.OK).inc(100)
        see(window, metrics, 1.0)
        for second in range(2, 12):
            cells.outcome(Outcome.OK).inc(3)
            cells.outcome(Outcome.ENGINE_ERROR).inc()
            cells.ttft.observe(0.1)
            for _ in range(9):
                cells.itl.observe(0.02)
            moving = see(window, metrics, float(second))
        assert RATE_WINDOW_S < 10
        assert (moving.requests_s, moving.failures_s, moving.tokens_s) == (4.0, 1.0, 10.0)

    def test_a_short_history_is_used_as_it_is(self, window, metrics):
        see(window, metrics, 0.0)
        metrics.for_api("tgi").outcome(Outcome.OK).inc(3)
        assert see(window, metrics, 1.5).requests_s == 2.0

    def test_percentiles_forget(self, window, metrics):
        cells = metrics.for_api("openai")
        see(window, metrics, 0.0)
        for _ in range(100):
            cells.ttft.observe(9.0)
        assert see(window, metrics, 1.0).ttft_s.p50 > 5
        for second in range(2, int(LATENCY_WINDOW_S) + 3):
            cells.ttft.observe(0.08)
            moving = see(window, metrics, float(second))
        assert moving.ttft_s.p99 <= 0.1

    def test_it_stays_small(self, window, metrics):
        for second in range(1000):
            see(window, metrics, second / 2)
        assert len(window._seen) <= 2 * LATENCY_WINDOW_S + 2

    def test_sums_that_go_back_are_no_negative_rate(self, window, metrics):
        lost = Metrics(["openai"])
        lost.for_api("openai").outcome(Outcome.OK).inc(50)
        lost.for_api("openai").ttft.observe(1.0)
        window.take(totals([own_part(metrics), own_part(lost)], 0.0))
        moving = see(window, metrics, 1.0)
        assert (moving.requests_s, moving.tokens_s, moving.ttft_s.p50) == (0.0, 0.0, None)

    def test_cleared(self, window, metrics):
        see(window, metrics, 0.0)
        window.clear()
        assert see(window, metrics, 100.0).requests_s is None

    def test_two_looks_at_the_same_moment(self, window, metrics):
        see(window, metrics, 1.0)
        assert see(window, metrics, 1.0).requests_s is None


class TestQuantile:
    BOUNDS = (1.0, 2.0, 4.0)

    @pytest.mark.parametrize(
        ("counts", "q", "expected"),
        [
            ([0, 0, 0, 0], 0.5, None),
            ([4, 0, 0, 0], 0.5, 0.5),
            ([0, 4, 0, 0], 0.5, 1.5),
            ([2, 0, 2, 0], 0.5, 1.0),
            ([2, 0, 2, 0], 0.75, 3.0),
            ([1, 1, 1, 1], 1.0, 4.0),
            ([0, 0, 0, 7], 0.1, 4.0),
            ([0, 3, 0, 0], 0.0, 1.0),
        ],
    )
    def test_values(self, counts, q, expected):
        assert quantile(self.BOUNDS, counts, q) == expected

    def test_it_is_near_the_truth(self):
        metrics = Metrics(["openai"])
        rng = random.Random(7)
        values = [rng.lognormvariate(-2, 0.6) for _ in range(5000)]
        for value in values:
            metrics.for_api("openai").ttft.observe(value)
        counts = totals([own_part(metrics)], 0.0).ttft
        cuts = statistics.quantiles(values, n=100)
        for q in (0.5, 0.95, 0.99):
            assert quantile(TTFT_BUCKETS_S, counts, q) == pytest.approx(cuts[int(q * 100) - 1], rel=0.2)
