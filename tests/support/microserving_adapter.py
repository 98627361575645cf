"""The microserving engine as the conformance kit drives it: chats that become completions over a pair."""

import asyncio
import json

from adapter_base import DONE, Adapter, break_off
from engine_world import Watcher, instance, until
from fake_instances import FakeInstance
from microserving_pair import GENERATE, PREPARE, WordTokenizer, metadata

from coordinator.engines.microserving import MicroservingEngine

PROMPT, ANSWER = "<chat> ", " <answer>"


class MicroservingAdapter(Adapter):
    """Three calls; what the kit calls an abort is a reservation that is freed, or a stream that is left.

    Attributes:
        done: ids whose answer decode has given to its end.
        freed: ids whose reservations were freed by a call of their own.
        complete: calls that were answered to their end.
        reserved: ids for which decode keeps room, with the words that it is to say.
        refused: ids that prefill has refused; their reservations are freed, but nobody has given them up.
    """

    name = "microserving"
    stages = ("prepare", "prefill", "decode")
    native = False

    def __init__(self):
        super().__init__()
        self.done = set()
        self.refused = set()
        self.freed = set()
        self.complete = set()
        self.reserved = {}
        self.fatal = []

    async def start(self):
        self.prefill, self.decode = await FakeInstance().listen(), await FakeInstance().listen()
        self.fakes = [self.prefill, self.decode]
        self.prefill.infer, self.decode.infer = self._prefill, self._decode
        self.engine = MicroservingEngine(self.context)
        tokenizer = WordTokenizer()
        self.engine._tokenizer = lambda instance: tokenizer
        errands = self.engine._means.errands
        errands.sending_s = errands.linger_s = 0.02
        visit = errands._visit

        async def noted(reservation):
            self.freed.add(reservation.wire_id)
            return await visit(reservation)

        errands._visit = noted
        instances = [
            instance("p0", self.prefill.address, engine=self.name),
            instance("d0", self.decode.address, engine=self.name, options={"recv_rank": 1}),
        ]
        for each in instances:
            self.engine.attach(each, Watcher())
        return instances

    def text_of(self, call):
        content = json.loads(call.body)["prompt"].removeprefix(PROMPT).removesuffix(ANSWER)
        return tuple(content.removeprefix("say ")) if content.startswith("say ") else self.script.words

    # --- instances

    async def _prefill(self, call):
        await self.stop_at("prefill")
        fault = self.script.prefill_fault
        if fault:
            self.refused.add(json.loads(call.body)["user"])
            await break_off(call, fault)
            return
        call.reply(b"{}")

    async def _decode(self, call):
        body = json.loads(call.body)
        user = body["user"]
        if call.target == PREPARE:
            await self.stop_at("prepare")
            self.reserved[user] = self.text_of(call)
            told = {"kv_append_metadata": metadata([(0, 2)]), "prefix_matched_length": 0}
            call.reply(json.dumps(told).encode())
            return
        words = self.reserved.pop(user, None)
        if words is None:
            self.fatal.append(user)
        elif self.script.decode_fault == "before" and call.target == GENERATE:
            call.rst()
        else:
            await self._answer(call, user, words, stream=body["stream"])

    async def _answer(self, call, user, words, *, stream):
        script = self.script
        if not stream and script.decode_fault:
            call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            call.fin()
            return
        if not stream:
            await self.stop_at("decode")
            call.reply(_shape(user, "".join(words), "stop"))
        else:
            call.open_stream()
            for word in words[:-1]:
                call.chunk(b"data: %b\n\n" % _shape(user, word, None))
            if script.decode_fault == "after":
                call.rst()
                return
            await self.stop_at("decode")
            call.chunk(b"data: %b\n\n" % _shape(user, words[-1], "stop"))
            call.chunk(DONE.encode())
            call.end()
        self.complete.add(call)
        if not call.peer.gone.is_set() and user not in self.freed:
            self.done.add(user)
        if script.late:
            call.chunk(b"data: %b\n\n" % _shape(user, "late", None))

    # --- what the kit asks

    def asked(self):
        return [call for call in self.decode.calls if call.target == PREPARE]

    def wire_ids(self):
        return [json.loads(call.body)["user"] for call in self.asked()]

    def over(self):
        return self.done | self.refused

    async def aborted(self):
        given_up = set(self.wire_ids()) - self.done - self.refused
        if not self._held_back():
            await self.settled()
            for call in self.decode.calls:
                if call.target == GENERATE and call not in self.complete:
                    await call.left()
        return given_up

    def _held_back(self):
        """Whether an instance does not answer, so that nothing can be freed yet."""
        return self.script.hold == "prepare" and not self.release.is_set()

    async def settled(self):
        if self._held_back():
            return
        errands = self.engine._means.errands
        await until(lambda: not self.engine.pinned() and not errands._tasks and not errands._parting)
        assert self.fatal == [], "start_generate for what decode does not know ends the engine"
        assert self.reserved == {}

    async def refuse(self):
        await self.decode.refuse()

    async def say_late(self, wire_id):
        for call in self.decode.calls:
            if call.target == GENERATE and json.loads(call.body)["user"] == wire_id:
                call.chunk(b"data: %b\n\n" % _shape(wire_id, "late", None))
        await asyncio.sleep(0)


def _shape(user, text, finish):
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    shape = {"id": user, "object": "text_completion", "choices": [choice], "usage": None}
    return json.dumps(shape).encode()
