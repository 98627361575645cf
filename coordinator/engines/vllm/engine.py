"""The engine protocol `vllm`: which calls serve a request, and what is known of the instances."""

import time
from collections.abc import Mapping

from msgspec import Raw
from msgspec.structs import replace

from coordinator.config.errors import OptionError
from coordinator.core.errors import BadRequest, EngineFailed, Side
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Answer, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.health import alive, told_model
from coordinator.engines.plain_call import pass_through, serve_alone
from coordinator.engines.vllm.batch import serve_batch
from coordinator.engines.vllm.handoff import Handoff, Means
from coordinator.engines.vllm.legs import Farewells
from coordinator.engines.vllm.missing import MissingKv
from coordinator.engines.vllm.releases import UNRELEASED, KvReleases
from coordinator.steps import in_steps
from coordinator.wire.json_edit import NO_LISTS, Fields, IndexedRequest, Lists, long_lists, request_fields
from coordinator.wire.vllm import LISTS, MAX_PROMPTS, PARAMS, Way, decode_body, prompts_of, way_of

NAME = "vllm"
HEALTH_PATH = "/health"
MODELS_EVERY_S = 30.0
RELEASES_AT_CLOSE_S = 3.0
OPTIONS = {"on_missing_kv": ("recompute", "error")}
MAY_BE_THE_KV = ("http_5xx", "engine_error")  # what decode says where it cannot read prefill's KV, among other things
SPOKEN = ("openai", NAME)  # API families
NATIVE = NAME  # the family of vLLM's demo server, whose /generate hands no KV over


