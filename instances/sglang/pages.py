"""Everything that is not inference: health, models, information about the server, metrics."""

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from instances.exposition import histogram, scalar
from instances.openai.pages import CommonPages
from instances.openai.refusal import answer

if TYPE_CHECKING:
    from instances.sglang.instance import SglangEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MODES = {"prefill": "prefill", "decode": "decode", "hybrid": "null"}
_TYPES = {"prefill": "prefill", "decode": "decode", "hybrid": "unified"}


class Pages(CommonPages):
    """The pages of one instance."""

    def __init__(self, engine: "SglangEngine") -> None:
        super().__init__(engine.instance.options.model, "sglang", max_model_len=engine.settings.context_length)
        self._engine = engine

    async def server_info(self, _: web.Request) -> web.Response:
        """`GET /get_server_info`: among others the bootstrap port (§7)."""
        engine, instance = self._engine, self._engine.instance
        return answer(
            {
                "model_path": instance.options.model,
                "served_model_name": instance.options.model,
                "host": instance.host,
                "port": instance.port,
                "disaggregation_mode": _MODES[instance.role],
                "disaggregation_bootstrap_port": engine.bootstrap_port,
                "dp_size": engine.settings.dp_size,
                "tp_size": 1,
                "context_length": engine.settings.context_length,
                "max_total_num_tokens": instance.ledger.total_blocks * instance.ledger.block_tokens,
                "version": engine.settings.version,
            }
        )

    async def model_info(self, _: web.Request) -> web.Response:
        """`GET /get_model_info`."""
        name = self._engine.instance.options.model
        return answer(
            {"model_path": name, "tokenizer_path": name, "is_generation": True, "preferred_sampling_params": None}
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """`GET /metrics` with SGLang's own series names."""
        engine = self._engine
        labels = {"model_name": engine.instance.options.model, "engine_type": _TYPES[engine.instance.role]}
        lines: list[str] = []
        for name, kind, value in _scalars(engine):
            lines += scalar(name, kind, [(labels, value)])
        meters = engine.meters
        for name, values in (
            ("sglang:time_to_first_token_seconds", meters.first_token_s),
            ("sglang:inter_token_latency_seconds", meters.between_tokens_s),
            ("sglang:e2e_request_latency_seconds", meters.request_s),
        ):
            lines += histogram(name, labels, values)
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


def _scalars(engine: "SglangEngine") -> Iterator[tuple[str, str, float]]:
    meters, ledger, prefix = engine.meters, engine.instance.ledger, engine.instance.prefix
    batch, rooms = engine.serving.batch, engine.rooms.state()
    yield "sglang:num_running_reqs", "gauge", batch.running
    yield "sglang:num_queue_reqs", "gauge", batch.waiting + ledger.waiting
    yield "sglang:num_used_tokens", "gauge", ledger.used_blocks * ledger.block_tokens
    yield "sglang:token_usage", "gauge", ledger.used_blocks / ledger.total_blocks
    yield "sglang:cache_hit_rate", "gauge", prefix.hit_tokens / prefix.asked_tokens if prefix.asked_tokens else 0
    yield "sglang:gen_throughput", "gauge", meters.generated_tokens / engine.instance.age_s
    yield "sglang:num_prefill_bootstrap_queue_reqs", "gauge", sum(not room["decode"] for room in rooms)
    yield "sglang:num_prefill_inflight_queue_reqs", "gauge", sum(room["decode"] for room in rooms)
    yield "sglang:num_decode_transfer_queue_reqs", "gauge", len(engine.joined)
    yield "sglang:prompt_tokens", "counter", meters.prompt_tokens.total()
    yield "sglang:generation_tokens", "counter", meters.generated_tokens
    yield "sglang:cached_tokens", "counter", meters.prompt_tokens["cached"]
    yield "sglang:num_requests", "counter", meters.requests
    yield "sglang:num_aborted_requests", "counter", meters.ended["abort"] + engine.aborted
    yield "sglang:num_bootstrap_failed_reqs", "counter", engine.timeouts
    yield "sglang:num_transfer_failed_reqs", "counter", engine.transfers_failed


def routes(engine: "SglangEngine") -> list[web.RouteDef]:
    """The routes of these pages."""
    pages = Pages(engine)
    return [
        *(web.get(path, pages.healthy) for path in sorted(engine.health_paths)),
        web.get("/v1/models", pages.models),
        *(web.get(path, pages.server_info) for path in ("/get_server_info", "/server_info")),
        *(web.get(path, pages.model_info) for path in ("/get_model_info", "/model_info")),
        web.get("/metrics", pages.metrics),
    ]
