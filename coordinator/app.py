"""The composition root: builds each object once, wires them, listens, drains, and stops in reverse order."""

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from coordinator import config
from coordinator.api.families import FAMILIES
from coordinator.api.routes import RouteTable
from coordinator.cluster import Changes, Cluster, HealthSettings
from coordinator.config import ConfigError, Settings
from coordinator.config.errors import line_of
from coordinator.core.errors import Draining
from coordinator.core.ids import WireIds
from coordinator.core.instance import Instance, Role, State
from coordinator.core.ports import EngineProtocol
from coordinator.dispatch import Dispatcher, DispatchLimits
from coordinator.engines.context import EngineContext
from coordinator.engines.table import ENGINES, load_engine
from coordinator.frontdoor import DoorSettings, FrontDoor, ModelNames, Telemetry
from coordinator.management import Controller, Listen, Management, Traffic
from coordinator.observability.access import AccessLog
from coordinator.observability.metrics import Metrics
from coordinator.policies import POLICY_NAMES, Policies, load_policy
from coordinator.scheduler import Scheduler
from coordinator.server.limits import ServerLimits
from coordinator.server.listener import HttpServer
from coordinator.transport.client import HttpClient

LOG = logging.getLogger("pd_coordinator")
DISTRIBUTION = "pd-coordinator"
LAST_WORDS_S = 1.0  # for error events after the grace time
FROM_FILE = "file"


def load_settings(path: Path) -> Settings:
    """Read and check a configuration file as `serve` would, without starting anything.

    Raises:
        ConfigError: with every problem.
    """
    known = config.Known(engines=tuple(ENGINES), policies=POLICY_NAMES)
    settings = config.load(path, known, validate_options)
    try:
        make_policies(settings)
    except ValueError as error:
        line = line_of(("scheduling", "policy"), settings.source.lines)
        raise ConfigError(str(path), [config.Problem("scheduling.policy", line, str(error))]) from error
    return settings


def validate_options(engine: str, given: Mapping[str, object]) -> Mapping[str, object]:
    """Check the engine-specific keys of an instance; raises ValueError."""
    return load_engine(engine).options(given)


def make_policies(settings: Settings) -> Policies:
    """The policies that the configuration names; raises ValueError."""
    options = dict(settings.scheduling.load_balance)
    prefill, decode = settings.scheduling.policies
    return Policies(
        load_policy(prefill, options if prefill == "load_balance" else None),
        load_policy(decode, options if decode == "load_balance" else None),
    )


class LoadsById:
    """The scheduler's loads as the MindIE controller asks for them: by instance id."""

    def __init__(self, scheduler: Scheduler, dispatcher: Dispatcher) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher

    def allocated(self, instance_id: str) -> tuple[int, int]:
        """Requests and KV blocks placed on an instance; its parts, if it is listed as several, together."""
        found = [load for instance, load in self._scheduler.loads() if instance.id == instance_id]
        return sum(load.requests for load in found), sum(load.blocks for load in found)

    def running(self, instance_id: str) -> int:
        """Requests that need an instance."""
        return sum(
            load.requests + load.pinned for instance, load in self._scheduler.loads() if instance.id == instance_id
        )

    def pair_running(self, prefill_id: str, decode_id: str) -> int:
        """Requests that run on both."""
        return self._scheduler.in_common(prefill_id, decode_id)

    def live(self) -> int:
        """Requests that are there."""
        return self._dispatcher.live