class VllmEngine:
    """Engine protocol `vllm` (NIXL, pull): implements core.ports.EngineProtocol."""

    def __init__(self, context: EngineContext) -> None:
        metrics = context.metrics
        self._context = context
        self._client = context.client
        self._aborts = metrics.aborts
        self._abandoned = metrics.handoffs_abandoned.labels()
        self._decodes: dict[str, Instance] = {}
        self._ailing: set[object] = set()
        self._models: dict[object, tuple[str | None, float]] = {}
        self._releases = KvReleases(context.client, context.log, on_result=self._count_release)
        self._missing = MissingKv(context.log, metrics.missing_kv.labels(NAME).inc)
        self._farewells = Farewells()
        self._means = Means(
            client=context.client,
            ids=context.ids,
            releases=self._releases,
            farewells=self._farewells,
            missing=self._missing,
            fetchers=self._fetchers,
        )

    # --- instances

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate `on_missing_kv`, the one key of this engine's instances."""
        for key, value in given.items():
            if key not in OPTIONS:
                raise OptionError(key, "unknown key", tuple(OPTIONS))
            if value not in OPTIONS[key]:
                raise OptionError(key, f"must be {' or '.join(OPTIONS[key])}", tuple(OPTIONS))
        return dict(given)

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Nothing stands open between requests."""
        if instance.role is Role.DECODE:
            self._decodes[instance.id] = instance
        watcher.linked()

    async def detach(self, instance: Instance) -> None:
        """Forget the instance and close idle connections."""
        known = self._decodes.get(instance.id)
        if known is not None and known.key == instance.key:
            del self._decodes[instance.id]
        self._models.pop(instance.key, None)
        self._ailing.discard(instance.key)
        self._client.close_address(instance.address)

    def _renew(self, instance: Instance) -> None:
        """Take over what a reload has changed about an instance that is attached: its group, model or peers."""
        known = self._decodes.get(instance.id)
        if known is not instance and known is not None and known.key == instance.key:
            self._decodes[instance.id] = instance

    async def probe(self, instance: Instance) -> str | None:
        """Alive is whoever answers `/health` without a 5xx; the model's name is asked for now and then."""
        self._renew(instance)
        deadline_s = time.monotonic() + self._context.health_timeout_s
        self._ailing.add(instance.key)
        await alive(self._client, instance, self._context.health_path or HEALTH_PATH, deadline_s)
        self._ailing.discard(instance.key)
        return await self._model(instance, deadline_s)

    async def _model(self, instance: Instance, deadline_s: float) -> str | None:
        name, asked_s = self._models.get(instance.key, (None, -MODELS_EVERY_S))
        now_s = time.monotonic()
        if now_s - asked_s < MODELS_EVERY_S:
            return name
        name = await told_model(self._client, instance, deadline_s) or name
        self._models[instance.key] = (name, now_s)
        return name

    def pinned(self) -> Mapping[str, int]:
        """Requests that have ended and whose KV a prefill instance still holds, by its id."""
        return self._releases.pinned()

    # --- requests

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: prefill for one token, then decode with prefill's record.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancelled, or failed between prefill and decode, prefill's KV is released in the background.
        """
        _demand_spoken(request)
        fields = _fields_of(request)
        prefill, decode = placement.prefill, placement.decode
        self._renew(decode)
        if prefill.address == decode.address:
            return await self._serve_whole(request, placement, prefill, fields, out)
        listed = await _listed(request) if isinstance(request, IndexedRequest) else NO_LISTS
        way = Way.ALONE if request.api == NATIVE else way_of(fields, listed)
        if way is Way.ALONE:
            self._missing.never_asked(decode)
            placement.skip_prefill()
            return await self._serve_whole(request, placement, decode, fields, out)
        try:
            if way is Way.SPLIT:
                body = await serve_batch(self._means, request, placement, fields, _prompts(fields, listed))
                out.whole(body, time.monotonic())
                return COMPLETED
            return await self._serve_pair(request, placement, fields, out)
        except EngineFailed as error:
            if error.side is Side.DECODE and error.reason in MAY_BE_THE_KV and not out.started:
                error.doubted = prefill.id
            raise

    async def _serve_pair(self, request: Request, placement: Placement, fields: Fields, out: Out) -> Outcome:
        handoff = Handoff(self._means, request, placement, fields)
        prefilled = await handoff.prefill()
        placement.prefilled(time.monotonic())
        if request.ask.stream:
            await handoff.stream(prefilled, out)
        else:
            body = await handoff.whole(prefilled)
            now_s = time.monotonic()
            placement.decoding(now_s)
            out.whole(body, now_s)
        return COMPLETED

    async def _serve_whole(
        self, request: Request, placement: Placement, instance: Instance, fields: Fields, out: Out
    ) -> Outcome:
        """One instance does everything, without a record of KV elsewhere."""
        if PARAMS in fields:
            request = replace(request, body=decode_body(fields, None))
        return await serve_alone(self._context, request, placement, instance, out)

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass a call that is no inference through."""
        _demand_spoken(request)
        return await pass_through(self._context, request, instance)

    # --- KV

    def _fetchers(self, prefill: Instance, decode: Instance) -> list[Instance]:
        """Decode instances that could have got the request too, those that answered their last check first."""
        able = [
            instance
            for instance in self._decodes.values()
            if instance.group == prefill.group
            and instance.model == decode.model
            and (prefill.peers is None or instance.id in prefill.peers)
        ]
        return sorted(able, key=lambda instance: instance.key in self._ailing)

    def _count_release(self, result: str) -> None:
        self._aborts.labels(result).inc()
        if result in UNRELEASED:
            self._abandoned.inc()

    async def aclose(self) -> None:
        """Release what can still be released."""
        self._farewells.close()
        await self._releases.aclose(RELEASES_AT_CLOSE_S)


async def _listed(request: IndexedRequest) -> Lists:
    """What a long body lists."""
    return await in_steps(long_lists(request, LISTS, MAX_PROMPTS + 1))


def _prompts(fields: Fields, listed: Lists) -> list[Raw]:
    prompts = prompts_of(fields, listed)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"a request may have {MAX_PROMPTS} prompts at most")
    return prompts


def _fields_of(request: Request) -> Fields:
    try:
        return request_fields(request)
    except ValueError as error:
        raise BadRequest("the body must be a JSON object with plain names", detail=str(error)) from error


def _demand_spoken(request: Request) -> None:
    if request.api not in SPOKEN:
        raise BadRequest(
            f"the engines behind this coordinator do not speak the {request.api} API: use /v1/chat/completions or "
            "/v1/completions"
        )
