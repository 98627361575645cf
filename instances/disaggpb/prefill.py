"""`/disagg.PrefillWorker/Prefill`."""

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from instances.disaggpb.calls import Call, Context
from instances.disaggpb.kv import Cache
from instances.disaggpb.proto.disagg_pb2 import KVBlock, KVBlockStream, PreFillRequest
from instances.faults import Chosen

if TYPE_CHECKING:
    from instances.disaggpb.instance import DisaggpbEngine

PATH = "/disagg.PrefillWorker/Prefill"
_OTHER = "somebody-else"


class Prefilling:
    """The prefill part of a worker.

    Attributes:
        sent_bytes: of KV.
    """

    def __init__(self, engine: "DisaggpbEngine") -> None:
        self._engine = engine
        self.sent_bytes = 0

    async def run(self, request: PreFillRequest, context: Context) -> None:
        """One block for each layer, in order, then done without a block; the worker keeps nothing."""
        call = Call(self._engine, request, context, PATH)
        async with call.at_work(len(call.prompt), "prefill"):
            if not call.prompt:
                await call.broken("prefill: token_ids is empty")
            clockwork = self._engine.instance.clockwork
            await asyncio.sleep(clockwork.prefill_wait_s(len(call.prompt), time.monotonic()))
            self._engine.prompt_tokens += len(call.prompt)
            pause_s = clockwork.transfer_s(len(call.prompt)) / self._engine.shape.layers
            count = 0
            if "done_first" in call.chosen:
                await context.write(KVBlockStream(done=True))
            for block in self._blocks(call):
                if pause_s:
                    await asyncio.sleep(pause_s)
                await call.strike("prefill", count)
                if call.chosen.at("no_done", count, -1) is not None:
                    return
                await context.write(KVBlockStream(block=block))
                self.sent_bytes += len(block.k_data) + len(block.v_data)
                count += 1
            await call.strike("prefill", count)
            if "no_done" not in call.chosen and "done_first" not in call.chosen:
                await context.write(KVBlockStream(done=True))
            if "block_after_done" in call.chosen:
                await context.write(KVBlockStream(block=KVBlock(request_id=call.request_id, layer_idx=count)))
            call.record.note = f"{count} blocks"

    def _blocks(self, call: Call) -> Iterator[KVBlock]:
        """The blocks that are sent, made one at a time."""
        chosen, engine = call.chosen, self._engine
        cache = Cache(call.prompt, engine.instance.options.seed, engine.shape, wrong="wrong_kv" in chosen)
        sent_as = _OTHER if "wrong_id" in chosen else call.request_id
        for position, layer in enumerate(_layers(chosen, engine.shape.layers)):
            block = cache.block(layer, sent_as)
            if chosen.at("odd_length", position, 0) is not None:
                block.k_data = block.k_data[:-1]
            yield block


def _layers(chosen: Chosen, count: int) -> list[int]:
    """Which layers are sent, in which order."""
    layers = [] if "zero_layers" in chosen else list(range(count))
    if "out_of_order" in chosen:
        layers[:2] = reversed(layers[:2])
    if "duplicate" in chosen:
        layers[:1] = layers[:1] * 2
    return layers[:-1] if "skip_layer" in chosen else layers
