"""An instance of the type DEFAULT as an ordinary OpenAI server."""

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from aiohttp import web

from instances.faults import Chosen
from instances.front import CHOSEN
from instances.ledger import OutOfBlocks
from instances.openai import bodies
from instances.openai.ask import Job, choices_of
from instances.openai.fields import Fields
from instances.openai.generation import Call
from instances.openai.meters import Meters
from instances.openai.refusal import Refused, answer, read_object
from instances.openai.serving import Serving
from instances.openai.writers import Chat, Completions, Style

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine


def _error(refused: Refused) -> dict[str, object]:
    return {"error": {"message": refused.text, "code": refused.status}}


_STYLE = Style(finish_apart=True, stop_key="stop_reason", error=_error)


class Plain:
    """Requests that are answered where they come in."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self.serving = Serving(engine.instance, Meters())

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`, `POST /v1/chat/completions`."""
        try:
            return await self._infer(request)
        except Refused as refused:
            return answer(_error(refused), refused.status)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        options = self._instance.options
        if Fields(body).text("model") != options.model:
            raise Refused(404, "Model not supported")
        rules = bodies.Rules(options.max_new_tokens, self._engine.settings.max_context_len, strict=False)
        is_chat = request.path.endswith("/chat/completions")
        ask = (bodies.chat if is_chat else bodies.completions)(body, rules)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        job = Job(name, options.model, ask, choices_of(ask, name, options.seed, options.answer_tokens))
        writer = (Chat if is_chat else Completions)(_STYLE)
        chosen = request.get(CHOSEN, Chosen())
        return await self.serving.run(request, Call(job, writer, _Local(self._engine, job), chosen))


class _Local:
    """KV is computed here and given back at the end."""

    first_token_ready = True

    def __init__(self, engine: "XllmEngine", job: Job) -> None:
        self._instance = engine.instance
        self._job = job

    async def prepare(self) -> None:
        """Take blocks and compute."""
        instance = self._instance
        for choice in self._job.choices:
            try:
                await instance.ledger.wait_allocate(choice.key, choice.kv_tokens, "plain")
            except OutOfBlocks as never:
                raise Refused(429, str(never)) from None
            choice.cached_tokens = instance.prefix.lookup(choice.prompt.tokens)
            uncached = len(choice.prompt.tokens) - choice.cached_tokens
            wait_s = instance.clockwork.prefill_wait_s(uncached, time.monotonic())
            if wait_s:
                await asyncio.sleep(wait_s)

    async def finish(self) -> None:
        """Nothing more is to be done."""

    def ended(self) -> None:
        """The blocks go back."""
        for choice in self._job.choices:
            self._instance.ledger.release(choice.key, "end of request")
