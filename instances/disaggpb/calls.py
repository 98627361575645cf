"""One RPC from its arrival to its end: the record, the faults that strike at once, and the KV that it holds."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from instances.disaggpb import vocabulary
from instances.disaggpb.proto.disagg_pb2 import DecodeRequest, PreFillRequest
from instances.faults import BadFault, Chosen
from instances.ledger import OutOfBlocks
from instances.records import Record

if TYPE_CHECKING:
    from instances.disaggpb.instance import DisaggpbEngine

Context = grpc.aio.ServicerContext[Any, Any]
Asked = PreFillRequest | DecodeRequest
CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class Call:
    """One RPC.

    Attributes:
        chosen: its faults.
        prompt: the simulators' own token ids.
        key: under which its KV is held.
        record: what is told of it.
    """

    def __init__(self, engine: "DisaggpbEngine", request: Asked, context: Context, path: str) -> None:
        instance = engine.instance
        self._engine = engine
        self.context = context
        self.request_id = request.request_id
        self.prompt = tuple(vocabulary.from_wire(token) for token in request.token_ids)
        self.text = vocabulary.decode(request.token_ids)
        instance.ordinal += 1
        self.key = f"{request.request_id}#{instance.ordinal}"
        metadata = [(str(key), _shown(value)) for key, value in context.invocation_metadata() or ()]
        client = engine.door.client(context.peer())
        self.record: Record = instance.records.open(client, "GRPC", path, metadata, instance.role)
        instance.records.fill(self.record, _summary(request))
        self.record.body_bytes = request.ByteSize()
        self.chosen = Chosen()
        self._task = asyncio.current_task()
        self._ended_here = False

    def end(self) -> None:
        """End the call, wherever it stands, with the status CANCELLED."""
        self._ended_here = True
        if self._task is not None:
            self._task.cancel()

    async def fail(self, code: grpc.StatusCode, text: str) -> None:
        """End the call with a status; never returns."""
        self.record.outcome = code.name
        await self.context.abort(code, text)

    async def broken(self, text: str) -> None:
        """A plain error of the worker: code UNKNOWN (disaggpb protocol page §2)."""
        await self.fail(grpc.StatusCode.UNKNOWN, text)

    async def at_once(self) -> None:
        """Faults that strike before the worker sees the call."""
        instance = self._engine.instance
        try:
            self.chosen = instance.faults.choose(instance.ordinal, self.text)
        except BadFault as bad:
            await self.fail(grpc.StatusCode.INVALID_ARGUMENT, str(bad))
        if instance.starting:
            await self.fail(grpc.StatusCode.UNAVAILABLE, "the model is not loaded yet")
        if not self.chosen:
            return
        if "delay" in self.chosen:
            await asyncio.sleep(self.chosen.number("delay"))
        if "hang" in self.chosen:
            await self.stall()
        if (crash := self.chosen.get("crash")) is not None:
            instance.crash(crash.number(0) if crash.value else None)
            await self.stall()
        if "close" in self.chosen or "reset" in self.chosen:
            await self.cut()
        if "status" in self.chosen:
            number = int(self.chosen.number("status", grpc.StatusCode.UNAVAILABLE.value[0]))
            body = self.chosen.get("body")
            await self.fail(CODES.get(number, grpc.StatusCode.UNKNOWN), body.value if body else "injected failure")

    async def stall(self) -> None:
        """Nothing more; the call lives until its caller or the instance ends it."""
        await asyncio.Event().wait()

    async def cut(self) -> None:
        """Reset the connection."""
        self._engine.door.cut(self.context.peer())
        await self.stall()

    async def strike(self, kind: str, count: int) -> None:
        """Faults that are due when so many blocks or tokens are sent; `kind`: prefill or decode."""
        chosen = self.chosen
        if not chosen:
            return
        if chosen.at(f"{kind}_unavailable", count, 0) is not None:
            await self.fail(grpc.StatusCode.UNAVAILABLE, "injected failure")
        if (fault := chosen.at(f"{kind}_fail", count, 0)) is not None:
            await self.broken(fault.value or "injected failure")
        if chosen.at(f"{kind}_cut", count, 0) is not None:
            await self.cut()
        if chosen.at(f"{kind}_stall", count, 0) is not None:
            await self.stall()
        if f"{kind}_slow" in chosen:
            await asyncio.sleep(chosen.number(f"{kind}_slow", 1))

    @asynccontextmanager
    async def at_work(self, kv_tokens: int, why: str) -> AsyncIterator[None]:
        """The call as a live request that holds KV; whatever ends it gives the KV back."""
        engine, instance = self._engine, self._engine.instance
        began_s = time.monotonic()
        engine.live.add(self)
        instance.live += 1
        try:
            await self.at_once()
            try:
                await instance.ledger.wait_allocate(self.key, kv_tokens, why)
            except OutOfBlocks as never:
                await self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, str(never))
            yield
            self.record.outcome = "OK"
        except asyncio.CancelledError:
            self.record.outcome = "CANCELLED"
            if not self._ended_here or self._task is None:
                raise
            self._task.uncancel()
            await self.context.abort(grpc.StatusCode.CANCELLED, "ended by the worker")
        finally:
            instance.ledger.release(self.key, f"end of {why}" if self.record.outcome == "OK" else self.record.outcome)
            engine.live.discard(self)
            instance.live -= 1
            self.record.took_s = time.monotonic() - began_s


def _shown(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _summary(request: Asked) -> bytes:
    """The request as JSON, without the bytes of KV."""
    told: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
    }
    if isinstance(request, DecodeRequest):
        told["kv_blocks"] = [
            [block.request_id, block.layer_idx, block.block_idx, len(block.k_data), len(block.v_data)]
            for block in request.kv_blocks
        ]
    return json.dumps(told).encode()
