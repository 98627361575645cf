"""The engine protocol `microserving`: which calls serve a request, and what is known of the instances."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from coordinator.core.errors import BadRequest, EngineFailed
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import Answer, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.health import alive
from coordinator.engines.http_leg import side_of
from coordinator.engines.microserving.alone import serve_alone
from coordinator.engines.microserving.ends import end_here
from coordinator.engines.microserving.errands import Errands
from coordinator.engines.microserving.handoff import Handoff
from coordinator.engines.microserving.means import Means
from coordinator.engines.microserving.settings import (
    ROUND_ROBIN,
    SETTINGS,
    MicroservingSettings,
    checked_options,
    checked_settings,
    settings_of,
)
from coordinator.engines.microserving.task import body_fields, make_task, progress_of
from coordinator.tokens import Tokenizer
from coordinator.transport.reply import Reply
from coordinator.wire.models import first_model

MODELS_PATH = "/v1/models"
METRICS_PATH = "/metrics"
CLOSE_S = 3.0
PAUSES_S = (0.0, 0.0, 0.1, 0.3, 1.0)
"""Before an attempt, by how often the request was preempted: a first time goes to another decode instance at once."""


class MicroservingEngine:
    """Engine protocol `microserving`: implements core.ports.EngineProtocol."""

    renewable = SETTINGS

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._client = context.client
        self._settings = settings_of(context.settings)
        errands = Errands(
            context.client,
            context.log,
            on_result=self._count,
            within_s=self._settings.cleanup_s,
        )
        self._means = Means(client=context.client, ids=context.ids, errands=errands, settings=self._settings)

    def _count(self, result: str) -> None:
        self._context.metrics.aborts.labels(result).inc()

    # --- instances

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate `recv_rank`, the one key of this engine's instances."""
        return checked_options(given)

    @staticmethod
    def settings(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the settings and fill in the defaults."""
        return checked_settings(given)

    def renew(self, settings: Mapping[str, object]) -> None:
        """Serve the requests that begin from here on by these."""
        self._settings = settings_of(settings)
        self._means.errands.within_s = self._settings.cleanup_s
        self._means = replace(self._means, settings=self._settings)

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Nothing stands open between requests; an instance that lacks what the mode needs is not linked."""
        problem = self._problem(instance)
        if problem is None:
            watcher.linked()
            return
        self._context.log.error("instance %s cannot be used: %s", instance.id, problem)
        watcher.unlinked(problem)

    @classmethod
    def check(
        cls, settings: Mapping[str, object], instances: Sequence[Instance], default: object
    ) -> Iterator[tuple[Instance, str]]:
        """What instances lack for the mode, and whose ranks collide; see engines.table.HasChecks."""
        made = settings_of(settings)
        ranks: dict[object, Instance] = {}
        for instance in instances:
            has_tokenizer = default is not None or "tokenizer" in instance.options
            problem = lack_of(made, instance, has_tokenizer=has_tokenizer)
            if problem is not None:
                yield instance, problem
            rank = instance.options.get("recv_rank")
            if rank is not None and made.mode != ROUND_ROBIN:
                first = ranks.setdefault((instance.group, rank), instance)
                if first.address != instance.address:
                    yield instance, f"it has the recv_rank of {first.id}, whose KV it would get, and is in its group"

    def _problem(self, instance: Instance) -> str | None:
        has_tokenizer = "tokenizer" in instance.options or self._tokenizer(instance) is not None
        return lack_of(self._settings, instance, has_tokenizer=has_tokenizer)

    def _tokenizer(self, instance: Instance) -> Tokenizer | None:
        return self._context.tokenizers.of(instance)

    async def detach(self, instance: Instance) -> None:
        """Close idle connections."""
        self._client.close_address(instance.address)

    async def probe(self, instance: Instance) -> str | None:
        """Ask for the models, and for metrics: these come through the engine's loop, which may be dead behind its HTTP.

        Alive is whoever answers both without a 5xx (microserving protocol page §7, §12).
        """
        deadline_s = time.monotonic() + self._context.health_timeout_s
        listed = await self._get(instance, self._context.health_path or MODELS_PATH, deadline_s)
        try:
            await self._get(instance, METRICS_PATH, deadline_s)
        except EngineFailed as error:
            if error.reason != "timeout":
                raise
            detail = f"{METRICS_PATH} does not answer: the engine's loop is dead or stuck"
            raise EngineFailed(side_of(instance), instance.id, "timeout", detail=detail) from error
        return first_model(listed.body) if listed.status == 200 else None

    async def _get(self, instance: Instance, path: str, deadline_s: float) -> Reply:
        return await alive(self._client, instance, path, deadline_s)

    def pinned(self) -> Mapping[str, int]:
        """Requests that have ended and for which a decode instance still keeps room, by its id."""
        return self._means.errands.pinned()

    # --- requests

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: three calls over a pair, or one call to an engine that serves alone.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancelled, or failed between the calls, decode's reservation is freed in the background.
        """
        fields = body_fields(request)
        decode = placement.decode
        progress = progress_of(request, fields, uuid.uuid4().hex)
        await pause(progress.preempts)
        tokenizer = self._tokenizer(decode)
        alone = placement.prefill.address == decode.address or self._settings.mode == ROUND_ROBIN
        if alone:
            task = await make_task(request, fields, progress, tokenizer, alone=True)
            if task.spent:
                return end_here(task, out)
            return await serve_alone(self._means, request, placement, decode, task, out)
        task = await make_task(request, fields, progress, tokenizer, count=self._settings.balanced)
        if task.spent:
            return end_here(task, out)
        return await Handoff(self._means, request, placement, task, out).run()

    async def call(self, request: Request, instance: Instance) -> Answer:  # noqa: ARG002
        """These engines have no call that is no inference."""
        raise BadRequest("the engines behind this coordinator have no call of this kind", detail=instance.id)

    async def aclose(self) -> None:
        """Free what can still be freed."""
        await self._means.errands.aclose(CLOSE_S)


def lack_of(settings: MicroservingSettings, instance: Instance, *, has_tokenizer: bool) -> str | None:
    """What an instance lacks for the mode, in a sentence."""
    if instance.role is not Role.DECODE or settings.mode == ROUND_ROBIN:
        return None
    if "recv_rank" not in instance.options:
        return "a decode instance needs recv_rank, its first PE in the NVSHMEM world"
    if settings.balanced and not has_tokenizer:
        return "pd_balance_factor needs a tokenizer, to count tokens: set cluster.tokenizer"
    return None


async def pause(preempts: int) -> None:
    """Wait before another attempt, by how often the request was preempted."""
    pause_s = PAUSES_S[min(preempts, len(PAUSES_S) - 1)]
    if pause_s:
        await asyncio.sleep(pause_s)
