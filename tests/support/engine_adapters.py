"""Engines as the conformance kit drives them: what their instances do, in words that fit every engine.

To put a further engine under the kit, derive from `Adapter`, let its fake instances follow `Script`, and add it to
`ADAPTERS`.
"""

import json

from adapter_base import DONE, ROLE, Adapter, Script, answer, break_off, token, words_of
from disagg_adapter import DisaggpbAdapter
from engine_world import Watcher, chat, instance, until
from fake_instances import FakeDecode, FakeInstance, envelope
from microserving_adapter import MicroservingAdapter
from pair_adapters import SglangAdapter, VllmAdapter
from xllm_adapter import XllmAdapter

from coordinator.engines.hybrid import HybridEngine
from coordinator.engines.mindie import MindieEngine

__all__ = ["ADAPTERS", "DONE", "Script", "say", "token", "words_of"]


class MindieAdapter(Adapter):
    """Prefill over HTTP, decode over its result stream."""

    name = "mindie"
    stages = ("prefill", "transfer", "decode")
    stands = 1

    async def start(self):
        self.prefill, self.decode = await FakeInstance().listen(), await FakeDecode().listen()
        self.fakes = [self.prefill, self.decode]
        self.prefill.infer = self._prefill
        self.engine = MindieEngine(self.context)
        watcher = Watcher()
        instances = [instance("p0", self.prefill.address), instance("d0", self.decode.address)]
        for each in instances:
            self.engine.attach(each, watcher)
        await until(lambda: self.engine._links[instances[1].key].up)
        return instances

    async def _prefill(self, call):
        script, words = self.script, self.text_of(call)
        stream = json.loads(call.body)["stream"]
        await self.stop_at("prefill")
        if script.prefill_fault:
            await break_off(call, script.prefill_fault)
            return
        alone = len(words) == 1
        if stream:
            output = ROLE + token(words[0], last=alone) + (DONE if alone else "")
            call.reply(envelope(call.wire_id, output, last=alone))
        else:
            whole = answer(words).decode() if alone else None
            call.reply(envelope(call.wire_id, whole, stream=False, last=alone or None))
        if not alone:
            await self._decode(call.wire_id, words, stream=stream)

    async def _decode(self, wire_id, words, *, stream):
        script, say = self.script, self.decode.say
        await self.stop_at("transfer")
        if script.decode_fault == "before" or (script.decode_fault and not stream):
            say(wire_id, "error", b"Pull kv failed irreversibly.")
            return
        if not stream:
            say(wire_id, "lastData", answer(words))
        else:
            say(wire_id, "data", ROLE.encode())
            for word in words[1:-1]:
                say(wire_id, "data", token(word).encode())
            if script.decode_fault == "after":
                say(wire_id, "error", b"Failed forward in for infer engine.")
                return
            await self.stop_at("decode")
            say(wire_id, "lastData", token(words[-1], last=True).encode())
            say(wire_id, "lastData", DONE.encode())
        if script.late:
            await self.say_late(wire_id)

    async def say_late(self, wire_id):
        for keyword in ("data", "lastData", "error", "retry"):
            self.decode.say(wire_id, keyword, token("late").encode())

    def asked(self):
        return self.prefill.calls

    def wire_ids(self):
        return [call.wire_id for call in self.prefill.calls]

    async def aborted(self):
        await self.settled()
        for fake in self.fakes:
            assert all(number == 1 for number in fake.stops.values()), "an abort was sent twice"
        assert self.prefill.stops == self.decode.stops, "prefill and decode were told different things"
        return set(self.prefill.stops)

    async def settled(self):
        await until(lambda: not self.engine._stops._tasks)


class HybridAdapter(Adapter):
    """One instance that does it all; closing the connection is the abort."""

    name = "hybrid"
    stages = ("prefill", "decode")

    async def start(self):
        self.fake = await FakeInstance().listen()
        self.fakes = [self.fake]
        self.fake.infer = self._infer
        self.engine = HybridEngine(self.context)
        self.complete = set()
        return [instance("h0", self.fake.address)]

    async def _infer(self, call):
        script, words = self.script, self.text_of(call)
        stream = json.loads(call.body)["stream"]
        await self.stop_at("prefill")
        if script.prefill_fault or script.decode_fault == "before":
            await break_off(call, script.prefill_fault or "reset")
            return
        if not stream:
            if script.decode_fault:
                call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
                call.fin()
                return
            await self.stop_at("decode")
            call.reply(answer(words))
        else:
            call.open_stream()
            for word in words[:-1]:
                call.chunk((token(word)).encode())
            if script.decode_fault == "after":
                call.rst()
                return
            await self.stop_at("decode")
            call.chunk(token(words[-1], last=True).encode())
            call.chunk(DONE.encode())
            call.end()
        self.complete.add(call.header("x-request-id"))
        if script.late:
            await self.say_late(call.header("x-request-id"))

    async def say_late(self, wire_id):
        for call in self.fake.calls:
            if call.header("x-request-id") == wire_id:
                call.chunk(token("late").encode())

    def asked(self):
        return self.fake.calls

    def wire_ids(self):
        return [call.header("x-request-id") for call in self.fake.calls]

    def over(self):
        return self.complete

    async def aborted(self):
        given_up = [call for call in self.fake.calls if call.header("x-request-id") not in self.complete]
        for call in given_up:
            await call.left()
        return {call.header("x-request-id") for call in given_up}


ADAPTERS = (
    MindieAdapter, HybridAdapter, VllmAdapter, SglangAdapter, MicroservingAdapter, XllmAdapter, DisaggpbAdapter,
)  # fmt: skip


def say(text, *, stream=True):
    """A body that asks for these letters, one token each."""
    return chat(f"say {text}", stream=stream)
