"""`GET /metrics` with the engine's own series names (MindIE protocol page §12)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instances import exposition
from instances.exposition import Histogram

if TYPE_CHECKING:
    from instances.mindie.instance import MindieEngine

_BOUNDS = {
    "time_to_first_token_seconds": (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
    "time_per_output_token_seconds": (0.001, 0.01, 0.05, 0.1, 0.5, 1.0),
    "e2e_request_latency_seconds": (0.1, 0.5, 1.0, 5.0, 10.0, 60.0),
    "request_prompt_tokens": (1.0, 10.0, 100.0, 1000.0, 10000.0),
    "request_generation_tokens": (1.0, 10.0, 100.0, 1000.0, 10000.0),
}


class Meters:
    """Counters and histograms of one instance; the gauges are read from its parts when asked for."""

    def __init__(self) -> None:
        self.received = self.succeeded = self.failed = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.histograms = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}

    def prefilled(self, prompt_tokens: int, took_s: float) -> None:
        """A prompt was computed, its first token exists."""
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += 1
        self.histograms["request_prompt_tokens"].observe(prompt_tokens)
        self.histograms["time_to_first_token_seconds"].observe(took_s)

    def decoded(self, took_s: float) -> None:
        """A further token exists."""
        self.generated_tokens += 1
        self.histograms["time_per_output_token_seconds"].observe(took_s)

    def ended(self, generated_tokens: int, took_s: float) -> None:
        """A request is complete."""
        self.succeeded += 1
        self.histograms["request_generation_tokens"].observe(generated_tokens)
        self.histograms["e2e_request_latency_seconds"].observe(took_s)


def _scalars(engine: "MindieEngine") -> Iterator[tuple[str, str, float]]:
    """Name, type, value of every series that is not a histogram."""
    meters, instance, decode = engine.meters, engine.instance, engine.decode
    ledger, prefix = instance.ledger, instance.prefix
    running = decode.batch.running + engine.hybrid.batch.running + len(engine.prefill.live)
    yield "request_received_total", "counter", meters.received
    yield "request_success_total", "counter", meters.succeeded
    yield "request_failed_total", "counter", meters.failed
    yield "failed_request_perc", "gauge", meters.failed / meters.received if meters.received else 0
    yield "num_requests_running", "gauge", running
    yield "num_requests_waiting", "gauge", decode.batch.waiting + engine.hybrid.batch.waiting
    yield "num_requests_swapped", "gauge", 0
    yield "num_preemptions_total", "counter", decode.preempted
    yield "prompt_tokens_total", "counter", meters.prompt_tokens
    yield "generation_tokens_total", "counter", meters.generated_tokens
    yield "avg_prompt_throughput_toks_per_s", "gauge", meters.prompt_tokens / instance.age_s
    yield "avg_generation_throughput_toks_per_s", "gauge", meters.generated_tokens / instance.age_s
    yield "npu_cache_usage_perc", "gauge", ledger.used_blocks / ledger.total_blocks
    yield "cpu_cache_usage_perc", "gauge", 0
    hit, asked = prefix.hit_tokens, prefix.asked_tokens
    yield "npu_prefix_cache_hit_rate", "gauge", hit / asked if asked else 0
    yield "all_radix_match_num", "counter", asked
    yield "npu_radix_match_hit_num", "counter", hit


def page(engine: "MindieEngine") -> str:
    """The Prometheus text: HELP and TYPE for every metric, always the same list."""
    model = engine.instance.options.model
    label = f'{{model_name="{model}"}}'
    lines: list[str] = []
    for name, kind, value in _scalars(engine):
        lines += [f"# HELP {name} {name.replace('_', ' ')}", f"# TYPE {name} {kind}", f"{name}{label} {value:g}"]
    for name, histogram in engine.meters.histograms.items():
        lines += exposition.histogram(name, {"model_name": model}, histogram)
    return "\n".join(lines) + "\n"
