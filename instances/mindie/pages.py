"""Everything that is not inference: models, probes, tokenizer, management (MindIE protocol page §2.2, §9.5)."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from instances import tokens
from instances.mindie import metrics
from instances.mindie.families.form import dump
from instances.mindie.fields import Fields
from instances.mindie.refusal import Refused

if TYPE_CHECKING:
    from instances.mindie.instance import MindieEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MODEL = r"/v2/models/{model:[\w.\-]+}"


def _answer(value: Any) -> web.Response:
    return web.Response(body=dump(value), content_type="application/json")


class Pages:
    """The pages of one instance."""

    def __init__(self, engine: "MindieEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self._created = int(time.time())

    async def healthy(self, _: web.Request) -> web.Response:
        """`/health` and the like; faults and the start-up time are seen to before this."""
        return web.Response()

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._instance.options.model,
            "object": "model",
            "created": self._created,
            "owned_by": "MindIE Server",
            "root": None,
            "parent": None,
        }

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return _answer({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{id}`."""
        self._engine.check_model_name(request.match_info["model"])
        return _answer(self._model())

    async def info(self, _: web.Request) -> web.Response:
        """`GET /info`."""
        options = self._instance.options
        return _answer(
            {
                "docker_label": None,
                "max_batch_total_tokens": options.blocks * options.block_tokens,
                "max_best_of": 1,
                "max_concurrent_requests": options.max_running,
                "max_stop_sequences": None,
                "max_waiting_tokens": None,
                "sha": None,
                "validation_workers": None,
                "version": "1.0.0",
                "waiting_served_ratio": None,
                "model_id": options.model,
                "model_sha": None,
                "model_pipeline_tag": None,
                "max_input_length": options.blocks * options.block_tokens,
                "max_total_tokens": options.blocks * options.block_tokens,
            }
        )

    async def server(self, _: web.Request) -> web.Response:
        """`GET /v2`."""
        return _answer({"name": "MindIE Server", "version": "1.0.0", "extensions": []})

    async def triton_model(self, request: web.Request) -> web.Response:
        """`GET /v2/models/{m}`."""
        self._engine.check_model_name(request.match_info["model"])
        tensor = {"datatype": "UINT32", "shape": [-1, -1]}
        return _answer(
            {
                "name": self._instance.options.model,
                "versions": None,
                "platform": "MindIE Server",
                "inputs": [{"name": "input0", **tensor}],
                "outputs": [{"name": "output0", **tensor}],
            }
        )

    async def triton_config(self, request: web.Request) -> web.Response:
        """`GET /v2/models/{m}/config`: the same as `/v1/config`."""
        self._engine.check_model_name(request.match_info["model"])
        return await self.config(request)

    async def tokenizer(self, request: web.Request) -> web.Response:
        """`POST /v1/tokenizer`."""
        try:
            body = await request.json()
        except ValueError:
            raise Refused(422, "the body is not valid JSON") from None
        if not isinstance(body, dict):
            raise Refused(422, "the body must be a JSON object")
        fields = Fields(body)
        ids = tokens.encode(fields.needed_text("inputs"))
        decoded = fields.boolean("do_decode")
        shown = [tokens.decode([token]) for token in ids] if decoded else list(ids)
        return _answer({"token_number": len(ids), "tokens": shown})

    async def metrics(self, _: web.Request) -> web.Response:
        """`GET /metrics`."""
        return web.Response(text=metrics.page(self._engine), content_type="text/plain")

    # --- management

    async def config(self, _: web.Request) -> web.Response:
        """`GET /v1/config`."""
        options = self._instance.options
        return _answer(
            {
                "modelName": options.model,
                "maxSeqLen": options.blocks * options.block_tokens,
                "npuMemSize": 8,
                "cpuMemSize": 5,
                "worldSize": 1,
                "maxOutputLen": options.max_new_tokens,
                "cacheBlockSize": options.block_tokens,
            }
        )

    async def status(self, request: web.Request) -> web.Response:
        """`GET /v1/status` and `/v2/status`."""
        instance, decode = self._instance, self._engine.decode
        ledger, running = instance.ledger, decode.batch.running + self._engine.hybrid.batch.running
        slots = max(0, instance.options.max_running - running)
        resource: dict[str, Any] = {
            "availSlotsNum": slots,
            "availBlockNum": ledger.free_blocks,
            "waitingRequestNum": decode.batch.waiting,
            "runningRequestNum": running,
            "swappedRequestNum": 0,
            "freeNpuBlockNums": ledger.free_blocks,
            "freeCpuBlockNums": 0,
            "totalNpuBlockNums": ledger.total_blocks,
            "totalCpuBlockNums": 0,
        }
        if request.path.startswith("/v2"):
            resource |= {
                "totalAvailNpuSlotsNum": slots,
                "totalAvailNpuBlockNum": ledger.free_blocks,
                "maxAvailNpuBlockNum": ledger.free_blocks,
                "dpInstMap": {},
            }
        ready = "RoleUnknown" if instance.starting or instance.role == "none" else "RoleReady"
        role = "none" if instance.role == "hybrid" else instance.role
        peers = [{"target": peer, "link": "ok"} for peer in self._engine.peers]
        return _answer(
            {
                "service": {"roleStatus": ready, "currentRole": role},
                "resource": resource,
                "linkStatus": {"peers": peers},
            }
        )

    async def set_role(self, request: web.Request) -> web.Response:
        """`POST /v1/role/{role}`, `/v2/role/{role}`."""
        try:
            body = await request.json()
            peers = [str(peer["host_ip"]) for peer in body.get("peers", [])]
        except (ValueError, AttributeError, KeyError, TypeError):
            raise Refused(422, "the body must be {local, peers}") from None
        self._instance.role = request.match_info["role"]
        self._engine.peers = peers
        return _answer({"result": "ok"})


def routes(engine: "MindieEngine", guarded: Callable[[Handler], Handler]) -> list[web.RouteDef]:
    """The routes of these pages."""
    pages = Pages(engine)
    return [
        *(web.get(path, pages.healthy) for path in sorted(engine.health_paths)),
        web.get(r"/health/timed-{seconds:\d+}", pages.healthy),
        web.get("/v1/models", pages.models),
        web.get("/v1/models/{model}", guarded(pages.model)),
        web.get("/info", pages.info),
        web.get("/v2", pages.server),
        web.get(_MODEL, guarded(pages.triton_model)),
        web.get(_MODEL + "/config", guarded(pages.triton_config)),
        web.get(_MODEL + "/ready", pages.healthy),
        web.post("/v1/tokenizer", guarded(pages.tokenizer)),
        web.get("/metrics", pages.metrics),
        web.get("/v1/config", pages.config),
        web.get("/v1/status", pages.status),
        web.get("/v2/status", pages.status),
        web.post("/v1/role/{role:prefill|decode|flex}", guarded(pages.set_role)),
        web.post("/v2/role/{role:prefill|decode}", guarded(pages.set_role)),
    ]
