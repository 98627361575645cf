"""Everything that is not inference: models, health, version, tokenizer, metrics."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from instances import tokens
from instances.openai import bodies
from instances.openai.fields import Fields
from instances.openai.pages import CommonPages
from instances.openai.refusal import answer, invalid, read_object
from instances.vllm import metrics

if TYPE_CHECKING:
    from instances.vllm.instance import VllmEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages(CommonPages):
    """The pages of one instance."""

    def __init__(self, engine: "VllmEngine") -> None:
        super().__init__(
            engine.instance.options.model, "vllm", max_model_len=engine.settings.max_model_len, permission=[]
        )
        self._engine = engine

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
