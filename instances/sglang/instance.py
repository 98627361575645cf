"""An SGLang instance with the bootstrap protocol: routes and the way of a request (SGLang protocol page)."""

import uuid
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from instances.faults import Chosen, Menu
from instances.front import CHOSEN, RECORD
from instances.openai import bodies
from instances.openai.ask import Ask, Job, choices_of
from instances.openai.fields import Fields
from instances.openai.generation import Call
from instances.openai.meters import Meters
from instances.openai.refusal import Refused, invalid, read_object
from instances.openai.serving import Serving
from instances.openai.writers import Chat, Completions, Style, Writer
from instances.server import Instance
from instances.sglang import bootstrap, native, pages
from instances.sglang.legs import Alone, DecodeLeg, PrefillLeg
from instances.sglang.native import Native
from instances.sglang.pages import Handler
from instances.sglang.refusal import ABORTED, error_answer, error_event
from instances.sglang.rooms import Rooms
from instances.sglang.settings import MENU, Settings

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_INFERENCE = (CHAT, COMPLETIONS, GENERATE)
_STYLE = Style(finish_apart=True, stop_key="matched_stop", error=error_event)
_USUAL_PORT = 8998


class SglangEngine:
    """The SGLang part of an instance."""

    menu: Menu = MENU
    health_paths = frozenset({"/health", "/health_generate"})
    aborts_on_disconnect = True

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.settings = Settings.read(instance.options.settings)
        self.bootstrap_port = self.settings.bootstrap_port if self.settings.bootstrap_port > 0 else _USUAL_PORT
        self.meters = Meters()
        self.serving = Serving(instance, self.meters)
        self.rooms = Rooms(self)
        self.joined: set[tuple[str, int, int]] = set()
        self.duplicate_rooms = self.timeouts = self.transfers_failed = self.wrong_kv = self.aborted = 0

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths."""
        return [
            *(web.post(path, self._guarded(self._infer)) for path in _INFERENCE),
            web.post("/abort_request", self._guarded(self._abort)),
            web.post("/sim/room/join", self.rooms.join),
            *pages.routes(self),
        ]

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request."""
        return method == "POST" and path in _INFERENCE

    def error(self, status: int, text: str) -> web.Response:
        """An error in the shape of the OpenAI paths."""
        return error_answer(Refused(status, text), native=False)

    async def start(self) -> None:
        """Start the batch; open the bootstrap server, on prefill."""
        self.instance.tasks.spawn(self.serving.batch.run(), f"{self.instance.name} generates")
        if self.instance.role == "prefill":
            port = self.settings.bootstrap_port
            self.bootstrap_port = self.instance.port if port < 0 else await self.instance.listen_too(port)

    def forget(self) -> None:
        """Lose all requests and rooms."""
        self.serving.forget()
        self.rooms.forget()
        self.joined.clear()

    async def aclose(self) -> None:
        """End everything that waits."""
        self.forget()

    def announce(self) -> str:
        """Prefill's bootstrap port."""
        return f"bootstrap port {self.bootstrap_port}" if self.instance.role == "prefill" else ""

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "generating": len(self.serving.live),
            "batch": {"running": self.serving.batch.running, "waiting": self.serving.batch.waiting},
            "waiting_for_blocks": self.instance.ledger.waiting,
            "generated_tokens": self.meters.generated_tokens,
            "bootstrap_port": self.bootstrap_port,
            "rooms": self.rooms.state()
            if self.instance.role == "prefill"
            else sorted(room for *_, room in self.joined),
            "transferred": self.rooms.transferred,
            "duplicate_rooms": self.duplicate_rooms,
            "timeouts": self.timeouts,
            "transfers_failed": self.transfers_failed,
            "wrong_kv": self.wrong_kv,
            "aborted": self.aborted,
        }

    def act(self, name: str, value: str) -> None:
        """abort: all requests, or those whose id begins with the value. go_on."""
        if name == "go_on":
            self.serving.go_on()
            return
        if name != "abort":
            raise ValueError(f"cannot do {name!r}")
        self.abort(value)

    def abort(self, rid: str) -> None:
        """End the requests whose id begins so, in whatever state they are."""
        for generation in list(self.serving.live):
            if generation.call.job.id.startswith(rid):
                self.aborted += 1
                generation.fail(Refused(500, ABORTED))

    # --- requests

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                return error_answer(refused, native=request.path == GENERATE)

        return guarded

    async def _abort(self, request: web.Request) -> web.Response:
        """`POST /abort_request`: `rid`, or `abort_all`."""
        fields = Fields(await read_object(request))
        rid = fields.text("rid") or ""
        if rid or fields.boolean("abort_all"):
            self.abort(rid)
        return web.Response()

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        if self.instance.starting:
            raise Refused(503, "the model is not loaded yet")
        body = await read_object(request)
        ask, writer = self._read(request.path, body)
        rid = Fields(body).text("rid") or uuid.uuid4().hex
        if any(generation.call.job.id == rid for generation in self.serving.live):
            raise invalid(f"Duplicate request ID detected: {rid}")
        options = self.instance.options
        job = Job(rid, options.model, ask, choices_of(ask, rid, options.seed, options.answer_tokens))
        chosen = request.get(CHOSEN, Chosen())
        work = self._work(body, job, chosen)
        try:
            return await self.serving.run(request, Call(job, writer, work, chosen))
        finally:
            request[RECORD].note = work.note()

    def _read(self, path: str, body: dict[str, Any]) -> tuple[Ask, Writer]:
        settings = self.settings
        if path == GENERATE:
            ask = native.parse(body, settings.context_length)
            return ask, Native(prompt_logprobs=self.instance.role != "decode")
        rules = bodies.Rules(self.instance.options.max_new_tokens, settings.context_length, strict=False)
        if path == CHAT:
            return bodies.chat(body, rules), Chat(_STYLE)
        return bodies.completions(body, rules), Completions(_STYLE)

    def _work(self, body: dict[str, Any], job: Job, chosen: Chosen) -> Alone:
        """What the role asks for; an ordinary instance (hybrid) does not look at the meeting."""
        role = self.instance.role
        if role == "hybrid":
            return Alone(self, job, chosen)
        meetings = bootstrap.read(body, job.ask, self.bootstrap_port)
        ranks = bootstrap.Ranks.read(body)
        size = self.settings.dp_size
        if ranks.own is not None and ranks.own >= size:
            raise invalid(f"routed_dp_rank must be in [0, {size}), got {ranks.own}")
        if role == "decode":
            return DecodeLeg(self, job, meetings, ranks, chosen)
        for meeting in meetings:
            if not self._is_self(meeting):
                raise invalid(
                    f"bootstrap_host and bootstrap_port must be {self.instance.host}:{self.bootstrap_port}, "
                    f"got {meeting.host}:{meeting.port}",
                    "bootstrap_host",
                )
        return PrefillLeg(self, job, meetings, ranks, chosen)

    def _is_self(self, meeting: bootstrap.Meeting) -> bool:
        names = {self.instance.host}
        if self.instance.host in ("127.0.0.1", "::1"):
            names.add("localhost")
        return meeting.host.strip("[]") in names and meeting.port == self.bootstrap_port
