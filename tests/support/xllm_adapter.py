"""The xllm engine as the conformance kit drives it: results that instances push, ends that are told in the replies."""

import json
import re

from adapter_base import Adapter, break_off
from engine_world import Watcher, context, until
from xllm_pair import COMPLETIONS, FakeXllm, generation, output, settings, tokenizers, xllm

from coordinator.engines.xllm import XllmEngine

ASKED = re.compile(r"\[user\] say (.*)\n")


class XllmAdapter(Adapter):
    """Attributes: `complete`: ids whose end was pushed and wanted."""

    name = "xllm"
    stages = ("prefill", "transfer", "decode")
    native = False

    def __init__(self):
        super().__init__()
        self.context = context(settings=settings(), tokenizers=tokenizers())
        self.complete = set()

    async def start(self):
        self.prefill, self.decode = await FakeXllm().listen(), await FakeXllm().listen()
        self.fakes = [self.prefill, self.decode]
        self.prefill.infer = self._prefill
        self.engine = XllmEngine(self.context)
        instances = [xllm("p0", self.prefill), xllm("d0", self.decode)]
        watcher = Watcher()
        for each in instances:
            self.engine.attach(each, watcher)
        await until(lambda: watcher.told.count("linked") == 2)
        for fake in self.fakes:
            await fake.connect(self.engine._inbound.address)
        await until(lambda: self.open_request_connections() <= 0)
        return instances

    def text_of(self, call):
        found = ASKED.search(json.loads(call.body)["prompt"])
        return tuple(found[1]) if found else self.script.words

    # --- instances

    async def _prefill(self, call):
        assert call.target == COMPLETIONS
        if self.script.prefill_fault:
            await self.stop_at("prefill")
            await break_off(call, self.script.prefill_fault)
            return
        call.reply(b"{}")
        body, words = json.loads(call.body), self.text_of(call)
        await self.stop_at("prefill")
        ident = body["service_request_id"]
        if len(words) == 1:
            await self._end(self.prefill, ident, [output(words[0], finish="stop", ids=[7])], first=True)
        elif await self._push(self.prefill, generation(ident, output(words[0], ids=[7]), first=True)):
            await self._decode(ident, words, stream=body["stream"])

    async def _decode(self, ident, words, *, stream):
        script = self.script
        await self.stop_at("transfer")
        broken = generation(ident, status=(2, "it is broken"))
        if script.decode_fault == "before" or (script.decode_fault and not stream):
            await self._push(self.decode, broken)
            return
        if not stream:
            await self.stop_at("decode")
            text = "".join(words)
            await self._end(self.decode, ident, [output(text, finish="stop", ids=[7] * len(words))])
            return
        for word in words[1:-1]:
            if not await self._push(self.decode, generation(ident, output(word, ids=[7]))):
                return
        if script.decode_fault == "after":
            await self._push(self.decode, broken)
            return
        await self.stop_at("decode")
        if await self._push(self.decode, generation(ident, output(words[-1], ids=[7]))):
            await self._end(self.decode, ident, [output(finish="stop")])

    async def _end(self, fake, ident, outputs, *, first=False):
        self.complete.add(ident)
        if not await self._push(fake, generation(ident, *outputs, first=first, finished=True, usage=(5, 4))):
            self.complete.discard(ident)
        if self.script.late:
            await self.say_late(ident)

    async def _push(self, fake, told):
        try:
            return all(await fake.push(told))
        except ConnectionError:
            return False  # as for an engine: whoever does not answer wants nothing more

    async def say_late(self, wire_id):
        await self._push(self.decode, generation(wire_id, output("late", ids=[7])))

    # --- what the kit asks

    def asked(self):
        return [call for call in self.prefill.calls if call.target == COMPLETIONS]

    def wire_ids(self):
        return [json.loads(call.body)["service_request_id"] for call in self.asked()]

    def over(self):
        return self.complete

    async def aborted(self):
        """Who is told to stop with its next result; those that prefill did not take have none."""
        if self.script.prefill_fault:
            return set()
        given_up = [ident for ident in self.wire_ids() if ident not in self.complete]
        return {ident for ident in given_up if not await self._push(self.decode, generation(ident))}
