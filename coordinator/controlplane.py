"""What looks after the instances: cluster, management plane, gauges, and reading the configuration again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from coordinator import config
from coordinator.cluster import Changes, Cluster, HealthSettings
from coordinator.config import Settings
from coordinator.core.abilities import DiscoveringEngine
from coordinator.core.instance import Instance, Role, State
from coordinator.core.ports import EngineProtocol
from coordinator.discovery import Discovery, make_plans
from coordinator.engines.engine_set import EngineSet
from coordinator.management import (
    ConfigCalls,
    Controller,
    EngineMetrics,
    EngineMetricsSettings,
    Listen,
    Management,
    StageWatch,
    Traffic,
)
from coordinator.management.live import LiveFeed
from coordinator.management.page import LivePage
from coordinator.management.sources import SourcesApi
from coordinator.observability.metrics import Metrics
from coordinator.parts import DISTRIBUTION, validate_options
from coordinator.reloading import Reloader
from coordinator.sight import ClusterSight, Counted
from coordinator.transport.client import HttpClient
from coordinator.work import InstanceLoad, LoadsById, Work

LOG = logging.getLogger("pd_coordinator")
FROM_FILE = "file"


class FoundByEngine:
    """Members that an engine protocol finds by itself (core.abilities.Host)."""

    def __init__(self, engine: str, control: "ControlPlane") -> None:
        self._engine = engine
        self._control = control

    def make(self, keys: Mapping[str, object]) -> Instance:
        """See core.abilities.Host."""
        return self._control.make_instance({"engine": self._engine, **keys})

    def announce(self, instances: Sequence[Instance]) -> Mapping[str, str]:
        """See core.abilities.Host."""
        return self._control.cluster.replace(self._engine, instances).refused

    def works(self) -> Sequence[InstanceLoad]:
        """See core.abilities.Host."""
        return [load for load in self._control.work.loads() if load.instance.engine == self._engine]


class ControlPlane:
    """The control plane; there is one, however many processes serve.

    Args:
        client: asks instances for their own metrics.
        counted: what all processes have counted and seen, for the live feed.
        path: the file that `reload` reads again; None: there is none.
        render: makes the text for `/metrics`.

    Attributes:
        reloader: reads the configuration again, and knows which one is in force.
    """

    def __init__(  # noqa: PLR0913  # the composition root hands over what it has built
        self,
        settings: Settings,
        engines: EngineSet,
        metrics: Metrics,
        work: Work,
        *,
        client: HttpClient,
        counted: Counted,
        path: Path | None = None,
        render: Callable[[], bytes | Awaitable[bytes]] | None = None,
    ) -> None:
        self._engines = engines
        self._beginning: set[asyncio.Task[None]] = set()
        self._metrics = metrics
        self.work = work
        self.reloader = Reloader(path, settings, engines, metrics, self._renew)
        self.traffic = Traffic()
        self.cluster = Cluster(
            engines,
            _health(settings),
            in_flight=work.in_flight,
            log=logging.getLogger("pd_coordinator.cluster"),
        )
        self.discovery = Discovery(self.cluster)
        self.engine_metrics = EngineMetrics(_engine_metrics(settings), client, self.cluster.known, metrics)
        self.stages = StageWatch(self._count_stages)
        about = {"version": version(DISTRIBUTION), "model": settings.cluster.model, "workers": settings.server.workers}
        self.live = LiveFeed(ClusterSight(self.cluster, work, self.stages, counted), about)
        server = settings.server
        self.management = Management(
            Listen(server.management_host, server.management_port, server.metrics_port, server.status_port),
            self.cluster,
            make_instance=self.make_instance,
            metrics=render or metrics.render,
            controller=Controller(self.cluster, self.make_instance, LoadsById(work), self.traffic),
            extra=[
                *LivePage().routes(),
                *self.live.routes(),
                *ConfigCalls(self.reloader).routes(),
                *SourcesApi(self.discovery.describe).routes(),
            ],
        )
        self.management.engine_metrics = self.engine_metrics.page
        self._declare_gauges()

    def make_instance(self, given: Mapping[str, object]) -> Instance:
        """An instance from keys of the configuration file; raises ValueError with a sentence."""
        return config.instance_from_mapping(given, self.settings, validate_options)

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self.reloader.settings

    async def start(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Look after the instances and listen; `serve` opens the data port: until it has, probes say so.

        Raises:
            OSError: a port cannot be had; what has begun is left to `aclose`.
        """
        self.take_instances(self.settings)
        await self.cluster.start()
        await self._discover_all()
        self.stages.start()
        self.engine_metrics.start()
        self.management.serving = False
        await self.management.start()
        await serve()
        self.management.serving = True

    async def aclose(self) -> None:
        """Look no more, stop listening, and let the instances go."""
        await self.reloader.aclose()
        await self.discovery.aclose()
        for task in self._beginning:
            task.cancel()
        if self._beginning:
            await asyncio.wait(self._beginning)
        await self.live.aclose()
        await self.stages.aclose()
        await self.engine_metrics.aclose()
        await self.cluster.aclose()
        await self.management.aclose()

    async def _discover_all(self) -> None:
        """Begin to look for instances, and let engines that find theirs by themselves do so; raises OSError."""
        self._look_for(self.settings)
        for name, engine in self._engines.items():
            if isinstance(engine, DiscoveringEngine):
                await engine.discover(FoundByEngine(name, self))

    def welcome(self, name: str, engine: EngineProtocol) -> None:
        """An engine protocol has been added: if it finds instances by itself, it may begin."""
        if isinstance(engine, DiscoveringEngine):
            task = asyncio.get_running_loop().create_task(self._discover(name, engine), name=f"discover:{name}")
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _discover(self, name: str, engine: DiscoveringEngine) -> None:
        try:
            await engine.discover(FoundByEngine(name, self))
        except OSError as error:
            LOG.error("engine %s cannot look for instances: %s", name, error.strerror or error)

    # --- gauges

    def _count_stages(self) -> Mapping[str, int]:
        """Requests by stage; those of hybrid instances are in none, since nobody knows how far they are."""
        prefill = handoff = placed = 0
        for load in self.work.loads():
            if load.instance.role is Role.PREFILL:
                prefill += load.requests
                handoff += load.pinned
            elif load.instance.role is Role.DECODE:
                placed += load.requests
        decode = max(0, placed - prefill - handoff)
        return {"queue": self.work.queued(), "prefill": prefill, "handoff": handoff, "decode": decode}

    def _declare_gauges(self) -> None:
        add = self._metrics.add_gauge
        add("requests_in_flight", lambda: [((), self.work.live())])
        add("requests_queued", lambda: [((), self.work.queued())])
        add("instance_in_flight", self._read_loads)
        add("instance_up", self._read_states)
        add("kv_pinned_requests", self._read_pinned)
        add("stage_requests", self.stages.read_counts)
        add("engine_scrape_age_seconds", self.engine_metrics.read_ages)
        add("discovery_up", self.discovery.read_up)
        add("discovery_instances", self.discovery.read_instances)
        add("bottleneck_stage", self.stages.read_bottleneck)

    def _read_loads(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for load in self.work.loads():
            yield (load.instance.id, load.instance.role), load.requests + load.pinned

    def _read_pinned(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for load in self.work.loads():
            if load.instance.role is Role.PREFILL or load.left:
                yield (load.instance.id,), load.pinned + load.left

    def _read_states(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for instance, state in self.cluster.states():
            yield (instance.id, instance.role), float(state in (State.READY, State.SUSPECT))

    # --- the file

    def take_instances(self, settings: Settings) -> Changes:
        """Make the instances of the file those of these settings; raises ConfigError."""
        return self._take(config.to_instances(settings, validate_options))

    def _take(self, instances: Sequence[Instance]) -> Changes:
        changes = self.cluster.replace(FROM_FILE, instances)
        for instance_id, reason in changes.refused.items():
            LOG.warning("instance %s of the file is not used: %s", instance_id, reason)
        return changes

    def _renew(self, settings: Settings, instances: Sequence[Instance]) -> Changes:
        """Go by other settings; for the reloader."""
        self.cluster.renew(_health(settings))
        self.engine_metrics.renew(_engine_metrics(settings))
        changes = self._take(instances)
        self._look_for(settings)
        return changes

    def _look_for(self, settings: Settings) -> None:
        """Look for instances where these settings say."""

        def make(keys: Mapping[str, object]) -> Instance:
            return config.instance_from_mapping(keys, settings, validate_options)

        self.discovery.apply(make_plans(settings, make, validate_options))


def _health(settings: Settings) -> HealthSettings:
    return HealthSettings(**settings.health.model_dump(exclude={"path"}))


def _engine_metrics(settings: Settings) -> EngineMetricsSettings:
    return EngineMetricsSettings(**settings.metrics.engines.model_dump())
