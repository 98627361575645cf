"""From settings to the parts that both a single process and each of several are made of."""

import gc
import logging
import os
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from coordinator import config
from coordinator.config import ConfigError, Settings, tracing_headers
from coordinator.config.errors import KeyPath
from coordinator.core.ids import WireIds
from coordinator.discovery import problems as discovery_problems
from coordinator.dispatch import DispatchLimits
from coordinator.engines.context import EngineContext
from coordinator.engines.engine_set import EngineSet, Habits
from coordinator.engines.table import ENGINES, HasChecks, HasSettings, load_engine
from coordinator.frontdoor import DoorSettings
from coordinator.observability import tracing
from coordinator.observability.metrics import Metrics
from coordinator.observability.tracing import TraceExporter, Tracer
from coordinator.policies import POLICY_NAMES, Policies, Policy, inform, load_policy
from coordinator.scheduler import Scheduler
from coordinator.security.checks import problems as security_problems
from coordinator.security.outbound import tls_settings
from coordinator.tokens import Loaded, Tokenizers, missing_extra
from coordinator.transport.client import HttpClient

DISTRIBUTION = "pd-coordinator"
LOAD_BALANCE = "load_balance"  # the policy that has a section of the configuration to itself
GC_YOUNG_OBJECTS = 20000  # new containers between two looks; CPython's own figure is 700
GC_GENERATIONS = 20


def load_settings(path: Path) -> Settings:
    """Read and check a configuration file as `serve` would, without starting anything.

    Raises:
        ConfigError: with every problem.
    """
    known = config.Known(engines=tuple(ENGINES), policies=POLICY_NAMES)
    settings = config.load(path, known, validate_options, engine_settings)
    _check_policy_options(settings)
    try:
        make_policies(settings)
    except ValueError as error:
        raise _refused(settings, ("scheduling", "policy"), str(error)) from error
    _check_engines(settings)
    if found := [*security_problems(settings), *discovery_problems(settings, _make_instance)]:
        lines = settings.source.lines
        raise ConfigError(settings.source.name, [config.Finding(*problem).located(lines) for problem in found])
    _check_tracing(settings)
    folders = _tokenizer_folders(settings)
    missing = missing_extra()
    if folders and missing:
        raise _refused(settings, next(iter(folders.values())), missing)
    return settings


def _check_policy_options(settings: Settings) -> None:
    """Have policies look at their options, also those that are not in use; raises ConfigError."""
    scheduling = settings.scheduling
    for name, given in scheduling.policy_options.items():
        path = ("scheduling", "policy_options", name)
        if name == LOAD_BALANCE:
            raise _refused(settings, path, "its options stand in a section of their own: scheduling.load_balance")
        if name not in POLICY_NAMES and name not in scheduling.policies:
            raise _refused(settings, path, "no role has this policy")
        try:
            load_policy(name, given)
        except ValueError as error:
            raise _refused(settings, path, str(error)) from error


def _make_instance(settings: Settings, keys: Mapping[str, object]) -> object:
    return config.instance_from_mapping(keys, settings, validate_options)


def _check_tracing(settings: Settings) -> None:
    if settings.tracing.endpoint is None:
        return
    if missing := tracing.missing_extra():
        raise _refused(settings, ("tracing", "endpoint"), missing)
    try:
        tracing_headers(settings.tracing)
    except ValueError as error:
        raise _refused(settings, ("tracing", "headers_env"), str(error)) from None


def _check_engines(settings: Settings) -> None:
    """Have engines look at their instances together; raises ConfigError."""
    cluster = settings.cluster
    instances = config.to_instances(settings, validate_options)
    for name in sorted({cluster.engine, *(one.engine for one in instances)}):
        try:
            made = load_engine(name)
            own = engine_settings(name, settings.engines.get(name, {}))
        except ValueError as error:
            raise _refused(settings, ("cluster", "engine"), str(error)) from error
        if isinstance(made, HasChecks):
            mine = [one for one in instances if one.engine == name]
            for flawed, reason in made.check(own, mine, cluster.tokenizer):
                raise _refused(settings, ("cluster", "instances", instances.index(flawed)), reason)


def _refused(settings: Settings, path: KeyPath, reason: str) -> ConfigError:
    source = settings.source
    return ConfigError(source.name, [config.Finding(path, reason).located(source.lines)])


def _tokenizer_folders(settings: Settings) -> dict[Path, KeyPath]:
    """Each folder that is named, with the first key that names it."""
    cluster = settings.cluster
    named: list[tuple[str | None, KeyPath]] = [(cluster.tokenizer, ("cluster", "tokenizer"))]
    named += ((one.tokenizer, ("cluster", "instances", at, "tokenizer")) for at, one in enumerate(cluster.instances))
    return {Path(folder): path for folder, path in reversed(named) if folder is not None}


def make_tokenizers(settings: Settings) -> Tokenizers:
    """The tokenizers that the configuration names, loaded; takes about a second for each.

    Raises:
        ConfigError: one cannot be used.
    """
    tokenizers = Tokenizers()
    renew_tokenizers(settings, tokenizers)()
    return tokenizers


