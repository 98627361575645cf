"""What serves clients: front door, dispatcher and HTTP server, on top of a scheduler and engines."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from coordinator.api.families import FAMILIES
from coordinator.api.routes import RouteTable
from coordinator.config import Settings
from coordinator.core.errors import Draining
from coordinator.core.ports import EngineProtocol, Members
from coordinator.dispatch import Dispatcher
from coordinator.frontdoor import FrontDoor, ModelNames, Telemetry
from coordinator.parts import dispatch_limits, door_settings, make_tracer
from coordinator.scheduler import Scheduler
from coordinator.security.keys import Key
from coordinator.security.proxies import TrustedProxies
from coordinator.server.limits import ServerLimits
from coordinator.server.listener import HttpServer

LOG = logging.getLogger("pd_coordinator")
NOBODYS: Mapping[str, str] = MappingProxyType({})
LAST_WORDS_S = 1.0  # for error events after the grace time


class DataPlane:
    """The data plane of one process.

    Args:
        members: who is there; is told of failures.
        max_connections: clients that may be connected at once; None: no bound.
    """

    def __init__(  # the composition root hands over what it has built
        self,
        settings: Settings,
        members: Members,
        scheduler: Scheduler,
        engines: Mapping[str, EngineProtocol],
        telemetry: Telemetry,
        *,
        max_connections: int | None = None,
    ) -> None:
        self.settings = settings
        self._metrics = telemetry.metrics
        self._retiring: set[asyncio.Task[None]] = set()
        cluster = settings.cluster
        self.dispatcher = Dispatcher(scheduler, members, engines, telemetry.metrics, dispatch_limits(settings))
        names = self._names = ModelNames(
            cluster.model, cluster.model_aliases, listed=members.models, accepted=members.accepts
        )
        self.door = FrontDoor(
            RouteTable(FAMILIES), self.dispatcher, names, telemetry, door_settings(settings), members.ready_pair
        )
        self.door.tracer = make_tracer(settings, telemetry.metrics)
        limits = ServerLimits(
            max_body_bytes=settings.limits.max_body_bytes,
            max_header_bytes=settings.limits.max_header_bytes,
            max_connections=max_connections,
        )
        self.server = HttpServer(
            self.door.handle, limits, logging.getLogger("pd_coordinator.server"), gate=self.door.gate
        )

    def renew(self, settings: Settings) -> None:
        """Serve what comes from here on by these; requests that run keep their deadlines."""
        self.settings = settings
        self.dispatcher.renew(dispatch_limits(settings))
        self._names.rename(settings.cluster.model, settings.cluster.model_aliases)
        self.door.settings = door_settings(settings)
        limits = settings.limits
        self.server.limits = replace(
            self.server.limits, max_body_bytes=limits.max_body_bytes, max_header_bytes=limits.max_header_bytes
        )

    async def prepare_tracing(self, settings: Settings) -> Callable[[], None]:
        """Build what traces requests by these settings; the result, when called, puts it in the place of the former.

        Raises:
            ValueError: a variable with headers has become useless.
        """
        if settings.tracing == self.settings.tracing:
            return lambda: None
        tracer = await asyncio.to_thread(make_tracer, settings, self._metrics)

        def apply() -> None:
            former, self.door.tracer = self.door.tracer, tracer
            if former is not None:
                task = asyncio.create_task(former.aclose(), name="last traces")
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

        return apply

    async def aclose(self) -> None:
        """Send the traces that are left, within a short time."""
        if self.door.tracer is not None:
            await self.door.tracer.aclose()
        if self._retiring:
            await asyncio.wait(self._retiring)

    def belonging(self) -> Mapping[str, str]:
        """The request whose work runs just now, for a line of the log; nothing if it is none's.

        All live requests are looked through: it is asked for lines that are written anyway, and those are few.
        """
        try:
            task = asyncio.current_task()
        except RuntimeError:  # another thread
            return NOBODYS
        if task is None:
            return NOBODYS
        found = (record for scope, record in self.dispatcher.records.items() if scope.task is task)
        return next((record.fields() for record in found), NOBODYS)

    def secure(self, settings: Settings, keys: Sequence[Key] | None) -> None:
        """Go by these keys, and by what else the settings say of whom to believe; None: nobody needs a key."""
        self.door.guard.take(keys)
        self.door.proxies = TrustedProxies(settings.server.trusted_proxies)

    async def drain(self, within_s: float) -> None:
        """Take no more requests and let live ones end within `within_s`; then end those that are left."""
        self.server.draining = True
        self.dispatcher.draining = True
        await self.dispatcher.drained(within_s)
        if self.dispatcher.live:
            LOG.warning("%d requests outlived the grace time and are ended", self.dispatcher.live)
            self.dispatcher.interrupt_all(Draining())
            await self.dispatcher.drained(LAST_WORDS_S)