class App:
    """One coordinator process: everything that it is made of, from start to stop.

    Args:
        settings: the configuration.
        access: where finished requests are logged.
        max_connections: clients that may be connected at once; None: no bound.
        path: the file that `reload` reads again; None: there is none.
    """

    def __init__(
        self, settings: Settings, access: AccessLog, *, max_connections: int | None = None, path: Path | None = None
    ) -> None:
        self.settings = settings
        self._path = path
        self.metrics = Metrics([family.name for family in FAMILIES])
        self._traffic = Traffic()
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self.scheduler = Scheduler(
            make_policies(settings), max_queue=settings.limits.max_queue, fallback=settings.scheduling.fallback
        )
        self._engines = self._make_engines()
        self.cluster = Cluster(
            self._engines,
            HealthSettings(**settings.health.model_dump(exclude={"path"})),
            in_flight=self.scheduler.in_flight,
            log=logging.getLogger("pd_coordinator.cluster"),
        )
        self.scheduler.on_idle = self.cluster.idle
        self.cluster.subscribe(self.scheduler.on_view)
        self.dispatcher = Dispatcher(
            self.scheduler, self.cluster, self._engines, self.metrics, _dispatch_limits(settings)
        )
        self.door = FrontDoor(
            RouteTable(FAMILIES),
            self.dispatcher,
            self._model_names(),
            Telemetry(self.metrics, access, self._traffic.note),
            _door_settings(settings),
            self.cluster.ready_pair,
        )
        limits = ServerLimits(
            max_body_bytes=settings.limits.max_body_bytes,
            max_header_bytes=settings.limits.max_header_bytes,
            max_connections=max_connections,
        )
        self.server = HttpServer(self.door.handle, limits, logging.getLogger("pd_coordinator.server"))
        self.management = self._make_management()
        self._declare_gauges()

    # --- parts

    def _make_engines(self) -> dict[str, EngineProtocol]:
        settings = self.settings
        context = EngineContext(
            client=self._client,
            ids=WireIds(),
            metrics=self.metrics,
            log=logging.getLogger("pd_coordinator.engines"),
            connect_s=settings.timeouts.effective.connect_s,
            health_path=settings.health.path,
            health_timeout_s=settings.health.timeout_s,
        )
        named = {settings.cluster.engine, *(i.engine for i in settings.cluster.instances if i.engine)}
        return {name: load_engine(name)(context) for name in sorted(named | set(ENGINES))}

    def _model_names(self) -> ModelNames:
        cluster = self.settings.cluster
        return ModelNames(
            cluster.model, cluster.model_aliases, listed=self.cluster.models, accepted=self.cluster.accepts
        )

    def _make_instance(self, given: Mapping[str, object]) -> Instance:
        return config.instance_from_mapping(given, self.settings, validate_options)

    def _make_management(self) -> Management:
        server = self.settings.server
        loads = LoadsById(self.scheduler, self.dispatcher)
        return Management(
            Listen(server.management_host, server.management_port, server.metrics_port, server.status_port),
            self.cluster,
            make_instance=self._make_instance,
            metrics=self.metrics.render,
            controller=Controller(self.cluster, self._make_instance, loads, self._traffic),
        )

    def _declare_gauges(self) -> None:
        add = self.metrics.add_gauge
        add("requests_in_flight", lambda: [((), self.dispatcher.live)])
        add("requests_queued", lambda: [((), self.scheduler.queued)])
        add("instance_in_flight", self._read_loads)
        add("instance_up", self._read_states)
        add("kv_pinned_requests", self._read_pinned)

    def _read_loads(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for instance, load in self.scheduler.loads():
            yield (instance.id, instance.role), load.requests + load.pinned

    def _read_pinned(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for instance, load in self.scheduler.loads():
            if instance.role is Role.PREFILL:
                yield (instance.id,), load.pinned

    def _read_states(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for instance, state in self.cluster.states():
            yield (instance.id, instance.role), float(state in (State.READY, State.SUSPECT))

    # --- life

    async def start(self) -> None:
        """Listen and begin to look after the instances.

        Raises:
            OSError: a port cannot be had; nothing is left open.
        """
        try:
            self._take_instances(self.settings)
            await self.cluster.start()
            self.management.serving = False
            await self.management.start()
            await self.server.listen(self.settings.server.host, self.settings.server.port)
            self.management.serving = True
        except BaseException:
            await self.aclose()
            raise

    def reload(self) -> bool:
        """Read the file again and take its instances; a faulty file changes nothing and is told in the log."""
        if self._path is None:
            return False
        try:
            settings = load_settings(self._path)
            changes = self._take_instances(settings)
        except ConfigError as error:
            self.metrics.config_reloads.labels("invalid").inc()
            LOG.error("configuration not reloaded, nothing has changed: %s", error)
            return False
        waiting = sorted(section for section, value in settings if value != getattr(self.settings, section))
        if "cluster" in waiting and _but_instances(settings) == _but_instances(self.settings):
            waiting.remove("cluster")
        self.metrics.config_reloads.labels("ok").inc()
        LOG.info(
            "configuration reloaded: added %s, removed %s, changed %s",
            *(", ".join(ids) or "none" for ids in (changes.added, changes.removed, changes.changed)),
        )
        if waiting:
            LOG.warning("changed sections that take effect at the next start: %s", ", ".join(waiting))
        return True

    def _take_instances(self, settings: Settings) -> Changes:
        changes = self.cluster.replace(FROM_FILE, config.to_instances(settings, validate_options))
        for instance_id, reason in changes.refused.items():
            LOG.warning("instance %s of the file is not used: %s", instance_id, reason)
        return changes

    async def drain(self) -> None:
        """Take no more requests and let live ones end, within `timeouts.drain_s`; then end those that are left."""
        self.management.draining = True
        self.server.draining = True
        self.dispatcher.draining = True
        await self.dispatcher.drained(self.settings.timeouts.effective.drain_s)
        if self.dispatcher.live:
            LOG.warning("%d requests outlived the grace time and are ended", self.dispatcher.live)
            self.dispatcher.interrupt_all(Draining())
            await self.dispatcher.drained(LAST_WORDS_S)

    async def aclose(self) -> None:
        """Stop everything, the way back from how it was started; sends the aborts that are due."""
        await self.server.aclose()
        for engine in self._engines.values():
            await engine.aclose()
        await self.cluster.aclose()
        await self.management.aclose()
        await self._client.aclose()


def _but_instances(settings: Settings) -> object:
    return settings.cluster.model_copy(update={"instances": ()})


def _dispatch_limits(settings: Settings) -> DispatchLimits:
    return DispatchLimits(
        max_requests=settings.limits.max_requests,
        max_attempts=settings.retry.max_attempts,
        max_recomputes=settings.retry.max_recomputes,
    )


def _door_settings(settings: Settings) -> DoorSettings:
    timeouts = settings.timeouts.effective
    return DoorSettings(
        schedule_s=timeouts.schedule_s,
        first_token_s=timeouts.first_token_s,
        inter_token_s=timeouts.inter_token_s,
        request_s=timeouts.request_s,
        stream_buffer_bytes=settings.limits.stream_buffer_bytes,
        tell_route=settings.server.route_headers,
        version=version(DISTRIBUTION),
    )
