"""Requests from the service: what is wrong with them, and which role takes them (xLLM protocol page §5.4, §6)."""

import asyncio
import time
from typing import TYPE_CHECKING

from instances.answers import kv_digest
from instances.faults import Chosen
from instances.ledger import OutOfBlocks
from instances.xllm import outputs, vocabulary
from instances.xllm.ask import (
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    Ask,
    Failed,
    ProcessDies,
    read,
    same_ids,
)
from instances.xllm.errors import EINTERNAL, RpcError
from instances.xllm.job import Job
from instances.xllm.outbox import Parcel
from instances.xllm.proto.engine_pb2 import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine


class Intake:
    """Takes requests.

    Attributes:
        asleep: whether requests are refused as by a model that sleeps.
        other_ids: requests whose token ids are not those that the engine's own tokenizer gives for their prompt.
    """

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self.asleep = False
        self.other_ids = 0

    def accept(self, message: CompletionRequest | ChatRequest, chosen: Chosen) -> None:
        """Begin a request; what is wrong with it goes to its service. Raises RpcError when the process dies of it."""
        try:
            self._check(message)
            ask = read(message)
            self._check_prompt(ask)
        except ProcessDies as dies:
            self._engine.abort(str(dies))
            raise RpcError(EINTERNAL, "the process died") from None
        except Failed as failed:
            ids = message.request_id, message.service_request_id
            self._send(Parcel(outputs.failed(ids, failed), message.source_xservice_addr, _nothing))
            return
        self.other_ids += message.HasField("routing") and not same_ids(message)
        self._begin(ask, chosen)

    def _check(self, message: CompletionRequest | ChatRequest) -> None:
        if message.model != self._instance.options.model:
            raise Failed(UNKNOWN, "Model not supported")
        if self.asleep:
            raise Failed(UNAVAILABLE, "Model is sleeping")
        if self.concurrent >= self._engine.settings.max_concurrent:
            raise Failed(RESOURCE_EXHAUSTED, "The number of concurrent requests has reached the limit.")

    @property
    def concurrent(self) -> int:
        """Requests that came by the API and are not over here."""
        own = sum(1 for job in self._engine.decode.running.values() if not job.prefill)
        return len(self._engine.prefill.live) + own

    def _check_prompt(self, ask: Ask) -> None:
        if len(ask.tokens) >= self._engine.settings.max_context_len:
            raise Failed(INVALID_ARGUMENT, "Prompt is too long")
        ends = (*((token,) for token in ask.stop_tokens), *ask.stop_sequences)
        is_over = not ask.ignore_eos and ask.tokens[-1] == vocabulary.EOS
        if is_over or any(ask.tokens[-len(end) :] == end for end in ends if end):
            raise Failed(INVALID_ARGUMENT, "Invalid Prompt")

    def _begin(self, ask: Ask, chosen: Chosen) -> None:
        engine = self._engine
        if engine.type == "DEFAULT":
            self._instance.tasks.spawn(self._alone(ask, chosen), f"{self._instance.name} infers for the service")
        elif engine.type == "DECODE":
            engine.decode.wrong_role += 1
            self.tell_failure(ask, Failed(INVALID_ARGUMENT, "this instance does no prefill"))
        else:
            engine.prefill.add(ask, chosen)

    async def _alone(self, ask: Ask, chosen: Chosen) -> None:
        """Prefill and decode here, for the service."""
        decode, ledger = self._engine.decode, self._instance.ledger
        job = Job(decode, ask, chosen, "")
        decode.running[ask.req_id] = job
        try:
            await ledger.wait_allocate(ask.req_id, len(ask.tokens) + 1, "alone")
        except OutOfBlocks as never:
            decode.fail(job, Failed(RESOURCE_EXHAUSTED, str(never)))
            decode.flush()
            return
        job.cached_tokens = self._engine.cache.lookup(ask.tokens)
        uncached = len(ask.tokens) - job.cached_tokens
        wait_s = self._instance.clockwork.prefill_wait_s(uncached, time.monotonic())
        if wait_s:
            await asyncio.sleep(wait_s)
        if job.over:
            ledger.release(ask.req_id, "lost while it waited")
            return
        job.kv = kv_digest(ask.tokens, self._instance.options.seed)
        job.plan(None)
        decode.begin(job)

    def tell_failure(self, ask: Ask, failed: Failed) -> None:
        """A request that fails: its service hears of it."""
        self._send(Parcel(outputs.failed((ask.req_id, ask.service_req_id), failed), ask.source, _nothing))

    def _send(self, parcel: Parcel) -> None:
        name = f"{self._instance.name} tells of a failure"
        self._instance.tasks.spawn(self._engine.outbox.single(parcel), name)


def _nothing(is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
    """The request is over already."""
    del is_ok
