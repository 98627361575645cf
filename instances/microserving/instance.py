"""An MLC engine with the microserving calls (microserving protocol page)."""

import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from instances.faults import COMMON_MENU, Chosen, Menu
from instances.front import CHOSEN
from instances.microserving import views
from instances.microserving.calls import Calls, Handler, guarded
from instances.microserving.loop import Loop
from instances.microserving.memory import Pages
from instances.microserving.refusal import Refused, error_answer
from instances.microserving.settings import MENU, Settings
from instances.microserving.work import Worker
from instances.server import Instance

PREP, SEND, GENERATE = "/microserving/prep_recv", "/microserving/remote_send", "/microserving/start_generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_INFERENCE = (PREP, SEND, GENERATE, COMPLETIONS, CHAT)


class MicroservingEngine:
    """The MLC part of an instance."""

    menu: Menu = MENU
    health_paths = frozenset({"/v1/models", "/metrics"})
    aborts_on_disconnect = True

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.settings = Settings.read(instance.options.settings)
        pages = Pages(instance.options.blocks)
        instance.ledger = pages  # pages have 16 tokens, whatever the options say
        self.loop = Loop(instance, self.settings, pages)
        self.worker = Worker(self.loop)
        further = [name for name in self.settings.more_models.split(",") if name]
        self.models = [instance.options.model, *further]
        self.wrong_role = 0
        self._number = 0

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths."""
        calls = Calls(self)
        return [
            web.post(PREP, self._ready(calls.prep_recv)),
            web.post(SEND, self._ready(calls.remote_send)),
            web.post(GENERATE, self._ready(calls.start_generate)),
            web.post(COMPLETIONS, self._ready(calls.completions)),
            web.post(CHAT, self._ready(calls.chat)),
            *views.routes(self),
        ]

    def _ready(self, handler: Handler) -> Handler:
        """A call that wants the key, where it is under `/v1/`, and an engine that has started."""

        async def run(request: web.Request) -> web.StreamResponse:
            key = self.settings.api_key
            if key and request.path.startswith("/v1/") and request.headers.get("Authorization") != f"Bearer {key}":
                raise Refused(401, "Invalid API key")
            if self.instance.starting:
                raise Refused(503, "the model is not loaded yet")
            return await handler(request)

        return guarded(run)

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request: each of the three calls is one."""
        return method == "POST" and path in _INFERENCE

    def error(self, status: int, text: str) -> web.Response:
        """An error in the engine's shapes."""
        return error_answer(Refused(status, text))

    async def start(self) -> None:
        """Take ranks; start the batch. Raises ValueError if the ranks are taken."""
        self.worker.first_rank = await self.worker.world.join(self.settings.pe_start, self.settings.num_gpus)
        self.instance.tasks.spawn(self.loop.batch.run(), f"{self.instance.name} generates")

    def forget(self) -> None:
        """Come up as a new process: alive, with no request and no KV."""
        self.loop.restart()

    async def aclose(self) -> None:
        """Leave the world; end everything that waits."""
        await self.worker.world.aclose()
        self.loop.restart()

    @property
    def recv_rank(self) -> int:
        """What remote_send must be told to reach this instance."""
        return self.worker.first_rank

    def announce(self) -> str:
        """The rank that remote_send must be told."""
        return f"recv_rank {self.recv_rank}"

    def act(self, name: str, value: str) -> None:
        """die: the engine loop ends behind living HTTP. preempt: all running requests, or that of a `user`. go_on."""
        if name == "die":
            self.loop.die(value or "asked for")
        elif name == "preempt":
            for running in list(self.loop.running.values()):
                if value in ("", running.ask.user):
                    self.loop.preempt(running)
        elif name == "go_on":
            self.worker.went_on.set()
        else:
            raise ValueError(f"cannot do {name!r}")

    # --- requests

    async def choose(self, request: web.Request) -> Chosen:
        """The faults of a new request: those of this engine count requests, those of all engines count calls."""
        if self.instance.ordinal == 1:  # the first call since the start, or since a reset
            self._number = 0
        self._number += 1
        text = (await request.read()).decode("utf-8", "replace")
        return self.merged(request.get(CHOSEN, Chosen()), self.instance.faults.choose(self._number, text))

    @staticmethod
    def merged(of_call: Chosen, of_request: Chosen) -> Chosen:
        """The faults of a call and of the request that it belongs to."""
        if not of_call and not of_request:
            return of_call
        found = [of_call.get(name) for name in COMMON_MENU] + [of_request.get(name) for name in MENU]
        return Chosen(fault for fault in found if fault is not None)

    def expect(self, role: str) -> None:
        """Any engine can do any call; what another role is expected to do is counted."""
        self.wrong_role += self.instance.role not in (role, "hybrid")

    # --- views

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        loop, now_s = self.loop, time.monotonic()
        return {
            "recv_rank": self.recv_rank,
            "num_gpus": self.settings.num_gpus,
            "world": self.worker.world.name,
            "dead": loop.died_of,
            "live": list(loop.streams),
            "generating": [running.ask.user for running in loop.running.values()],
            "batch": {"running": loop.batch.running, "waiting": loop.batch.waiting},
            "waiting_for_pages": loop.pages.waiting,
            "reserved": [
                {
                    "user": user,
                    "end": one.end,
                    "matched": one.matched,
                    "complete": one.complete,
                    "for_s": round(now_s - one.since_s, 6),
                }
                for user, one in loop.reservations.items()
            ],
            "generated_tokens": loop.made_tokens,
            "prefix_hit_tokens": loop.radix.hit_tokens,
            "counts": dict(loop.counts),
            "wrong_role": self.wrong_role,
        }
