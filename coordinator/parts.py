"""From settings to the parts that both a single process and each of several are made of."""

import gc
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from coordinator import config
from coordinator.config import ConfigError, Settings
from coordinator.config.errors import KeyPath
from coordinator.core.ids import WireIds
from coordinator.core.ports import EngineProtocol
from coordinator.dispatch import DispatchLimits
from coordinator.engines.context import EngineContext
from coordinator.engines.table import ENGINES, HasChecks, HasSettings, load_engine
from coordinator.frontdoor import DoorSettings
from coordinator.observability.metrics import Metrics
from coordinator.policies import POLICY_NAMES, Policies, load_policy
from coordinator.security.checks import problems as security_problems
from coordinator.tokens import Tokenizers, missing_extra
from coordinator.transport.client import HttpClient

DISTRIBUTION = "pd-coordinator"
GC_YOUNG_OBJECTS = 20000  # new containers between two looks; CPython's own figure is 700
GC_GENERATIONS = 20


def load_settings(path: Path) -> Settings:
    """Read and check a configuration file as `serve` would, without starting anything.

    Raises:
        ConfigError: with every problem.
    """
    known = config.Known(engines=tuple(ENGINES), policies=POLICY_NAMES)
    settings = config.load(path, known, validate_options, engine_settings)
    try:
        make_policies(settings)
    except ValueError as error:
        raise _refused(settings, ("scheduling", "policy"), str(error)) from error
    _check_engines(settings)
    if found := list(security_problems(settings)):
        lines = settings.source.lines
        raise ConfigError(settings.source.name, [config.Finding(*problem).located(lines) for problem in found])
    folders = _tokenizer_folders(settings)
    missing = missing_extra()
    if folders and missing:
        raise _refused(settings, next(iter(folders.values())), missing)
    return settings


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
    cluster = settings.cluster
    of_models = {one.model or cluster.model: Path(one.tokenizer) for one in cluster.instances if one.tokenizer}
    tokenizers = Tokenizers(Path(cluster.tokenizer) if cluster.tokenizer else None, of_models)
    for folder, path in _tokenizer_folders(settings).items():
        try:
            tokenizers.load([folder])
        except ValueError as error:
            raise _refused(settings, path, str(error)) from error
    return tokenizers


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
    options = dict(settings.scheduling.load_balance)
    prefill, decode = settings.scheduling.policies
    return Policies(
        load_policy(prefill, options if prefill == "load_balance" else None),
        load_policy(decode, options if decode == "load_balance" else None),
    )


def make_engines(
    settings: Settings, client: HttpClient, metrics: Metrics, tokenizers: Tokenizers, worker: int = 0
) -> dict[str, EngineProtocol]:
    """Every engine protocol of the table and of the configuration, by name."""
    context = EngineContext(
        client=client,
        ids=WireIds(worker),
        metrics=metrics,
        log=logging.getLogger("pd_coordinator.engines"),
        connect_s=settings.timeouts.effective.connect_s,
        health_path=settings.health.path,
        health_timeout_s=settings.health.timeout_s,
        tokenizers=tokenizers,
    )
    named = {settings.cluster.engine, *(i.engine for i in settings.cluster.instances if i.engine)}
    made: dict[str, EngineProtocol] = {}
    for name in sorted(named | set(ENGINES)):
        own = engine_settings(name, settings.engines.get(name, {}))
        made[name] = load_engine(name)(replace(context, settings=own))
    return made


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
