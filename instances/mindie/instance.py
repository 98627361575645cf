"""A MindIE instance: routes and the way of a request through its role."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from instances import answers
from instances.faults import Chosen, Menu
from instances.front import CHOSEN
from instances.mindie import control_headers, pages
from instances.mindie.ask import Ask, Call, Job
from instances.mindie.decode import Decode, require_object
from instances.mindie.families import TRITON_PATH, family_of, serves
from instances.mindie.hybrid import Hybrid
from instances.mindie.metrics import Meters
from instances.mindie.pages import Handler
from instances.mindie.prefill import Prefill
from instances.mindie.refusal import Refused, error_response, too_large
from instances.mindie.settings import LINK_FAULTS, MENU, Settings
from instances.server import Instance

_STOP_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_TOO_LARGE = 413


class MindieEngine:
    """The MindIE part of an instance."""

    menu: Menu = MENU
    health_paths = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})
    # a prefill goes on without its caller: only stopInfer or decode's pull ends it
    aborts_on_disconnect = False

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.settings = Settings.read(instance.options.settings)
        if self.settings.start_role:
            instance.role = self.settings.start_role
        self.inter_comm_port: int | None = None
        self.peers: list[str] = []
        self.meters = Meters()
        self.prefill = Prefill(self)
        self.decode = Decode(self)
        self.hybrid = Hybrid(self)
        self._ids = itertools.count(1)

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths."""
        inference = ("/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/", "/infer")
        return [
            *(web.post(path, self._guarded(self._infer)) for path in (*inference, "/infer_token")),
            web.post(r"/v2/models/{model:[\w.\-]+}/{call:generate|generate_stream|infer}", self._guarded(self._infer)),
            web.post(r"/v2/models/{model:[\w.\-]+}/stopInfer", self._guarded(self._stop)),
            web.get("/dresult", self._guarded(self.decode.dresult.get)),
            web.post("/sim/handover", self.decode.handover),
            web.post("/sim/release", self.prefill.release),
            *pages.routes(self, self._guarded),
        ]

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request."""
        return method == "POST" and serves(path)

    def error(self, status: int, text: str) -> web.Response:
        """An error in MindIE's shape."""
        return too_large(self.instance.options.max_body_bytes) if status == _TOO_LARGE else error_response(status, text)

    async def start(self) -> None:
        """Start the decode loops and heartbeats."""
        tasks, name = self.instance.tasks, self.instance.name
        tasks.spawn(self.decode.batch.run(), f"{name} decodes")
        tasks.spawn(self.hybrid.batch.run(), f"{name} infers")
        tasks.spawn(self.decode.dresult.beat(), f"{name} beats")
        if self.settings.inter_comm_port >= 0:
            self.inter_comm_port = await self.instance.listen_too(self.settings.inter_comm_port)

    def forget(self) -> None:
        """Lose all requests."""
        for part in (self.prefill, self.decode, self.hybrid):
            part.forget()

    async def aclose(self) -> None:
        """End the standing stream and everything that waits."""
        self.decode.dresult.close()
        self.forget()
        await asyncio.sleep(0)

    def announce(self) -> str:
        """The further port, if there is one."""
        return "" if self.inter_comm_port is None else f"inter_comm_port {self.inter_comm_port}"

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            **self.prefill.state(),
            **self.decode.state(),
            "inferring": list(self.hybrid.live),
            "inter_comm_port": self.inter_comm_port,
        }

    def act(self, name: str, value: str) -> None:
        """dresult_end, dresult_close, dresult_fin, dresult_reset, silence (seconds), preempt, go_on."""
        stream = self.decode.dresult.current
        if name == "preempt":
            self.decode.preempt_all()
        elif name == "go_on":
            self.decode.go_on()
        elif name in (*LINK_FAULTS, "silence") and stream is None:
            raise ValueError("no /dresult stream is open")
        elif name in LINK_FAULTS and stream is not None:
            stream.end(name)
        elif name == "silence" and stream is not None:
            stream.mute(float(value or 30))
        else:
            raise ValueError(f"cannot do {name!r}")

    # --- requests

    def job(self, req_id: str, ask: Ask) -> Job:
        """The work that a request means here."""
        options = self.instance.options
        plan = answers.plan(ask.wish, options.seed, options.answer_tokens)
        if ask.done != plan.tokens[: len(ask.done)] or len(ask.done) >= len(plan):
            raise Refused(422, "the recompute input does not continue the answer")
        return Job(req_id, options.model, ask, plan, sent=len(ask.done))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                self.meters.failed += self.infers(request.method, request.path)
                return error_response(refused.status, refused.text)

        return guarded

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        chosen = request.get(CHOSEN, Chosen())
        self.meters.received += 1
        role = self.known_role
        control = None if role == "hybrid" else control_headers.check(role, request.headers)
        standard = control is None or self._is_self(control)
        recompute = control is not None and control.recompute
        body = await read_json(request)
        family = family_of(request.path, body)
        self._check_model(request.path, body)
        limit = self.instance.options.max_new_tokens
        ask = family.parse(Call(request.path, body, recompute, dmi=not standard, limit=limit))
        given = request.headers.get("req-id") if control is None else control.req_id
        job = self.job(given or str(next(self._ids)), ask)
        if control is None or standard:
            return await self.hybrid.serve(request, family, job, chosen)
        return await self.prefill.serve(control, family, job, chosen)

    @property
    def known_role(self) -> str:
        """The role, `none` during the start."""
        return "none" if self.instance.starting else self.instance.role

    def _is_self(self, control: control_headers.Control) -> bool:
        """Whether d-target means this instance; several share an address here, so the ports count too."""
        if control.target_host != self.instance.host:
            return False
        if control.inter_port is not None:
            return control.inter_port == self.inter_comm_port
        return control.data_port in (None, self.instance.port)

    def _check_model(self, path: str, body: Mapping[str, Any]) -> None:
        """OpenAI bodies and Triton paths name a model; another than the served one is not found."""
        triton = TRITON_PATH.fullmatch(path)
        named = triton.group("model") if triton else body.get("model") if path.startswith("/v1/") else None
        self.check_model_name(named)

    def check_model_name(self, named: object) -> None:
        """404 for a model that is not served; None passes."""
        if isinstance(named, str) and named and named != self.instance.options.model:
            raise Refused(404, f"Model {named} is not found.")

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        """`POST /v2/models/{m}/stopInfer` (MindIE protocol page §7)."""
        self.check_model_name(request.match_info["model"])
        body = await read_json(request)
        req_id = body.get("id")
        if not isinstance(req_id, str) or not _STOP_ID.fullmatch(req_id):
            raise Refused(422, "id must match ^[a-zA-Z0-9_-]{1,256}$")
        stopped = [part.stop(req_id) for part in (self.prefill, self.decode, self.hybrid)]
        if not any(stopped):
            raise Refused(404, f"RequestId is {req_id} not found.")
        return web.Response(body=await request.read(), content_type="application/json")


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object, whatever the content type; raises Refused (422)."""
    try:
        return require_object(json.loads(await request.read()))
    except (ValueError, RecursionError):
        raise Refused(422, "the body is not valid JSON") from None
