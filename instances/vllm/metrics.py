"""`GET /metrics` with vLLM's own series names."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instances.exposition import Histogram, histogram, scalar

if TYPE_CHECKING:
    from instances.vllm.instance import VllmEngine

_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_SOURCES = {"computed": "local_compute", "cached": "local_cache_hit", "transferred": "external_kv_transfer"}
_REASONS = ("stop", "length", "abort", "error")


def transfer_histogram() -> Histogram:
    """Of the times that KV transfers took."""
    return Histogram(_TRANSFER_S)


def _scalars(engine: "VllmEngine") -> Iterator[tuple[str, str, float]]:
    meters, ledger, prefix = engine.meters, engine.instance.ledger, engine.instance.prefix
    batch = engine.serving.batch
    yield "vllm:num_requests_running", "gauge", batch.running
    yield "vllm:num_requests_waiting", "gauge", batch.waiting + ledger.waiting
    yield "vllm:kv_cache_usage_perc", "gauge", ledger.used_blocks / ledger.total_blocks
    yield "vllm:num_preemptions", "counter", 0
    yield "vllm:prompt_tokens", "counter", meters.prompt_tokens.total()
    yield "vllm:generation_tokens", "counter", meters.generated_tokens
    yield "vllm:prefix_cache_queries", "counter", prefix.asked_tokens
    yield "vllm:prefix_cache_hits", "counter", prefix.hit_tokens
    yield "vllm:external_prefix_cache_queries", "counter", meters.prompt_tokens["transferred"]
    yield "vllm:external_prefix_cache_hits", "counter", meters.prompt_tokens["transferred"]
    yield "vllm:nixl_num_failed_transfers", "counter", engine.load_failures.total()
    yield "vllm:nixl_num_failed_notifications", "counter", 0
    yield "vllm:nixl_num_kv_expired_reqs", "counter", engine.handoffs.expired


def page(engine: "VllmEngine") -> str:
    """The Prometheus text, always the same list of metrics."""
    meters, labels = engine.meters, {"engine": "0", "model_name": engine.instance.options.model}
    lines: list[str] = []
    for name, kind, value in _scalars(engine):
        lines += scalar(name, kind, [(labels, value)])
    by_source = [({**labels, "source": shown}, meters.prompt_tokens[source]) for source, shown in _SOURCES.items()]
    lines += scalar("vllm:prompt_tokens_by_source", "counter", by_source)
    by_reason = [({**labels, "finished_reason": reason}, meters.ended[reason]) for reason in _REASONS]
    lines += scalar("vllm:request_success", "counter", by_reason)
    for name, values in (
        ("vllm:time_to_first_token_seconds", meters.first_token_s),
        ("vllm:inter_token_latency_seconds", meters.between_tokens_s),
        ("vllm:e2e_request_latency_seconds", meters.request_s),
        ("vllm:request_prompt_tokens", meters.prompt_length),
        ("vllm:request_generation_tokens", meters.answer_length),
        ("vllm:nixl_xfer_time_seconds", engine.transfer_s),
    ):
        lines += histogram(name, labels, values)
    return "\n".join(lines) + "\n"
