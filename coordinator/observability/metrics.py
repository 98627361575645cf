"""Every metric of the coordinator, declared once. docs/metrics.md describes each; a test keeps the two together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from coordinator.core.errors import Outcome, UnknownPath, WrongMethod

from .exposition import CONTENT_TYPE, exposition, process_metrics
from .instruments import AnyInstrument, CallbackGauge, Cells, Counter, CounterCell, Histogram, HistogramCell, Reader

PREFIX = "pd_coordinator_"
STAGES = ("queue", "prefill", "handoff", "decode")
TTFT_STAGES = ("queue", "retries", "prefill", "handoff")
TTFT_LABELS = ("stage", "instance")
WAITING_STAGES = ("queue", "prefill", "handoff")
SCRAPE_RESULTS = ("ok", "failed", "unreadable", "skipped")
TRACE_RESULTS = ("exported", "failed", "dropped")
ABORT_RESULTS = ("sent", "not_found", "failed", "dropped")

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 60, 120)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 3600)
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

Snapshot = Mapping[str, Cells]
"""All numbers of one process, by metric name."""


@dataclass(frozen=True, slots=True)
class ApiMetrics:
    """The cells of one API family, bound once: a request and a token look no label up.

    Attributes:
        ttft: from arrival to the first token.
        itl: from one token to the next.
        duration: from arrival to the end of the answer.
    """

    ttft: HistogramCell
    itl: HistogramCell
    duration: HistogramCell
    outcomes: Mapping[Outcome, CounterCell]

    def outcome(self, outcome: Outcome) -> CounterCell:
        """The counter of requests that ended so."""
        return self.outcomes[outcome]


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """The cells of the stages of an attempt, bound once.

    Attributes:
        queue: from arrival (or the end of the attempt before) to a placement.
        prefill: from the request going out to the end of prefill's compute.
        handoff: from there to decode's first output.
        decode: from decode's first output to its last.
    """

    queue: HistogramCell
    prefill: HistogramCell
    handoff: HistogramCell
    decode: HistogramCell


def _each(values: Iterable[str]) -> list[tuple[str]]:
    return [(value,) for value in values]


class Metrics:
    """All metrics of one process; built once by the composition root and passed down. Not for use by other threads.

    Args:
        apis: names of the API families; their series are there from the start.
    """

    def __init__(self, apis: Sequence[str]) -> None:
        self._instruments: dict[str, AnyInstrument] = {}
        self._process = process_metrics()
        self._declare_requests(apis)
        self._declare_gauges()
        self._declare_events()
        self._apis = {api: self._bind(api) for api in apis}
        self._of_keys: dict[str, dict[Outcome, CounterCell]] = {}
        self.stages = StageMetrics(*(self.stage_duration.labels(stage) for stage in STAGES))

    content_type: Final = CONTENT_TYPE

    def _declare_requests(self, apis: Sequence[str]) -> None:
        each = _each(apis)
        ends = product(apis, Outcome)
        self.requests = self._counter("requests_total", "Finished requests.", ("api", "outcome"), ends)
        self.request_duration = self._histogram(
            "request_duration_seconds", "From arrival to the end of the answer.", DURATION_BUCKETS_S, ("api",), each
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS_S, ("api",), each
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "From one token of a stream to the next.", ITL_BUCKETS_S, ("api",), each
        )
        self.stage_duration = self._histogram(
            "stage_duration_seconds", "Time in one stage.", STAGE_BUCKETS_S, ("stage",), _each(STAGES)
        )
        nobody = [("queue", ""), ("retries", "")]
        self.ttft_stage = self._histogram(
            "ttft_stage_seconds", "The stages before a stream's first token.", TTFT_BUCKETS_S, TTFT_LABELS, nobody
        )

    def _declare_gauges(self) -> None:
        self._gauge("requests_in_flight", "Requests that are there and have not ended.")
        self._gauge("requests_queued", "Requests that wait for an instance.")
        self._gauge("instance_in_flight", "Requests placed on an instance.", ("instance", "role"))
        self._gauge("instance_up", "1: takes requests, 0: not.", ("instance", "role"), over_processes="min")
        self._gauge("kv_pinned_requests", "Requests whose KV a prefill instance still holds.", ("instance",))
        self._gauge("kv_buffered_bytes", "KV that is on its way through the coordinator.")
        self._gauge("kv_waiting_requests", "Requests that wait for memory for their KV.")
        self._gauge("stage_requests", "Requests in one stage.", ("stage",))
        self._gauge("bottleneck_stage", "1: the stage that held most of the waiting of late, 0: not.", ("stage",))
        self._gauge("discovery_up", "1: a source of instances could be asked the last time, 0: not.", ("source",))
        self._gauge("discovery_instances", "Members of the cluster that a source names.", ("source",))
        self._gauge("engine_scrape_age_seconds", "Age of an instance's own metrics.", ("instance", "role"))

    def _declare_events(self) -> None:
        self.attempts = self._counter("attempts_total", "Placements, by why they were made.", ("reason",), [("first",)])
        self.engine_failures = self._counter(
            "engine_failures_total", "Failed legs, by who failed and why.", ("instance", "side", "reason")
        )
        unrouted = [(UnknownPath.code,), (WrongMethod.code,)]
        self.unrouted = self._counter(
            "unrouted_total", "Calls for a path or method that is not served.", ("code",), unrouted
        )
        self.key_requests = self._counter(
            "key_requests_total", "Finished requests by the key they came with.", ("key", "outcome")
        )
        self.recomputes = self._counter("recomputes_total", "Requests that decode gave back to be placed again.")
        self.decode_replays = self._counter(
            "decode_replays_total", "Requests taken to another decode instance with the KV that was there."
        )
        self.aborts = self._counter(
            "aborts_total", "Aborts for engines, by what came of them.", ("result",), _each(ABORT_RESULTS)
        )
        self.handoffs_abandoned = self._counter(
            "handoffs_abandoned_total", "Prefilled KV that no decode instance came for."
        )
        self.missing_kv = self._counter(
            "missing_kv_total", "Prefill answers without what decode needs to pull the KV.", ("engine",)
        )
        self.late_frames = self._counter("late_frames_total", "Stream parts for a request that is not there any more.")
        self.link_reconnects = self._counter(
            "link_reconnects_total", "Standing links to an instance that had to be opened again.", ("instance",)
        )
        self.config_reloads = self._counter(
            "config_reloads_total", "Times the configuration was read again.", ("result",), [("ok",), ("invalid",)]
        )
        self.engine_scrapes = self._counter(
            "engine_scrapes_total", "Times an instance was asked for its metrics.", ("result",), _each(SCRAPE_RESULTS)
        )
        self.traces = self._counter(
            "traces_total", "Traced requests, by what became of their spans.", ("result",), _each(TRACE_RESULTS)
        )

    @property
    def instruments(self) -> Sequence[AnyInstrument]:
        """Everything that is declared, in the order of the page."""
        return tuple(self._instruments.values())

    def for_api(self, api: str) -> ApiMetrics:
        """The cells of one API family."""
        known = self._apis.get(api)
        return self._bind(api) if known is None else known

    def add_gauge(self, name: str, read: Reader) -> None:
        """Say where a declared gauge (name without prefix) gets its numbers from; `read` is called at each scrape.

        Raises:
            KeyError: no gauge of this name is declared.
        """
        gauge = self._instruments[PREFIX + name]
        if not isinstance(gauge, CallbackGauge):
            raise KeyError(name)
        gauge.read = read

    def key_outcome(self, key: str, outcome: Outcome) -> None:
        """Count a finished request by the key it came with; hot."""
        try:
            cell = self._of_keys[key][outcome]
        except KeyError:
            cell = self._of_keys.setdefault(key, {})[outcome] = self.key_requests.labels(key, outcome)
        cell.inc()

    def forget_key(self, name: str) -> None:
        """Drop the series of a key that is gone."""
        self.key_requests.forget("key", name)
        self._of_keys.pop(name, None)

    def forget_instance(self, instance_id: str) -> None:
        """Drop the series of an instance that was removed."""
        self.engine_failures.forget("instance", instance_id)
        self.link_reconnects.forget("instance", instance_id)
        self.ttft_stage.forget("instance", instance_id)

    def snapshot(self) -> Snapshot:
        """This process's numbers as plain data, for the process that renders the sums of all."""
        return {name: instrument.snapshot() for name, instrument in self._instruments.items()}

    def render(self, others: Iterable[Snapshot] = ()) -> bytes:
        """The text for `/metrics`: the sums of this process and of the snapshots of other ones.

        The `process_*` and `python_*` figures are those of this process alone.

        Raises:
            ValueError: a snapshot comes from a process with other buckets.
        """
        parts = [self.snapshot(), *others]
        sums = (
            (instrument, instrument.merge(part.get(name, {}) for part in parts))
            for name, instrument in self._instruments.items()
        )
        return exposition(sums, self._process)

    def _bind(self, api: str) -> ApiMetrics:
        return ApiMetrics(
            ttft=self.time_to_first_token.labels(api),
            itl=self.inter_token_latency.labels(api),
            duration=self.request_duration.labels(api),
            outcomes={outcome: self.requests.labels(api, outcome) for outcome in Outcome},
        )

    def _counter(
        self, name: str, help_text: str, labels: Sequence[str] = (), known: Iterable[Sequence[str]] = ()
    ) -> Counter:
        counter = Counter(PREFIX + name, help_text, labels, known)
        self._instruments[counter.name] = counter
        return counter

    def _histogram(
        self, name: str, help_text: str, buckets: Sequence[float], labels: Sequence[str], known: Iterable[Sequence[str]]
    ) -> Histogram:
        histogram = Histogram(PREFIX + name, help_text, buckets, labels, known)
        self._instruments[histogram.name] = histogram
        return histogram

    def _gauge(self, name: str, help_text: str, labels: Sequence[str] = (), *, over_processes: str = "sum") -> None:
        gauge = CallbackGauge(PREFIX + name, help_text, labels, over_processes=over_processes)
        self._instruments[gauge.name] = gauge
