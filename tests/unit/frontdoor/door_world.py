"""A front door over a dispatcher that does what a test says."""

import asyncio
import math

from client_side import Client

from coordinator.api.families import FAMILIES
from coordinator.api.routes import RouteTable
from coordinator.core.ports import Answer
from coordinator.frontdoor import DoorSettings, FrontDoor, ModelNames, Telemetry
from coordinator.observability.metrics import Metrics

SETTINGS = DoorSettings(
    schedule_s=60.0, first_token_s=600.0, inter_token_s=120.0, request_s=math.inf, stream_buffer_bytes=1000,
    tell_route=False, version="1.2.3",
)  # fmt: skip


class ScriptedDispatcher:
    """Notes requests; answers `{"ok":1}` unless `error` is set."""

    def __init__(self):
        self.requests = []
        self.records = []
        self.calls = []
        self.error = None
        self.wait = None

    async def run(self, request, relay, record):
        self.requests.append(request)
        self.records.append(record)
        await self._go()
        relay.whole(b'{"ok":1}', request.arrived_s + 1)

    async def call(self, request):
        self.calls.append(request)
        await self._go()
        return Answer(200, b"application/json; charset=utf-8", b'{"token_number":1}')

    async def _go(self):
        if self.wait is not None:
            await self.wait.wait()
        if self.error is not None:
            raise self.error


class Lines:
    """Takes the place of the access log."""

    def __init__(self):
        self.records = []

    def finished(self, record):
        self.records.append(record)


class World:
    def __init__(self, *, model="m", aliases=("dummy",), served=("m",), settings=SETTINGS):
        self.dispatcher = ScriptedDispatcher()
        self.metrics = Metrics([family.name for family in FAMILIES])
        self.lines = Lines()
        self.traffic = []
        self.ready = True
        names = ModelNames(
            model, aliases, listed=lambda: served, accepted=lambda name: model is None or name in (*served, model)
        )
        self.door = FrontDoor(
            RouteTable(FAMILIES),
            self.dispatcher,
            names,
            Telemetry(self.metrics, self.lines, lambda *numbers: self.traffic.append(numbers)),
            settings,
            lambda: (self.ready, "because"),
        )

    async def ask(self, target, body=b"", **client):
        """The answer of one request."""
        client.setdefault("method", "POST" if body else "GET")
        made = Client(target, body, **client)
        await self.door.handle(made.exchange)
        return made

    def start(self, target, body, **client):
        made = Client(target, body, **client)
        return made, asyncio.create_task(self.door.handle(made.exchange), name="handler")

    def counted(self):
        """(api, outcome) of every request that was counted."""
        return {labels: cell[0] for labels, cell in self.metrics.requests.snapshot().items() if cell[0]}
