"""The prefill role: from Completions to FirstGeneration (xLLM protocol page §1, §5.4, §6)."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instances.faults import Chosen
from instances.ledger import OutOfBlocks
from instances.xllm import outputs
from instances.xllm.ask import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNKNOWN, Ask, Failed, for_decode, plans
from instances.xllm.errors import RpcError, RpcLost
from instances.xllm.kv import topology
from instances.xllm.outbox import Parcel
from instances.xllm.outputs import Sequence
from instances.xllm.proto.engine_pb2 import (
    ClusterInfos,
    DisaggGenerationsRequest,
    DisaggGenerationsRequests,
    DisaggRequests,
    DisaggResponses,
    DisaggStreamGeneration,
    Status,
)
from instances.xllm.proto.service_pb2 import InstanceID, InstanceMetaInfo

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

PD_SERVICE = "xllm.proto.DisaggPDService"
GET_INFO = ("xllm_service.proto.XllmRpcService", "GetInstanceInfo")
_OLD_IDS = (7, 8)
_ACCEPTED = 200


@dataclass(slots=True)
class Held:
    """A request on this instance.

    Attributes:
        sequence: the only one of which prefill makes a token.
        decode: what the service says of the decode instance.
        blocks: here; decode_blocks: there.
    """

    ask: Ask
    chosen: Chosen
    sequence: Sequence
    decode: InstanceMetaInfo = field(default_factory=InstanceMetaInfo)
    blocks: list[int] = field(default_factory=list)
    decode_blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)
    refused: bool = False


class Prefill:
    """Everything that prefill does."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self._queue: deque[Held] = deque()
        self._wake = asyncio.Event()
        self.live: dict[str, Held] = {}
        self.requeues = self.linear_states = 0

    @property
    def waiting(self) -> int:
        """Requests that decode has not accepted yet."""
        return len(self._queue)

    def add(self, ask: Ask, chosen: Chosen) -> None:
        """A valid request: its way begins."""
        plan = plans(ask, self._instance.options, self._engine.settings.max_context_len,
                     partial_first="partial_first" in chosen)[0]  # fmt: skip
        held = Held(ask, chosen, Sequence(0, plan))
        self.live[ask.req_id] = held
        self._queue.append(held)
        self._wake.set()

    async def run(self) -> None:
        """Hand requests to decode, one after the other, for ever: one slow decode instance holds up all."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            held = self._queue.popleft()
            try:
                accepted = await self._dispatch(held)
            except Failed as failed:
                self._fail(held, failed)
                continue
            if not self._is_live(held):
                continue
            if accepted:
                self._instance.tasks.spawn(self._work(held), f"{self._instance.name} prefills")
            else:
                # the real engine asks again at once, for ever
                self.requeues += 1
                self._queue.append(held)
                await asyncio.sleep(self._engine.settings.requeue_s)

    def _is_live(self, held: Held) -> bool:
        return self.live.get(held.ask.req_id) is held

    # --- hand over

    async def _dispatch(self, held: Held) -> bool:
        """Offer the request to decode; False if it has no room. Raises Failed."""
        ask, engine = held.ask, self._engine
        if not ask.decode:
            raise Failed(INVALID_ARGUMENT, "No decode address provided to the prefill instance")
        held.decode = await self._ask_service(ask.decode)
        self._check_topology(held.decode)
        message = DisaggRequests(prefill_name=engine.name, cluster_infos=self._cluster_infos())
        message.reqs.append(for_decode(ask, engine.settings.max_context_len))
        try:
            channel = engine.channel(held.decode.rpc_address)
            answer = await channel.call((PD_SERVICE, "AddNewRequests"), message, DisaggResponses)
        except (RpcError, RpcLost) as error:
            engine.note(f"Failed to add new requests to decode instance : {ask.decode}, error text : {error}")
            raise Failed(UNKNOWN, "Failed to add new requests to decode instance") from None
        if len(answer.resps) != 1:
            engine.abort(f"Check failed: {len(answer.resps)} answers to 1 request")
            return False
        response = answer.resps[0]
        if response.status_code != _ACCEPTED:
            return False
        held.decode_blocks = list(response.blocks_ids)
        self.linear_states += response.linear_state_id >= 0
        return True

    async def _ask_service(self, name: str) -> InstanceMetaInfo:
        missing = Failed(UNKNOWN, "failed to fetch remote decode instance info")
        try:
            channel = self._engine.channel(self._engine.presence.master)
            info = await channel.call(GET_INFO, InstanceID(name=name), InstanceMetaInfo)
        except (RpcError, RpcLost) as error:
            self._engine.note(f"Fail to get instance info from xservice server, error text: {error}")
            raise missing from None
        if not info.name:
            raise missing
        return info

    def _check_topology(self, decode: InstanceMetaInfo) -> None:
        own = self._engine.settings.dp_size, self._engine.settings.tp_size
        try:
            reason = "" if topology(decode) == own else "dp and tp differ"
        except ValueError as wrong:
            reason = str(wrong)
        if reason:
            raise Failed(INVALID_ARGUMENT, f"decode instance {decode.name} is incompatible: {reason}")

    def _cluster_infos(self) -> ClusterInfos:
        engine = self._engine
        infos = ClusterInfos(cluster_ids=engine.cluster_ids, addrs=engine.addrs, ports=engine.link_ports)
        infos.dp_size = engine.settings.dp_size
        if engine.settings.proto == "old":
            infos.device_ips.append(self._instance.host)
        return infos

    # --- compute

    async def _work(self, held: Held) -> None:
        try:
            await self._compute(held)
        except Failed as failed:
            self._fail(held, failed)
            return
        if not self._is_live(held):
            return
        if (stall := held.chosen.at("stall", 0)) is not None:
            if not stall.value:
                return
            await asyncio.sleep(stall.number(0))
        if (crash := held.chosen.at("answer_crash", 0)) is not None:
            self._instance.crash(crash.number(0) if crash.value else None)
            return
        if (error := held.chosen.at("generation_error", 0)) is not None:
            self._fail(held, Failed(int(error.number(UNKNOWN)), "injected failure"))
            return
        if self._engine.settings.kv_cache_transfer_mode == "PUSH":
            await self._engine.kv.push(held)
        held.sequence.sent = 1
        self._engine.presence.first_token(time.monotonic() - held.began_s)
        if self._is_live(held):
            self._instance.ledger.pin(held.ask.req_id, "until decode has the first token")
            await asyncio.gather(self._tell_service(held), self._tell_decode(held))

    async def _compute(self, held: Held) -> None:
        ask, instance = held.ask, self._instance
        try:
            await instance.ledger.wait_allocate(ask.req_id, len(ask.tokens), "prefill")
        except OutOfBlocks as never:
            raise Failed(RESOURCE_EXHAUSTED, str(never)) from None
        if not self._is_live(held):
            instance.ledger.release(ask.req_id, "lost while it waited")
            return
        held.blocks = self._engine.block_ids.take(instance.ledger.blocks(len(ask.tokens)))
        held.cached_tokens = self._engine.cache.lookup(ask.tokens)
        wait_s = instance.clockwork.prefill_wait_s(len(ask.tokens) - held.cached_tokens, time.monotonic())
        if wait_s:
            await asyncio.sleep(wait_s)

    # --- tell

    def _first_message(self, held: Held) -> DisaggStreamGeneration:
        ask, sequence = held.ask, held.sequence
        one = [sequence]
        if sequence.complete and ask.n == 1:
            message = outputs.finished(ask, [sequence.whole(ask)], one, held.cached_tokens)
            message.finished_on_prefill_instance = True
        elif ask.stream:
            message = outputs.generation(ask, [sequence.delta(ask)])
            # nothing to show while the first token is a part of a character: then decode tells both
            message.finished_on_prefill_instance = bool(message.outputs)
        else:
            message = outputs.generation(ask, [sequence.whole(ask)])
            message.usage.CopyFrom(outputs.usage(ask, one, held.cached_tokens))
            message.finished_on_prefill_instance = True
        return message

    async def _tell_service(self, held: Held) -> None:
        if "overtaken" in held.chosen:
            await asyncio.sleep(held.chosen.number("overtaken", 0.1))

        def told(is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
            held.refused = not is_ok

        parcel = Parcel(self._first_message(held), held.ask.source, told)
        await self._engine.outbox.single(parcel)
        if held.chosen.at("duplicate", 1) is not None:
            await self._engine.outbox.single(parcel)

    async def _tell_decode(self, held: Held) -> None:
        """FirstGeneration; if it fails nobody is told."""
        ask, engine = held.ask, self._engine
        gen = DisaggGenerationsRequest(req_id=ask.req_id, kv_cache_transfer_mode=engine.settings.kv_cache_transfer_mode)
        ttft_s = time.monotonic() - held.began_s
        gen.tokens.append(outputs.remote_token(ask, held.sequence.plan.tokens[0], ttft_s))
        if engine.settings.proto != "old":
            gen.linear_state_id = -1
        if engine.settings.kv_cache_transfer_mode == "PULL":
            gen.cluster_ids.extend(engine.cluster_ids)
            gen.addrs.extend(engine.addrs)
            gen.block_ids.extend(held.blocks)
            gen.dp_size = engine.settings.dp_size
            if engine.settings.proto == "old":
                gen.k_cache_ids.extend(_OLD_IDS)
                gen.v_cache_ids.extend(_OLD_IDS)
        why = "decode has the first token"
        if "first_lost" in held.chosen:
            why = "FirstGeneration lost"
        else:
            try:
                channel = engine.channel(held.decode.rpc_address)
                names = PD_SERVICE, "FirstGeneration"
                answer = await channel.call(names, DisaggGenerationsRequests(multi_gens=[gen]), Status)
                failure = "" if answer.ok else "response status: false"
            except (RpcError, RpcLost) as error:
                failure = str(error)
            if failure:
                why = "FirstGeneration failed"
                engine.note(f"Failed to send first generation to decode instance : {ask.decode}, {failure}")
        self._end(held, why)

    # --- ends

    def _fail(self, held: Held, failed: Failed) -> None:
        if self._is_live(held):
            self._end(held, "failed")
            self._engine.intake.tell_failure(held.ask, failed)

    def _end(self, held: Held, why: str) -> None:
        if self._is_live(held):
            del self.live[held.ask.req_id]
            self._engine.block_ids.give(held.blocks)
            self._instance.ledger.release(held.ask.req_id, why)

    def forget(self) -> None:
        """Lose all requests."""
        for held in self.live.values():
            self._engine.block_ids.give(held.blocks)
        self.live.clear()
        self._queue.clear()

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "prefilling": list(self.live),
            "waiting_for_decode": self.waiting,
            "requeues": self.requeues,
            "linear_states": self.linear_states,
        }
