"""The disaggpb engine as the conformance kit drives it: the abort of a request is the cancelled call."""

import asyncio
import tempfile
from pathlib import Path

import grpc
from adapter_base import Adapter
from disagg_workers import END, FakeWorker, kv_message, token_message
from engine_world import GUARD_S, Watcher, context, instance, until
from token_folders import write_folder

from coordinator.core.errors import EngineFailed
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.tokens import Tokenizers

CODE = grpc.StatusCode
CODES = {"400": CODE.INVALID_ARGUMENT, "404": CODE.NOT_FOUND, "500": CODE.UNKNOWN, "503": CODE.UNAVAILABLE}


class DisaggpbAdapter(Adapter):
    """Prefill streams KV, decode streams tokens; the words of an answer are found in the prompt's tokens."""

    name = "disaggpb"
    stages = ("prefill", "transfer", "decode")
    native = False
    pins = False
    refusals = ("400", "404")
    retry_after_s = None

    def __init__(self):
        super().__init__()
        folder = write_folder(Path(tempfile.mkdtemp(prefix="disaggpb-tokenizer-")))
        tokenizers = Tokenizers(folder)
        tokenizers.load([folder])
        self.context = context(tokenizers=tokenizers)
        self.tokenizer = tokenizers.for_model("m")
        self.restarts = []

    async def start(self):
        self.prefill, self.decode = await FakeWorker().listen(), await FakeWorker().listen()
        self.fakes = [self.prefill, self.decode]
        self.prefill.prefill, self.decode.decode = self._prefill, self._decode
        self.engine = DisaggpbEngine(self.context)
        instances = [instance("p0", self.prefill.address, engine=self.name)]
        instances.append(instance("d0", self.decode.address, engine=self.name))
        for each in instances:
            self.engine.attach(each, Watcher())
            await self.engine.probe(each)
        return instances

    async def __aexit__(self, *parts):
        await asyncio.gather(*self.restarts)
        await super().__aexit__(*parts)

    def words_of(self, ids):
        text = self.tokenizer.decode(ids)
        asked = text.partition("[user] say ")[2].partition("\n")[0]
        return tuple(asked) if asked else self.script.words

    def ids_of(self, words):
        return [found for word in words for found in self.tokenizer._library.encode(word, add_special_tokens=False).ids]

    # --- workers

    async def _prefill(self, ask):
        await self.stop_at("prefill")
        fault = self.script.prefill_fault
        if fault in CODES:
            await ask.fail(CODES[fault], "so says the engine")
        elif fault == "nonsense":
            yield b"\xff\xff"
        elif fault == "reset":
            ask.ended = True
            self.restarts.append(asyncio.create_task(self.prefill.restart()))
            await asyncio.Event().wait()
        elif fault == "closed":
            yield kv_message(ask.wire_id, 0)
        else:
            for layer in range(3):
                yield kv_message(ask.wire_id, layer)
            yield END

    async def _decode(self, ask):
        script = self.script
        assert len(ask.message.kv_blocks) == 3
        if script.decode_fault == "before":
            await ask.fail(CODE.INTERNAL, "it is broken")
        await self.stop_at("transfer")
        ids = self.ids_of(self.words_of(list(ask.message.token_ids)))
        for token in ids[:-1]:
            yield token_message(ask.wire_id, token)
        if script.decode_fault:
            await ask.fail(CODE.INTERNAL, "it is broken")
        await self.stop_at("decode")
        yield token_message(ask.wire_id, ids[-1], "stop")
        if script.late:
            yield token_message(ask.wire_id, ids[0])

    # --- what the kit asks

    async def mended(self):
        """A worker that a fault has restarted is there again, and its channel knows."""
        if not self.restarts:
            return
        await asyncio.gather(*self.restarts)
        self.restarts.clear()
        for _ in range(100):
            try:
                await self.engine.probe(self.instances[0])
            except EngineFailed:
                await asyncio.sleep(0.05)
            else:
                return

    def asked(self):
        return self.prefill.calls

    def wire_ids(self):
        return [call.wire_id for call in self.prefill.calls]

    def _calls(self):
        return [*self.prefill.calls, *self.decode.calls]

    def over(self):
        left = {call.wire_id for call in self._calls() if not call.ended}
        return {call.wire_id for call in self._calls()} - left

    async def aborted(self):
        given_up = [call for call in self._calls() if not call.ended]
        for call in given_up:
            async with asyncio.timeout(GUARD_S):
                await call.left.wait()
        return {call.wire_id for call in given_up if not call.ended}

    async def settled(self):
        budget = self.engine.budget
        assert (budget.reserved_bytes, budget.buffered_bytes, budget.waiting) == (0, 0, 0)
        await until(lambda: not any(worker.partings for worker in self.engine._workers.values()))

    async def refuse(self):
        await self.prefill.server.stop(None)

    def open_request_connections(self):
        return sum(not call.left.is_set() for call in self._calls())