def renew_tokenizers(settings: Settings, tokenizers: Tokenizers) -> Callable[[], None]:
    """Load what is not there yet, or has changed; the result, when called, puts it to use. For any thread.

    Raises:
        ConfigError: one cannot be used.
    """
    cluster = settings.cluster
    default = Path(cluster.tokenizer) if cluster.tokenizer else None
    of_models = {one.model or cluster.model: Path(one.tokenizer) for one in cluster.instances if one.tokenizer}
    loaded: dict[Path, Loaded] = {}
    for folder, path in _tokenizer_folders(settings).items():
        try:
            loaded |= tokenizers.fresh(folder)
        except ValueError as error:
            raise _refused(settings, path, str(error)) from error
    return lambda: tokenizers.adopt(default, of_models, loaded)


def validate_options(engine: str, given: Mapping[str, object]) -> Mapping[str, object]:
    """Check the engine-specific keys of an instance; raises ValueError."""
    return load_engine(engine).options(given)


def engine_settings(engine: str, given: Mapping[str, object]) -> Mapping[str, object]:
    """Check the settings of an engine protocol and fill in its defaults; raises ValueError."""
    made = load_engine(engine)
    if isinstance(made, HasSettings):
        return made.settings(given)
    for key in given:
        raise config.OptionError(key, "this engine has no settings")
    return given


def make_policies(settings: Settings) -> Policies:
    """The policies that the configuration names; raises ValueError."""
    prefill, decode = settings.scheduling.policies
    return Policies(_policy(settings, prefill), _policy(settings, decode))


def _policy(settings: Settings, name: str) -> Policy:
    scheduling = settings.scheduling
    given = dict(scheduling.load_balance) if name == LOAD_BALANCE else scheduling.policy_options.get(name)
    return load_policy(name, given)


def make_scheduler(settings: Settings, engines: Mapping[str, object]) -> Scheduler:
    """The scheduler of a process that serves; raises ValueError for a policy that cannot be made."""
    policies = inform(make_policies(settings), engines.values())
    return Scheduler(policies, max_queue=settings.limits.max_queue, fallback=settings.scheduling.fallback)


def make_engines(
    settings: Settings, client: HttpClient, metrics: Metrics, tokenizers: Tokenizers, worker: int = 0
) -> EngineSet:
    """Every engine protocol of the table and of the configuration, by name."""
    log, habits = logging.getLogger("pd_coordinator.engines"), engine_habits(settings)
    context = EngineContext(client, WireIds(worker), metrics, log, tokenizers=tokenizers)
    engines = EngineSet(habits.given_to(context))
    for name, own in wanted_engines(settings).items():
        engines.make(name, own)
    return engines


def engine_habits(settings: Settings) -> Habits:
    """What the configuration says to all engines."""
    timeouts, health = settings.timeouts.effective, settings.health
    return Habits(timeouts.connect_s, health.path, health.timeout_s)


def wanted_engines(settings: Settings) -> dict[str, Mapping[str, object]]:
    """The settings of every engine protocol of the table and of the configuration, with their defaults, by name."""
    named = {settings.cluster.engine, *(i.engine for i in settings.cluster.instances if i.engine)}
    named |= {source.engine for source in settings.discovery.traits if source.engine}
    return {name: _with_tls(name, settings) for name in sorted(named | set(ENGINES))}


def _with_tls(engine: str, settings: Settings) -> Mapping[str, object]:
    """The settings of an engine; one that reads certificates by itself takes those of `tls.engines` for its own."""
    own = settings.engines.get(engine, {})
    made = engine_settings(engine, own)
    further = tls_settings(settings.tls.engines, made)
    return engine_settings(engine, {**own, **further}) if further else made


def make_tracer(settings: Settings, metrics: Metrics) -> Tracer | None:
    """Who traces requests; None, and nothing imported: nobody does."""
    ours = settings.tracing
    if ours.endpoint is None:
        return None
    from coordinator.observability.tracing import otlp  # noqa: PLC0415 - OpenTelemetry comes with the extra

    process = os.getpid()
    resource: dict[str, str | int] = {
        "service.name": ours.service_name,
        "service.version": version(DISTRIBUTION),
        "service.instance.id": f"{socket.gethostname()}:{process}",
        "host.name": socket.gethostname(),
        "process.pid": process,
    }
    sender = otlp.OtlpSender(otlp.Receiver(ours.endpoint, tracing_headers(ours), resource))
    return Tracer(ours.sample_ratio, TraceExporter(metrics, sender.send, sender.end))


def settle_memory() -> None:
    """Spare the garbage collector what lives as long as the process, and let it look less often.

    Requests leave no cycles behind them, so frequent looks find nothing; they cost about a tenth of a small request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS, GC_GENERATIONS, GC_GENERATIONS)


def dispatch_limits(settings: Settings) -> DispatchLimits:
    """How much and how often, for the dispatcher."""
    return DispatchLimits(
        max_requests=settings.limits.max_requests,
        max_attempts=settings.retry.max_attempts,
        max_recomputes=settings.retry.max_recomputes,
    )


def door_settings(settings: Settings) -> DoorSettings:
    """Deadlines and habits, for the front door."""
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
