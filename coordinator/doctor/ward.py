"""The engine protocols that do the examination's work: each instance is spoken to as the coordinator would do it."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from coordinator.api.families import FAMILIES
from coordinator.config import Settings
from coordinator.core.abilities import Examiner
from coordinator.core.ids import WireIds
from coordinator.core.instance import Instance
from coordinator.core.ports import EngineProtocol
from coordinator.doctor.examiners import examiner_of
from coordinator.doctor.findings import Finding, fault
from coordinator.doctor.handover import HandoverCheck, Pair
from coordinator.doctor.instances import InstanceCheck
from coordinator.engines.context import EngineContext
from coordinator.engines.table import load_engine
from coordinator.observability.metrics import Metrics
from coordinator.parts import engine_habits, wanted_engines
from coordinator.tokens import Tokenizers
from coordinator.transport.client import HttpClient

LOG = logging.getLogger("pd_coordinator.doctor")
EXCLUSIVE: Mapping[str, str] = {
    "mindie": "decode lets one coordinator have its results: a second one would end the requests of the first",
    "xllm": "instances send their results to one address, which the running one has",
}
"""Engines that a running coordinator must have for itself, and why."""


class Links:
    """What an engine says of an instance's standing links (core.ports.Watcher)."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.reason = "it did not open"

    def linked(self) -> None:
        """See core.ports.Watcher."""
        self.up.set()

    def unlinked(self, reason: str) -> None:
        """See core.ports.Watcher."""
        self.reason = reason


class Ward:
    """Looks at instances and pairs.

    Args:
        within_s: for each question.
        running: a coordinator runs with this configuration: what it has for itself is left alone.
    """

    def __init__(
        self, settings: Settings, client: HttpClient, tokenizers: Tokenizers, within_s: float, *, running: bool
    ) -> None:
        self._settings = settings
        self._client = client
        self._tokenizers = tokenizers
        self._within_s = within_s
        self._running = running
        self._own = wanted_engines(settings)
        self._habits = engine_habits(settings)
        self._ids = WireIds(0)
        self._engines: dict[str, EngineProtocol] = {}
        self._links: dict[str, Links] = {}
        self._models: dict[str, tuple[str, ...]] = {}

    async def attach(self, instances: Sequence[Instance]) -> None:
        """Open what standing links they need, those apart that are somebody else's."""
        for instance in instances:
            if not self.may_work(instance):
                continue
            links = self._links[instance.id] = Links()
            try:
                self._engine(instance.engine).attach(instance, links)
            except Exception as error:  # noqa: BLE001  # the border to engines of the user's own
                links.unlinked(f"{type(error).__name__}: {error}")

    async def look(self, instance: Instance) -> tuple[bool, list[Finding]]:
        """One instance by itself; whether it can be tried with others, and what was found."""
        name = instance.engine
        check = InstanceCheck(self._engine(name), self._examiner(name), self._client, self._within_s)
        looked = await check.run(instance)
        self._models[instance.id] = looked.models
        links = self._links.get(instance.id)
        if not looked.able or links is None:
            return looked.able, looked.findings
        try:
            async with asyncio.timeout(self._within_s):
                await links.up.wait()
        except TimeoutError:
            what = f"what must stand open to it does not: {links.reason}"
            advice = "does another coordinator hold it, and can the instance and this machine reach each other?"
            return False, [*looked.findings, fault("link", instance.id, what, advice)]
        return True, looked.findings

    async def hand_over(self, pair: Pair, within_s: float) -> Finding:
        """One small request over a pair, with an engine protocol of its own where that can be."""
        name, model = pair.prefill.engine, self._model(pair)
        if name in EXCLUSIVE:
            engine, metrics = self._engine(name), Metrics([])
            return await self._check(engine, metrics, name, within_s).run(pair, model)
        engine, metrics = self._make(name)
        try:
            for instance in dict.fromkeys((pair.prefill, pair.decode)):
                engine.attach(instance, Links())
                await self._probe(engine, instance)
            return await self._check(engine, metrics, name, within_s).run(pair, model)
        finally:
            await engine.aclose()

    def _model(self, pair: Pair) -> str | None:
        """The configured one; without it the first that both say they serve, else the first of either."""
        configured = pair.prefill.model or pair.decode.model
        if configured is not None:
            return configured
        ours, theirs = self._models.get(pair.prefill.id, ()), self._models.get(pair.decode.id, ())
        return next((name for name in ours if name in theirs), None) or next(iter(ours + theirs), None)

    async def _probe(self, engine: EngineProtocol, instance: Instance) -> None:
        """Let the engine protocol learn what it learns from health checks."""
        try:
            async with asyncio.timeout(self._within_s):
                await engine.probe(instance)
        except Exception as error:  # noqa: BLE001  # what it means shows in the handover itself
            LOG.debug("instance %s: %s", instance.id, type(error).__name__)

    def _check(self, engine: EngineProtocol, metrics: Metrics, name: str, within_s: float) -> HandoverCheck:
        missing = metrics.missing_kv.labels(name)
        return HandoverCheck(engine, self._examiner(name), lambda: missing.value, within_s)

    def may_work(self, instance: Instance) -> bool:
        """Whether nobody has it for himself."""
        return not (self._running and instance.engine in EXCLUSIVE)

    def left_alone(self, engines: Collection[str]) -> set[str]:
        """Those of these engines that are."""
        return {name for name in engines if self._running and name in EXCLUSIVE}

    async def aclose(self) -> None:
        """Close all links."""
        for engine in self._engines.values():
            await engine.aclose()

    # --- engine protocols

    def _engine(self, name: str) -> EngineProtocol:
        found = self._engines.get(name)
        if found is None:
            found, _ = self._make(name)
            self._engines[name] = found
        return found

    def _examiner(self, name: str) -> Examiner:
        return examiner_of(name, self._engine(name), self._client)

    def _make(self, name: str) -> tuple[EngineProtocol, Metrics]:
        metrics = Metrics([family.name for family in FAMILIES])
        context = EngineContext(
            self._client, self._ids, metrics, LOG, settings=self._own[name], tokenizers=self._tokenizers
        )
        return load_engine(name)(self._habits.given_to(context)), metrics
