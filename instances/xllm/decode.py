"""The decode role: from AddNewRequests to the last generation (xLLM protocol page §1, §5.3, §6)."""

from collections import deque
from typing import TYPE_CHECKING, Any

from instances.answers import kv_digest
from instances.faults import Chosen
from instances.ledger import OutOfBlocks
from instances.xllm import vocabulary
from instances.xllm.ask import RESOURCE_EXHAUSTED, Ask, Failed, from_prefill, lost
from instances.xllm.job import Job
from instances.xllm.outbox import Parcel
from instances.xllm.outputs import failed
from instances.xllm.proto.engine_pb2 import (
    DisaggGenerationsRequest,
    DisaggGenerationsRequests,
    DisaggRequests,
    DisaggResponse,
    DisaggResponses,
    DisaggStreamGeneration,
)

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

_ACCEPTED, _FULL, _ERROR = 200, 404, 500


class Decode:
    """Everything that decode does."""

    def __init__(self, engine: "XllmEngine") -> None:
        self.engine = engine
        self._instance = engine.instance
        self.waiting: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self._step: list[Parcel] = []
        self._ends: list[Parcel] = []
        self._extra: deque[list[Parcel]] = deque()
        self.full = self.refused = self.cancelled = self.lost_kv = self.wrong_role = self.preempted = 0
        self.unknown_accepted = self.unknown_refused = self.late_accepted = self.late_refused = 0

    # --- calls of prefill

    def add_new_requests(self, message: DisaggRequests, chosen: Chosen) -> DisaggResponses:
        """`AddNewRequests`: blocks for each request, or 404, or 500."""
        if message.prefill_name not in self.engine.links:
            # as the real engine does it, with what prefill says of itself
            self.engine.links.implicit += 1
            if not self.engine.links.link(message.prefill_name, message.cluster_infos):
                return DisaggResponses()
        return DisaggResponses(resps=[self._add(one, message.prefill_name, chosen) for one in message.reqs])

    def _add(self, message: Any, prefill: str, chosen: Chosen) -> DisaggResponse:
        response = DisaggResponse(req_id=message.req_id, linear_state_id=-1)
        if self.engine.settings.proto == "old":
            response.ClearField("linear_state_id")
        ask = from_prefill(message)
        response.status_code = self._status(ask, chosen)
        if response.status_code == _ACCEPTED:
            try:
                self._instance.ledger.allocate(ask.req_id, message.tokens_num, "accepted")
            except OutOfBlocks:
                response.status_code = _FULL
        self.full += response.status_code == _FULL
        self.refused += response.status_code == _ERROR
        if response.status_code == _ACCEPTED:
            self._instance.ledger.pin(ask.req_id, "until the first token comes")
            job = Job(self, ask, chosen, prefill)
            job.blocks = self.engine.block_ids.take(self._instance.ledger.blocks(message.tokens_num))
            self.waiting[ask.req_id] = job
            response.blocks_ids.extend(job.blocks)
        return response

    def _status(self, ask: Ask, chosen: Chosen) -> int:
        if self.engine.type not in ("DECODE", "MIX"):
            self.wrong_role += 1
            return _ERROR
        if "decode_refuses" in chosen or ask.req_id in self.waiting or ask.req_id in self.running:
            return _ERROR
        if ask.best_of > 1 and not self._instance.options.prefix_blocks:
            self.engine.note("best_of > 1 needs the prefix cache")
            return _ERROR
        return _FULL if "decode_full" in chosen else _ACCEPTED

    async def first_generation(self, message: DisaggGenerationsRequests) -> bool:
        """`FirstGeneration`: the requests start; False at the first that cannot."""
        for gen in message.multi_gens:
            if not gen.tokens or not await self._start(gen):
                return False
        return True

    async def _start(self, gen: DisaggGenerationsRequest) -> bool:
        job = self.waiting.get(gen.req_id)
        if job is None:
            self.engine.note(f"Failed to find request, request id: {gen.req_id}")
            return False
        if "first_refused" in job.chosen:
            self._forget(job, "FirstGeneration refused")
            return False
        if gen.kv_cache_transfer_mode == "PULL":
            await self.engine.kv.pull(job, list(gen.block_ids))
            if self.waiting.get(gen.req_id) is not job:
                return False
        del self.waiting[gen.req_id]
        self._instance.ledger.resume(gen.req_id, "decode")
        first = vocabulary.from_wire(gen.tokens[0].token_id)
        job.plan(first)
        if job.kv != kv_digest(job.ask.tokens, self._instance.options.seed):
            self.lost_kv += 1
            for sequence in job.sequences:
                sequence.plan = lost(sequence.plan, sequence.sent)
        self.begin(job)
        return True

    def begin(self, job: Job) -> None:
        """Into the batch."""
        self.running[job.ask.req_id] = job
        if job.complete:  # prefill's token was the last one
            job.tell_end()
            self.flush()
        elif "slow" in job.chosen:
            self._instance.tasks.spawn(job.alone(), f"{self._instance.name} slow")
        else:
            self.engine.batch.join(job)

    def unlink(self, prefill: str) -> None:
        """Drop the requests that wait for that instance's first token."""
        for job in [job for job in self.waiting.values() if job.prefill == prefill]:
            if self.engine.settings.unlink_frees:
                self._forget(job, "UnlinkInstance")
            else:
                del self.waiting[job.ask.req_id]

    # --- what a step tells

    def tell(self, job: Job, message: DisaggStreamGeneration) -> None:
        """A message of this step."""
        self._step.append(Parcel(message, job.ask.source, job.told))

    def tell_end(self, job: Job, message: DisaggStreamGeneration) -> None:
        """The last message of a request, in the call after the step's; its blocks go back."""
        self._ends.append(Parcel(message, job.ask.source, _nothing))
        self._end(job, "end of decode")

    def tell_apart(self, job: Job | None, message: DisaggStreamGeneration | None) -> None:
        """A message in a call of its own, before the step's; None: a call with nothing."""
        parcels = [] if message is None or job is None else [Parcel(message, job.ask.source, job.told)]
        self.engine.outbox.batch(parcels)

    def tell_again(self, job: Job, message: DisaggStreamGeneration, *, late: bool = False) -> None:
        """A message in a call of its own, after the step's."""
        self._extra.append([Parcel(message, job.ask.source, self._late if late else _nothing)])

    def tell_unknown(self, job: Job) -> None:
        """A message of this step for an id that nobody knows."""
        message = DisaggStreamGeneration(req_id="cmpl-nobody", service_req_id=f"nobody-{job.ask.service_req_id}")
        message.outputs.add(index=0, text="nobody asked for this")
        self._step.append(Parcel(message, job.ask.source, self._unknown))

    def flush(self) -> None:
        """The step is over: send what it told."""
        apart = "single_frames" in self._instance.faults.always()
        for parcels in (self._step, self._ends):
            if parcels:
                self.engine.outbox.batch(list(parcels), apart=apart)
                parcels.clear()
        while self._extra:
            self.engine.outbox.batch(self._extra.popleft())

    def _unknown(self, is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
        self.unknown_accepted += is_ok
        self.unknown_refused += not is_ok

    def _late(self, is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
        self.late_accepted += is_ok
        self.late_refused += not is_ok

    # --- ends

    def cancel(self, job: Job) -> None:
        """The service wants no more of it."""
        if self.running.get(job.ask.req_id) is job:
            self.cancelled += 1
            self._end(job, "cancelled by the service")

    def fail(self, job: Job, error: Failed) -> None:
        """The request ends with a status."""
        if self.running.get(job.ask.req_id) is job:
            self._step.append(Parcel(failed((job.ask.req_id, job.ask.service_req_id), error), job.ask.source, _nothing))
            self._end(job, "failed")

    def crash(self, back_after_s: float | None) -> None:
        """The instance dies."""
        self._instance.crash(back_after_s)

    def _end(self, job: Job, why: str) -> None:
        self.running.pop(job.ask.req_id, None)
        self.engine.batch.leave(job)
        self._release(job, why)

    def _forget(self, job: Job, why: str) -> None:
        del self.waiting[job.ask.req_id]
        self._release(job, why)

    def _release(self, job: Job, why: str) -> None:
        job.over = True
        self.engine.block_ids.give(job.blocks)
        job.blocks = []
        self._instance.ledger.release(job.ask.req_id, why)

    # --- blocks

    def grow(self, job: Job) -> bool:
        """Blocks for the next tokens; False: there are none, and the request starts anew once there are."""
        try:
            self._instance.ledger.grow(job.ask.req_id, job.kv_tokens)
        except OutOfBlocks:
            self.preempted += 1
            self._instance.ledger.release(job.ask.req_id, "preempted")
            self._instance.tasks.spawn(self._resume(job), f"{self._instance.name} resumes")
            return False
        return True

    async def _resume(self, job: Job) -> None:
        try:
            await self._instance.ledger.wait_allocate(job.ask.req_id, job.kv_tokens, "decode, after a preemption")
        except OutOfBlocks as never:
            self.fail(job, Failed(RESOURCE_EXHAUSTED, str(never)))
            self.flush()
            return
        if job.over:
            self._instance.ledger.release(job.ask.req_id, "ended while it waited")
        else:
            self.engine.batch.join(job)

    def forget(self) -> None:
        """Lose all requests."""
        for job in (*self.waiting.values(), *self.running.values()):
            job.over = True
            self.engine.block_ids.give(job.blocks)
        self.waiting.clear()
        self.running.clear()
        for parcels in (self._step, self._ends, self._extra):
            parcels.clear()

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        counts = ("full", "refused", "cancelled", "lost_kv", "wrong_role", "preempted", "unknown_accepted",
                  "unknown_refused", "late_accepted", "late_refused")  # fmt: skip
        return {
            "waiting_for_prefill": list(self.waiting),
            "decoding": list(self.running),
            **{name: getattr(self, name) for name in counts},
        }


def _nothing(is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
    """The request is over; what the service says of it does not matter."""
    del is_ok
