"""A vLLM instance with the NIXL connector: routes and the way of a request (vLLM protocol page §1)."""

import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from instances.faults import Chosen, Menu
from instances.front import CHOSEN, RECORD
from instances.openai import bodies
from instances.openai.ask import Ask, Choice, Job, choices_of
from instances.openai.fields import Fields
from instances.openai.generation import Call
from instances.openai.meters import Meters
from instances.openai.refusal import Refused, answer, invalid, read_object
from instances.openai.serving import Serving
from instances.openai.writers import Chat, Completions, Style
from instances.server import Instance
from instances.vllm import pages
from instances.vllm.handoffs import Handoffs
from instances.vllm.metrics import transfer_histogram
from instances.vllm.pages import Handler
from instances.vllm.refusal import error_value
from instances.vllm.settings import MENU, Settings
from instances.vllm.work import Local, Prefilling, Reading

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_STYLE = Style(finish_apart=False, stop_key="stop_reason", error=error_value)


class VllmEngine:
    """The vLLM part of an instance."""

    menu: Menu = MENU
    health_paths = frozenset({"/health", "/ping"})
    aborts_on_disconnect = True

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.settings = Settings.read(instance.options.settings)
        self.side_channel_port = 0
        self.meters = Meters()
        self.transfer_s = transfer_histogram()
        self.serving = Serving(instance, self.meters)
        self.handoffs = Handoffs(self)
        self.load_failures: Counter[str] = Counter()
        self.recomputed_locally = self.wrong_kv = self.wrong_role = 0
        self._live_ids: Counter[str] = Counter()

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths."""
        return [
            *(web.post(path, self._guarded(self._infer)) for path in (CHAT, COMPLETIONS)),
            web.post("/sim/kv/open", self.handoffs.open),
            web.post("/sim/kv/close", self.handoffs.close),
            *pages.routes(self, self._guarded),
        ]

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request."""
        return method == "POST" and path in (CHAT, COMPLETIONS)

    def error(self, status: int, text: str) -> web.Response:
        """An error in vLLM's shape."""
        return answer(error_value(Refused(status, text)), status)

    async def start(self) -> None:
        """Start the batch; open the side channel."""
        self.instance.tasks.spawn(self.serving.batch.run(), f"{self.instance.name} generates")
        port = self.settings.side_channel_port
        self.side_channel_port = self.instance.port if port < 0 else await self.instance.listen_too(port)

    def forget(self) -> None:
        """Lose all requests and come up as another engine."""
        self.serving.forget()
        self.handoffs.restart()

    async def aclose(self) -> None:
        """End everything that waits."""
        self.forget()

    def announce(self) -> str:
        """Nothing: the side channel is told in the params."""
        return ""

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "generating": len(self.serving.live),
            "batch": {"running": self.serving.batch.running, "waiting": self.serving.batch.waiting},
            "waiting_for_blocks": self.instance.ledger.waiting,
            "generated_tokens": self.meters.generated_tokens,
            "handoffs": self.handoffs.state(),
            "side_channel_port": self.side_channel_port,
            "load_failures": dict(self.load_failures),
            "recomputed_locally": self.recomputed_locally,
            "wrong_kv": self.wrong_kv,
            "wrong_role": self.wrong_role,
        }

    def act(self, name: str, value: str) -> None:
        """restart: another engine id on the same port, requests and KV lost, connections kept. go_on."""
        if name == "go_on":
            self.serving.go_on()
            return
        if name != "restart" or value:
            raise ValueError(f"cannot do {name!r}")
        self.forget()
        self.instance.ledger.clear("restart")
        self.instance.prefix.clear()

    def transferred(self, choice: Choice, took_s: float) -> None:
        """The KV of a prompt was read from prefill."""
        self.meters.transferred(choice)
        self.transfer_s.observe(took_s)

    # --- requests

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                return answer(error_value(refused), refused.status)

        return guarded

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        if self.instance.starting:
            raise Refused(503, "the model is not loaded yet")
        body = await read_object(request)
        self.check_model(Fields(body).text("model"))
        options, settings = self.instance.options, self.settings
        rules = bodies.Rules(options.max_new_tokens, settings.max_model_len, strict=True)
        is_chat = request.path == CHAT
        ask = (bodies.chat if is_chat else bodies.completions)(body, rules)
        params = transfer_params(body)
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        if settings.same_request_id and (self._live_ids[request_id] or self.handoffs.holds(request_id)):
            raise invalid(f"Request id {request_id} already running.")
        job = self._job(("chatcmpl-" if is_chat else "cmpl-") + request_id, ask)
        work = self._work(job, params, request_id, request.get(CHOSEN, Chosen()))
        writer = (Chat if is_chat else Completions)(_STYLE)
        self._live_ids[request_id] += 1
        try:
            return await self.serving.run(request, Call(job, writer, work, request.get(CHOSEN, Chosen())))
        finally:
            self._live_ids -= Counter({request_id: 1})
            request[RECORD].note = work.note()

    def _job(self, name: str, ask: Ask) -> Job:
        options = self.instance.options
        choices = choices_of(ask, f"{name}-{uuid.uuid4().hex[:8]}", options.seed, options.answer_tokens)
        return Job(name, options.model, ask, choices)

    def _work(self, job: Job, params: dict[str, Any], request_id: str, chosen: Chosen) -> Local:
        """What the params ask for; an instance without a connector (hybrid) does not look at them."""
        role = self.instance.role
        if role == "hybrid":
            return Local(self, job)
        if params.get("do_remote_decode"):
            self.wrong_role += role != "prefill"
            return Prefilling(self, job, request_id, chosen)
        if params.get("do_remote_prefill"):
            self.wrong_role += role != "decode"
            return Reading(self, job, params, request_id, chosen)
        self.recomputed_locally += role == "decode"
        return Local(self, job)

    def check_model(self, named: str | None) -> None:
        """404 for a model that is not served; none passes."""
        if named and named != self.instance.options.model:
            raise Refused(404, f"The model `{named}` does not exist.", "model")


def transfer_params(body: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params`, empty if there is none; raises Refused."""
    fields = Fields(body).object("kv_transfer_params")
    if fields is None:
        return {}
    decode, prefill = fields.boolean("do_remote_decode"), fields.boolean("do_remote_prefill")
    if decode and prefill:
        raise invalid("do_remote_decode and do_remote_prefill exclude each other", "kv_transfer_params")
    params: dict[str, Any] = body["kv_transfer_params"]
    return params
