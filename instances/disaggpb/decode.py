"""`/disagg.DecodeWorker/Decode`."""

import asyncio
from typing import TYPE_CHECKING

from instances import answers
from instances.answers import Wish
from instances.batch import Batch
from instances.disaggpb import vocabulary
from instances.disaggpb.calls import Call, Context
from instances.disaggpb.kv import Cache, is_odd
from instances.disaggpb.proto.disagg_pb2 import DecodeRequest, TokenStream

if TYPE_CHECKING:
    from instances.disaggpb.instance import DisaggpbEngine

PATH = "/disagg.DecodeWorker/Decode"
_OTHER = "somebody-else"


class _Turn:
    """A request's place in the next decode step."""

    def __init__(self) -> None:
        self._come = asyncio.Event()

    def step(self) -> bool:
        """The turn; for the next token there is another one, taken when this one is sent."""
        self._come.set()
        return False

    async def of(self, batch: Batch) -> None:
        """Wait for it; cancelled, the place is given up."""
        batch.join(self)
        try:
            await self._come.wait()
        finally:
            batch.leave(self)


class Decoding:
    """The decode part of a worker.

    Attributes:
        received_bytes: of KV.
    """

    def __init__(self, engine: "DisaggpbEngine") -> None:
        self._engine = engine
        self.received_bytes = 0

    async def run(self, request: DecodeRequest, context: Context) -> None:
        """Greedy tokens; id 2 ends the text and is sent, the last step ends it too."""
        engine = self._engine
        call = Call(engine, request, context, PATH)
        async with call.at_work(len(call.prompt) + max(1, request.max_new_tokens), "decode"):
            if is_odd(request.kv_blocks):
                await call.broken("decode: odd length of fp16 data")
            if not call.prompt:
                await call.broken("decode: token_ids is empty")
            self.received_bytes += sum(len(block.k_data) + len(block.v_data) for block in request.kv_blocks)
            ids, finish = self._answer(call, request)
            sent_as = _OTHER if "decode_wrong_id" in call.chosen else call.request_id
            for number, token in enumerate(ids):
                await call.strike("decode", number)
                last = number == len(ids) - 1
                if call.chosen.at("decode_no_done", number, len(ids) - 1) is not None:
                    return
                await _Turn().of(engine.batch)
                await context.write(
                    TokenStream(request_id=sent_as, token_id=token, done=last, finish_reason=finish if last else "")
                )
                engine.generated_tokens += 1
                call.record.note = f"{number + 1} tokens"
            await call.strike("decode", len(ids))
            if "after_done" in call.chosen:
                await context.write(TokenStream(request_id=sent_as, token_id=ids[-1]))

    def _answer(self, call: Call, request: DecodeRequest) -> tuple[list[int], str]:
        """The ids to send and the finish reason; visibly wrong ids if the KV is not that of the prompt."""
        engine, chosen = self._engine, call.chosen
        options = engine.instance.options
        natural = int(chosen.number("length")) if "length" in chosen else answers.marked_length(call.text)
        wish = Wish(call.prompt, max(1, request.max_new_tokens), natural_length=0 if "eos_first" in chosen else natural)
        plan = answers.plan(wish, options.seed, options.answer_tokens)
        fault = Cache(call.prompt, options.seed, engine.shape).fault_of(request.kv_blocks, request.request_id)
        if fault:
            engine.wrong_kv[fault] += 1
            return [vocabulary.LOST] * len(plan), "length"
        ids = [vocabulary.to_wire(token) for token in plan.tokens]
        for number in range(len(ids)):
            if chosen.at("token_zero", number, 0) is not None:
                ids[number] = 0
        return ids, plan.finish
