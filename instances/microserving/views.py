"""Everything that generates nothing: models, metrics, debug calls."""

import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from instances.front import Severed
from instances.microserving.calls import guarded
from instances.microserving.refusal import bad_request, failed
from instances.openai.refusal import answer

if TYPE_CHECKING:
    from instances.microserving.instance import MicroservingEngine


class Views:
    """The views of one instance."""

    def __init__(self, engine: "MicroservingEngine") -> None:
        self._engine = engine
        self._created = int(time.time())

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`: answered by the HTTP server alone, whatever the engine does."""
        listed = [
            {"id": name, "created": self._created, "object": "model", "owned_by": "MLC-LLM"}
            for name in self._engine.models
        ]
        return answer({"object": "list", "data": listed})

    async def _through_the_loop(self) -> None:
        """A dead loop answers nothing."""
        if self._engine.loop.dead:
            await self._engine.instance.closing.wait()
            raise Severed("hang")

    async def metrics(self, _: web.Request) -> web.Response:
        """`GET /metrics`: goes through the engine loop."""
        await self._through_the_loop()
        lines = [f"{name}\t{value:g}" for name, value in self._engine.loop.metrics().items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def dump_metrics(self, request: web.Request) -> web.Response:
        """`POST /debug/dump_engine_metrics`."""
        await self._model(request)
        await self._through_the_loop()
        return answer(self._engine.loop.metrics())

    async def reset_engine(self, request: web.Request) -> web.Response:
        """`POST /debug/reset_engine`: kills all requests and frees all KV."""
        await self._model(request)
        await self._through_the_loop()
        self._engine.loop.reset("reset_engine")
        return answer(None)

    async def _model(self, request: web.Request) -> None:
        """The body must name a model; raises Refused."""
        text = await request.text()
        try:
            given: Any = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict) or "model" not in given:
            raise bad_request(f"Invalid request {text}")
        models = self._engine.models
        if len(models) > 1 and given["model"] not in models:
            raise failed("no such model")


def routes(engine: "MicroservingEngine") -> list[web.RouteDef]:
    """The routes; those for debugging only where that is enabled."""
    views = Views(engine)
    found = [web.get("/v1/models", guarded(views.models)), web.get("/metrics", guarded(views.metrics))]
    if engine.settings.enable_debug:
        found.append(web.post("/debug/reset_engine", guarded(views.reset_engine)))
        found.append(web.post("/debug/dump_engine_metrics", guarded(views.dump_metrics)))
    return found
