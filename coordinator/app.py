"""The composition root of a single process: builds each object once, wires them, and stops in reverse order."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from coordinator.api.families import FAMILIES
from coordinator.config import Settings
from coordinator.controlplane import ControlPlane
from coordinator.core.instance import Instance
from coordinator.core.ports import EngineProtocol, KvHolder
from coordinator.dataplane import DataPlane
from coordinator.dispatch import Dispatcher
from coordinator.frontdoor import Telemetry
from coordinator.observability.access import AccessLog
from coordinator.observability.metrics import Metrics
from coordinator.observability.recent import Recent
from coordinator.parts import make_engines, make_scheduler, make_tokenizers
from coordinator.renewal import Renewal
from coordinator.scheduler import Scheduler
from coordinator.securing import Security
from coordinator.security.certificates import Certificates
from coordinator.sight import OwnCounts
from coordinator.transport.client import HttpClient
from coordinator.work import InstanceLoad


class OwnWork:
    """The work of this process as the control plane asks for it (coordinator.work.Work)."""

    def __init__(self, scheduler: Scheduler, engines: Mapping[str, EngineProtocol]) -> None:
        self._scheduler = scheduler
        self._engines = engines
        self.dispatcher: Dispatcher | None = None
        self.in_common = scheduler.in_common

    def loads(self) -> Iterator[InstanceLoad]:
        """What is on each instance."""
        held = Counter[str]()
        for engine in self._engines.values():
            if isinstance(engine, KvHolder):
                held.update(engine.pinned())
        for instance, load in self._scheduler.loads():
            yield InstanceLoad(instance, load.requests, load.blocks, load.pinned, held[instance.id])

    def in_flight(self, instance: Instance) -> int:
        """Requests that still need an instance."""
        return self._scheduler.in_flight(instance)

    def live(self) -> int:
        """Requests that are there."""
        return self.dispatcher.live if self.dispatcher is not None else 0

    def queued(self) -> int:
        """Requests that wait for an instance."""
        return self._scheduler.queued


class App:
    """One coordinator process: both planes, from start to stop.

    Args:
        settings: the configuration.
        access: where finished requests are logged.
        max_connections: clients that may be connected at once; None: no bound.
        path: the file that is read again when it has changed; None: there is none.
    """

    def __init__(
        self, settings: Settings, access: AccessLog, *, max_connections: int | None = None, path: Path | None = None
    ) -> None:
        self.metrics = Metrics([family.name for family in FAMILIES])
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self._certificates = Certificates(settings, self._client.peers, "data", "management")
        self._tokenizers = make_tokenizers(settings)
        self._engines = make_engines(settings, self._client, self.metrics, self._tokenizers)
        self.scheduler = make_scheduler(settings, self._engines)
        work = OwnWork(self.scheduler, self._engines)
        recent = Recent()
        counted = OwnCounts(self.metrics, recent)
        self.control = ControlPlane(
            settings, self._engines, self.metrics, work, client=self._client, counted=counted, path=path
        )
        self.cluster = self.control.cluster
        self.management = self.control.management
        telemetry = Telemetry(self.metrics, access, self.control.traffic.note, recent)
        self.data = DataPlane(
            settings, self.cluster, self.scheduler, self._engines, telemetry, max_connections=max_connections
        )
        self._certificates.on_change = self._engines.renew_certificates
        self.management.tls = self._certificates.context("management")
        self.data.server.tls = self._certificates.context("data")
        self.security = Security(settings, self.management, self._certificates, self.data.secure, self.metrics)
        self.control.reloader.parts.append(self.security.apply)
        self.control.reloader.renewal = self.renewal = Renewal(
            settings, self._client, self._tokenizers, self._engines, scheduler=self.scheduler, data=self.data
        )
        self._engines.on_new = self.control.welcome
        self.dispatcher = work.dispatcher = self.data.dispatcher
        self.server = self.data.server
        self.scheduler.on_idle = self.cluster.idle
        self.cluster.on_gone = self._forget
        self.cluster.subscribe(self.scheduler.on_view)

    def _forget(self, gone: Instance) -> None:
        """Drop the series of an instance that has left, unless another one goes by its id."""
        if all(instance.id != gone.id for instance in self.cluster.known()):
            self.metrics.forget_instance(gone.id)

    @property
    def port(self) -> int:
        """The data port."""
        return self.server.port

    async def start(self) -> None:
        """Listen and begin to look after the instances.

        Raises:
            OSError: a port cannot be had; nothing is left open.
            ConfigError: a file with keys has become useless since it was checked.
        """
        try:
            self.security.start()
            await self.control.start(self._listen)
        except BaseException:
            await self.aclose()
            raise

    async def _listen(self) -> None:
        await self.server.listen(self.settings.server.host, self.settings.server.port)

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        return self.control.settings

    def hang_up(self) -> None:
        """Read the file again, soon; what comes of it is in the log."""
        self.control.reloader.request()

    async def drain(self) -> None:
        """Take no more requests and let live ones end, within `timeouts.drain_s`; then end those that are left."""
        self.management.draining = True
        await self.data.drain(self.settings.timeouts.effective.drain_s)

    async def aclose(self) -> None:
        """Stop everything, the way back from how it was started; sends the aborts that are due."""
        await self.control.discovery.aclose()
        await self.security.aclose()
        await self.server.aclose()
        for engine in self._engines.values():
            await engine.aclose()
        await self._tokenizers.aclose()
        await self.data.aclose()
        await self.control.aclose()
        await self._client.aclose()
