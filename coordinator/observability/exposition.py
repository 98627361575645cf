"""From the numbers of the instruments to the text that Prometheus reads."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import assert_never

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .instruments import AnyInstrument, CallbackGauge, Cells, Counter, Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def process_metrics() -> CollectorRegistry:
    """A registry of its own with what prometheus_client knows of this process: memory, CPU, descriptors, GC."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exposition(own: Iterable[tuple[AnyInstrument, Cells]], process: CollectorRegistry) -> bytes:
    """The text format (version 0.0.4) of these cells, followed by the process's own figures."""
    return generate_latest(_Scrape(own, process))


class _Scrape(Collector):
    """One scrape's families; lives as long as the call that renders it."""

    def __init__(self, own: Iterable[tuple[AnyInstrument, Cells]], process: CollectorRegistry) -> None:
        self._own = own
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for instrument, cells in self._own:
            yield _family(instrument, cells)
        yield from self._process.collect()


def _family(instrument: AnyInstrument, cells: Cells) -> Metric:
    match instrument:
        case Counter():
            counter = CounterMetricFamily(instrument.name, instrument.help_text, labels=instrument.label_names)
            for labels, (value,) in cells.items():
                counter.add_metric(labels, value)
            return counter
        case Histogram():
            histogram = HistogramMetricFamily(instrument.name, instrument.help_text, labels=instrument.label_names)
            bounds = [*(str(float(bound)) for bound in instrument.buckets), "+Inf"]
            for labels, (*counts, sum_s) in cells.items():
                histogram.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), sum_s)
            return histogram
        case CallbackGauge():
            gauge = GaugeMetricFamily(instrument.name, instrument.help_text, labels=instrument.label_names)
            for labels, (value,) in cells.items():
                gauge.add_metric(labels, value)
            return gauge
        case _:
            assert_never(instrument)
