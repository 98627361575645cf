"""Everything that is not inference: models, health, version, tokenizer, metrics."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from instances import tokens
from instances.openai import bodies
from instances.openai.fields import Fields
from instances.openai.refusal import answer, invalid, read_object
from instances.vllm import metrics

if TYPE_CHECKING:
    from instances.vllm.instance import VllmEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """The pages of one instance."""

    def __init__(self, engine: "VllmEngine") -> None:
        self._engine = engine
        self._created = int(time.time())

    async def healthy(self, _: web.Request) -> web.Response:
        """`/health`, `/ping`; faults and the start-up time are seen to before this."""
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        name = self._engine.instance.options.model
        model = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.settings.max_model_len,
            "permission": [],
        }
        return answer({"object": "list", "data": [model]})

    async def version(self, _: web.Request) -> web.Response:
        """`GET /version`."""
        return answer({"version": self._engine.settings.version})

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: a prompt or messages."""
        body = await read_object(request)
        fields = Fields(body)
        self._engine.check_model(fields.text("model"))
        text = bodies.chat_text(body) if "messages" in body else fields.text("prompt")
        if text is None:
            raise invalid("prompt: Field required", "prompt")
        ids = tokens.encode(text)
        shown = [tokens.decode([token]) for token in ids] if fields.boolean("return_token_strs") else None
        longest = self._engine.settings.max_model_len
        return answer({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": shown})

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`."""
        fields = Fields(await read_object(request))
        self._engine.check_model(fields.text("model"))
        return answer({"prompt": tokens.decode(fields.token_ids("tokens"))})

    async def metrics(self, _: web.Request) -> web.Response:
        """`GET /metrics`."""
        return web.Response(text=metrics.page(self._engine), content_type="text/plain")


def routes(engine: "VllmEngine", guarded: Callable[[Handler], Handler]) -> list[web.RouteDef]:
    """The routes of these pages."""
    pages = Pages(engine)
    return [
        *(web.get(path, pages.healthy) for path in sorted(engine.health_paths)),
        web.get("/v1/models", pages.models),
        web.get("/version", pages.version),
        web.post("/tokenize", guarded(pages.tokenize)),
        web.post("/detokenize", guarded(pages.detokenize)),
        web.get("/metrics", pages.metrics),
    ]
