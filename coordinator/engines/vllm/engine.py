"""The engine protocol `vllm`: which calls serve a request, and what is known of the instances."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from coordinator.config.errors import OptionError
from coordinator.core.errors import BadRequest, EngineFailed, Side
from coordinator.core.instance import Instance, Role
from coordinator.core.ports import COMPLETED, Answer, Out, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import failed, refusal, relay_plain
from coordinator.engines.plain_call import pass_through
from coordinator.engines.vllm.batch import serve_batch
from coordinator.engines.vllm.handoff import Handoff, Means
from coordinator.engines.vllm.legs import Farewells
from coordinator.engines.vllm.missing import MissingKv
from coordinator.engines.vllm.releases import UNRELEASED, KvReleases
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.wire.json_edit import Fields, request_fields
from coordinator.wire.models import first_model
from coordinator.wire.vllm import PARAMS, Way, decode_body, prompts_of, way_of

NAME = "vllm"
HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
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
        reply = await self._get(instance, self._context.health_path or HEALTH_PATH, deadline_s)
        if reply.status >= 500:
            raise refusal(instance, reply.status, reply.headers, b"")
        self._ailing.discard(instance.key)
        return await self._model(instance, deadline_s)

    async def _model(self, instance: Instance, deadline_s: float) -> str | None:
        name, asked_s = self._models.get(instance.key, (None, -MODELS_EVERY_S))
        now_s = time.monotonic()
        if now_s - asked_s < MODELS_EVERY_S:
            return name
        with contextlib.suppress(EngineFailed):  # it is alive all the same
            reply = await self._get(instance, MODELS_PATH, deadline_s)
            name = first_model(reply.body) if reply.status == 200 else name
        self._models[instance.key] = (name, now_s)
        return name

    async def _get(self, instance: Instance, path: str, deadline_s: float) -> Reply:
        try:
            return await self._client.fetch(instance.address, b"GET", path, (), deadline_s=deadline_s)
        except TransportError as error:
            raise failed(instance, error) from error

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
            return await self._serve_alone(request, placement, prefill, fields, out)
        way = Way.ALONE if request.api == NATIVE else way_of(fields)
        if way is Way.ALONE:
            self._missing.never_asked(decode)
            placement.skip_prefill()
            return await self._serve_alone(request, placement, decode, fields, out)
        try:
            if way is Way.SPLIT:
                body = await serve_batch(self._means, request, placement, fields, prompts_of(fields))
                out.whole(body, time.monotonic())
                return COMPLETED
            return await self._serve_pair(request, placement, fields, out)
        except EngineFailed as error:
            if error.side is Side.DECODE and error.reason in MAY_BE_THE_KV:
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

    async def _serve_alone(
        self, request: Request, placement: Placement, instance: Instance, fields: Fields, out: Out
    ) -> Outcome:
        """One instance does everything; its answer is passed through."""
        wire_id = self._context.ids.next()
        placement.prefill_sent(wire_id)
        if PARAMS in fields:
            request = replace(request, body=decode_body(fields, None))
        headers = engine_headers(request, wire_id)
        return await relay_plain(self._client, request, headers, instance, placement, out)

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass a call that is no inference through."""
        _demand_spoken(request)
        headers = engine_headers(request, self._context.ids.next())
        return await pass_through(self._client, request, headers, instance)

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


def _fields_of(request: Request) -> Fields:
    try:
        return request_fields(request)
    except ValueError as error:
        raise BadRequest("the body must be a JSON object with plain names", detail=str(error)) from None


def _demand_spoken(request: Request) -> None:
    if request.api not in SPOKEN:
        raise BadRequest(
            f"the engines behind this coordinator do not speak the {request.api} API: use /v1/chat/completions or "
            "/v1/completions"
        )
