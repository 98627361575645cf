"""The configuration is read again: checked and built as a whole first, then exchanged in one turn of the event loop."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from coordinator import config
from coordinator.cluster import Changes
from coordinator.config import Change, ConfigError, Logging, Problem, Settings
from coordinator.core.instance import Instance
from coordinator.engines.engine_set import EngineSet, fixed_settings
from coordinator.observability.metrics import Metrics
from coordinator.parts import engine_settings, load_settings, validate_options

LOG = logging.getLogger("pd_coordinator")
READ_S = 60.0
MOST_ASKED = 2  # one that reads, and one for what was written meanwhile
Part = Callable[[Settings], None]
"""Goes by other settings; may raise ConfigError, with nothing changed."""


Apply = Callable[[], None]


class Renewing(Protocol):
    """What this process has that goes by the configuration; see renewal.Renewal."""

    async def prepare(self, settings: Settings) -> Apply:
        """Build what these settings need; the result exchanges it. Raises ConfigError, TimeoutError or ValueError."""
        ...

    def log_by(self, logging: Logging) -> None:
        """Log in this way."""
        ...


class Processes(Protocol):
    """The other processes that serve."""

    async def prepare(self, settings: Settings) -> None:
        """Have all of them build what these settings need; raises ConfigError."""
        ...

    def commit(self) -> None:
        """Have them exchange it."""
        ...

    def drop(self) -> None:
        """Have them forget it."""
        ...

    def log_by(self, logging: Logging) -> None:
        """Have them log in this way."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that can be applied.

    Attributes:
        settings: what will run.
        waiting: keys that differ in the file and wait for the next start.
        apply: exchanges what this process has.
    """

    settings: Settings
    instances: Sequence[Instance]
    changes: tuple[Change, ...]
    waiting: tuple[str, ...]
    apply: Apply


@dataclass(frozen=True, slots=True)
class Report:
    """What came of reading the configuration again."""

    changes: tuple[Change, ...] = ()
    waiting: tuple[str, ...] = ()
    instances: Changes = field(default_factory=Changes)

    def as_data(self) -> dict[str, object]:
        """The same for an answer in JSON."""
        found = self.instances
        return {
            "changed": [{"path": path, "from": old, "to": new} for path, old, new in self.changes],
            "restart": list(self.waiting),
            "instances": {
                "added": list(found.added),
                "removed": list(found.removed),
                "changed": list(found.changed),
                "refused": dict(found.refused),
            },
        }


class Reloader:
    """Reads the file again; one at a time.

    Args:
        path: the file; None: there is none.
        settings: those of the start.
        engines: of this process.
        metrics: count the calls.
        renew: has the control plane go by these settings, and by these instances of the file.

    Attributes:
        settings: those that are in force.
        logging: how lines are written, and which; that of the settings, unless `log_by` has changed it since.
        waiting: keys that differ in the file and wait for the next start.
        renewal: exchanges what this process has.
        parts: whoever else goes by the configuration; asked in this order, before all others.
        processes: the others that serve; None: there are none.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Settings,
        engines: EngineSet,
        metrics: Metrics,
        renew: Callable[[Settings, Sequence[Instance]], Changes],
    ) -> None:
        self._path = path
        self._engines = engines
        self._metrics = metrics
        self._renew = renew
        self._turn = asyncio.Lock()
        self._asked: set[asyncio.Task[None]] = set()
        self.settings = settings
        self.logging = settings.logging
        self.waiting: tuple[str, ...] = ()
        self.renewal: Renewing | None = None
        self.parts: list[Part] = []
        self.processes: Processes | None = None

    def log_by(self, logging: Logging) -> None:
        """Log in this way, in all processes, until the configuration is read again."""
        self.logging = logging
        if self.renewal is not None:
            self.renewal.log_by(logging)
        if self.processes is not None:
            self.processes.log_by(logging)

    def request(self) -> None:
        """Read the file soon, for a signal; what comes of it is in the log."""
        if len(self._asked) < MOST_ASKED:
            task = asyncio.get_running_loop().create_task(self._on_request(), name="reload")
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def _on_request(self) -> None:
        with contextlib.suppress(ConfigError):
            await self.reload()

    async def aclose(self) -> None:
        """Give up what has not been applied yet; idempotent."""
        for task in self._asked:
            task.cancel()
        if self._asked:
            await asyncio.wait(self._asked)

    async def reload(self, *, dry_run: bool = False) -> Report:
        """Read the file and go by it, in all processes; requests that run stay as they are.

        Args:
            dry_run: check and compare only.

        Raises:
            ConfigError: nothing has changed; holds every reason, which is in the log as well.
        """
        async with self._turn:
            try:
                plan = await self.plan()
                if dry_run:
                    running = await asyncio.to_thread(config.to_instances, self.settings, validate_options)
                    return Report(plan.changes, plan.waiting, _compared(running, plan.instances))
                report = await self._agree(plan)
            except ConfigError as error:
                if not dry_run:
                    self._metrics.config_reloads.labels("invalid").inc()
                    LOG.error("configuration not reloaded, nothing has changed: %s", error)
                raise
        self._metrics.config_reloads.labels("ok").inc()
        _tell(report)
        return report

    async def _agree(self, plan: Plan) -> Report:
        """Go by a plan in all processes or in none."""
        if self.processes is None:
            return self._apply(plan)
        try:
            await self.processes.prepare(plan.settings)
            return self._apply(plan)
        except BaseException:
            self.processes.drop()
            raise

    async def plan(self) -> Plan:
        """Read the file and build all that it needs; nothing changes. Raises ConfigError."""
        path, renewal = self._path, self.renewal
        if path is None or renewal is None:
            raise _failure("configuration", "there is no file to read again")
        try:
            async with asyncio.timeout(READ_S):
                read = await asyncio.to_thread(load_settings, path)
                settings, waiting = self._as_running(read)
                instances = await asyncio.to_thread(config.to_instances, settings, validate_options)
            apply = await renewal.prepare(settings)
        except TimeoutError:
            raise _failure(str(path), "reading it, or what it names, takes too long") from None
        except ValueError as error:
            raise _failure(str(path), str(error)) from error
        return Plan(settings, instances, config.changes(self.settings, settings), waiting, apply)

    def _apply(self, plan: Plan) -> Report:
        """Exchange everything; only the parts may still refuse, and those before are turned back then."""
        before, done = self.settings, list[Part]()
        try:
            for part in self.parts:
                part(plan.settings)
                done.append(part)
        except BaseException:
            for part in reversed(done):
                part(before)
            raise
        self.settings, self.waiting = plan.settings, plan.waiting
        self.logging = plan.settings.logging
        plan.apply()
        if self.processes is not None:
            self.processes.commit()
        return Report(plan.changes, plan.waiting, self._renew(plan.settings, plan.instances))

    # --- what only a start can change

    def _as_running(self, read: Settings) -> tuple[Settings, tuple[str, ...]]:
        settings, waiting = config.as_running(self.settings, read)
        engines = dict(settings.engines)
        further: list[str] = []
        for name in sorted({*self.settings.engines, *read.engines} & self._engines.keys()):
            engines[name], fixed = self._engine_as_running(name, read)
            further += (f"engines.{name}.{key}" for key in fixed)
        kept = {name: own for name, own in engines.items() if own or name in read.engines}
        return settings.model_copy(update={"engines": kept}), (*waiting, *further)

    def _engine_as_running(self, name: str, read: Settings) -> tuple[dict[str, object], list[str]]:
        """An engine's keys as they will run, and those that wait; all of them, where half of them make no sense."""
        running, wanted = dict(self.settings.engines.get(name, {})), dict(read.engines.get(name, {}))
        old, new = engine_settings(name, running), engine_settings(name, wanted)
        differing = {key for key in new if new[key] != old.get(key)}
        fixed = fixed_settings(self._engines[name], differing)
        mixed = {key: value for key, value in wanted.items() if key not in fixed}
        mixed |= {key: running[key] for key in fixed if key in running}
        try:
            engine_settings(name, mixed)
        except ValueError:
            return running, sorted(differing)
        return mixed, sorted(fixed)


def _compared(before: Sequence[Instance], after: Sequence[Instance]) -> Changes:
    """What the file's instances would come to; whom the cluster would refuse shows only when it is asked."""
    old, new = {instance.key: instance for instance in before}, {instance.key: instance for instance in after}
    return Changes(
        tuple(instance.id for key, instance in new.items() if key not in old),
        tuple(instance.id for key, instance in old.items() if key not in new),
        tuple(instance.id for key, instance in new.items() if key in old and old[key] != instance),
    )


def _tell(report: Report) -> None:
    found = report.instances
    LOG.info(
        "configuration reloaded: added %s, removed %s, changed %s",
        *(", ".join(ids) or "none" for ids in (found.added, found.removed, found.changed)),
    )
    if report.changes:
        LOG.info("settings that have changed: %s", ", ".join(change.path for change in report.changes))
    if report.waiting:
        LOG.warning("changed settings that take effect at the next start: %s", ", ".join(report.waiting))


def _failure(name: str, reason: str) -> ConfigError:
    return ConfigError(name, [Problem("", None, reason)])
