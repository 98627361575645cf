"""The engine protocol `disaggpb`: prefill's KV is collected and goes to decode with the request."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.api.writers import writer_of
from coordinator.core.errors import BadRequest, EngineFailed
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Answer, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.disaggpb.asking import read_request
from coordinator.engines.disaggpb.budget import KvBudget, Room
from coordinator.engines.disaggpb.kv import KvBuffer, LayerCounts, Payload
from coordinator.engines.disaggpb.legs import DecodeLeg, Job, fetch_kv, packed
from coordinator.engines.disaggpb.settings import (
    MISSING,
    RENEWABLE,
    TLS_KEYS,
    channel_settings,
    check_options,
    check_settings,
    kv_limits,
)
from coordinator.engines.http_leg import side_of
from coordinator.engines.token_answers import TokenAnswers

if TYPE_CHECKING:  # the module needs gRPC, which need not be there
    from coordinator.engines.disaggpb.channel import Worker


class DisaggpbEngine:
    """Engine protocol `disaggpb` (zerfoo): implements core.ports.EngineProtocol."""

    renewable = RENEWABLE

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._settings: dict[str, Any] = dict(check_settings(context.settings))
        self._workers: dict[object, Worker] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self.budget = KvBudget(kv_limits(self._settings))
        self._layers = LayerCounts(self._settings["kv_layers"])
        context.metrics.add_gauge("kv_buffered_bytes", lambda: [((), self.budget.buffered_bytes)])
        context.metrics.add_gauge("kv_waiting_requests", lambda: [((), self.budget.waiting)])

    # --- instances

    @staticmethod
    def settings(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the keys of `engines.disaggpb`."""
        return check_settings(given)

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate an instance's keys; gRPC must be installed where there is one."""
        return check_options(given)

    def renew(self, settings: Mapping[str, object]) -> None:
        """Take requests in by these limits from here on; what has been given away stays given."""
        before, self._settings = self._settings, dict(settings)
        self.budget.renew(kv_limits(self._settings))
        if any(before[key] != self._settings[key] for key in TLS_KEYS):
            self.renew_certificates()

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Make a channel and begin to connect."""
        try:
            from coordinator.engines.disaggpb.channel import Worker  # noqa: PLC0415  # gRPC is an extra
        except ImportError:
            watcher.unlinked(MISSING)
            return
        settings = channel_settings(self._settings, instance.options)
        self._workers[instance.key] = Worker(instance, settings, self._context.connect_s)
        watcher.linked()

    def renew_certificates(self) -> None:
        """Open other channels to instances with TLS; calls that run end on those that there are."""
        for key, worker in self._workers.items():
            instance = worker.instance
            if not instance.address.tls:
                continue
            settings = channel_settings(self._settings, instance.options)
            try:
                self._workers[key] = type(worker)(instance, settings, self._context.connect_s)
            except OSError as error:
                self._context.log.error("instance %s keeps its certificates: %s", instance.id, error.strerror)
                continue
            task = asyncio.create_task(worker.retire(), name=f"retire a channel to {instance.id}")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def detach(self, instance: Instance) -> None:
        """Close the channel."""
        worker = self._workers.pop(instance.key, None)
        if worker is not None:
            await worker.aclose()

    async def probe(self, instance: Instance) -> str | None:
        """Connected, and serving as far as the worker's health service says; no model name is told."""
        await self._worker(instance).probe(self._context.health_timeout_s)
        return None

    def _worker(self, instance: Instance) -> "Worker":
        worker = self._workers.get(instance.key)
        if worker is None:
            raise EngineFailed(side_of(instance), instance.id, "closed", detail="there is no channel")
        return worker

    # --- requests

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: KV from prefill, then decode, and where that fails before its first token, another decode.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancellation cancels the call that runs, and gives the memory back.
        """
        context, settings, prefill = self._context, self._settings, placement.prefill
        tokenizer = context.tokenizers.of(prefill)
        asked = await read_request(
            request, tokenizer, settings["max_new_tokens"], refuse=settings["unsupported"] == "refuse"
        )
        generation, ids = asked.generation, asked.prompt.ids
        writer = writer_of(request, generation, request.ask.model or prefill.model or "", int(time.time()))
        answers = TokenAnswers(asked, writer, out)
        job = Job(
            wire_id=context.ids.next(),
            packed_ids=await packed(ids),
            max_new_tokens=generation.max_tokens or 1,
            temperature=generation.temperature or 0.0,
            finished_s=request.deadlines.finished_s,
        )
        kind = (prefill.model, prefill.group)
        with await self.budget.admit(kind, len(ids)) as room:
            placement.prefill_sent(job.wire_id)
            payload = await fetch_kv(self._worker(prefill), job, partial(self._buffer, prefill, room))
            placement.prefilled(time.monotonic(), pinned=False)
            room.settle()
            await self._decode(placement, job, payload, room, answers, out)
        answers.end()
        return COMPLETED

    def _buffer(self, prefill: Instance, room: Room, wire_id: str) -> KvBuffer:
        agree = partial(self._layers.agree, room.kind)
        return KvBuffer(wire_id, prefill, room, agree, self.budget.expected_bytes(room.kind, room.tokens))

    async def _decode(
        self, placement: Placement, job: Job, payload: Payload, room: Room, answers: TokenAnswers, out: Out
    ) -> None:
        """Until the first token the KV is here, and any decode worker can have it."""
        while True:
            try:
                leg = DecodeLeg(self._worker(placement.decode), job, payload, room, answers)
                await leg.run(placement, out)
            except EngineFailed as error:
                if payload.dropped or time.monotonic() >= job.finished_s or not placement.another_decode(error):
                    raise
            else:
                return

    async def call(self, request: Request, instance: Instance) -> Answer:  # noqa: ARG002
        """These workers answer no other calls."""
        raise BadRequest("the engines of this model have no such call")

    async def aclose(self) -> None:
        """Close all channels."""
        retiring = tuple(self._retiring)
        for task in retiring:
            task.cancel()
        if retiring:
            await asyncio.wait(retiring)
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            await worker.aclose()
