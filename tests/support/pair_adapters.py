"""Adapters of engines whose prefill and decode instances are both asked over plain HTTP calls."""

import asyncio
import json

from adapter_base import DONE, ROLE, Adapter, answer, break_off, token
from engine_world import Watcher, instance, until
from fake_instances import FakeInstance

from coordinator.engines.sglang import SglangEngine
from coordinator.engines.vllm import VllmEngine

LINGER_S = 0.02


class PairAdapter(Adapter):
    """Two instances; the abort of a request is the end of its connections.

    Attributes:
        calls: every call of a request to either instance, in order.
        done: those whose answer the instance has given to its end.
    """

    stages = ("prefill", "transfer", "decode")
    decode_faults = ("400", "500", "before", "after")

    def __init__(self):
        super().__init__()
        self.calls = []
        self.done = set()

    async def start(self):
        self.prefill, self.decode = await FakeInstance().listen(), await FakeInstance().listen()
        self.fakes = [self.prefill, self.decode]
        self.prefill.infer, self.decode.infer = self._prefill, self._decode
        self.engine = self.make_engine()
        instances = [
            instance(name, fake.address, engine=self.name) for name, fake in zip(("p0", "d0"), self.fakes, strict=True)
        ]
        for each in instances:
            self.engine.attach(each, Watcher())
        return instances

    def asked(self):
        return self.prefill.calls

    def wire_ids(self):
        return [id_of(call) for call in self.prefill.calls]

    def over(self):
        left = {id_of(call) for call in self.calls if call not in self.done}
        return {id_of(call) for call in self.calls} - left

    async def aborted(self):
        await self.settled()
        given_up = [call for call in self.calls if call not in self.done]
        for call in given_up:
            await call.left()
        return {id_of(call) for call in given_up}

    def finished(self, call):
        """Note that an instance has given its answer to somebody who was still there."""
        if not call.peer.gone.is_set():
            self.done.add(call)

    async def refuses(self, call):
        """Whether decode fails before it answers."""
        fault = self.script.decode_fault
        if fault is None or fault == "after":
            return False
        await break_off(call, "reset" if fault == "before" else fault)
        return True

    async def answer(self, call, words):
        """Decode's part, from the moment at which it has the KV."""
        script, stream = self.script, json.loads(call.body)["stream"]
        if stream:
            call.chunk(ROLE.encode())
            for word in words[:-1]:
                call.chunk(token(word).encode())
            if script.decode_fault == "after":
                call.rst()
                return
            await self.stop_at("decode")
            call.chunk(token(words[-1], last=True).encode())
            call.chunk(DONE.encode())
            call.end()
        elif script.decode_fault:
            call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            call.fin()
            return
        else:
            await self.stop_at("decode")
            call.reply(answer(words))
        self.finished(call)
        if script.late:
            call.chunk(token("late").encode())

    async def say_late(self, wire_id):
        for call in self.decode.calls:
            if id_of(call) == wire_id:
                call.chunk(token("late").encode())


def id_of(call):
    return call.header("x-request-id")


class VllmAdapter(PairAdapter):
    """Prefill for one token, then decode with its record.

    What the kit calls an abort of a request that is past its prefill is decode's alone: prefill's KV goes as decode
    fetches it, or as a release does, and `settled` waits for that. Releases are no calls of the request.
    """

    name = "vllm"

    def __init__(self):
        super().__init__()
        self.pinned = {}  # wire id: prefill's call

    def make_engine(self):
        engine = VllmEngine(self.context)
        engine._farewells.linger_s = LINGER_S
        engine._farewells.patience_s = LINGER_S
        return engine

    async def _prefill(self, call):
        self.calls.append(call)
        body = json.loads(call.body)
        assert (body["max_tokens"], body["stream"]) == (1, False)
        await self.stop_at("prefill")
        if self.script.prefill_fault:
            self.finished(call)
            await break_off(call, self.script.prefill_fault)
            return
        self.finished(call)
        record = {"remote_request_id": id_of(call), "remote_block_ids": [[1, 2]]}
        self.pinned[id_of(call)] = call
        first = json.loads(answer(self.text_of(call)[:1]))
        call.reply(json.dumps({**first, "kv_transfer_params": record}).encode())

    async def _decode(self, call):
        body = json.loads(call.body)
        assert body["kv_transfer_params"]["remote_request_id"] == id_of(call)
        if "cache_salt" in body:
            self._fetch_only(call)
            return
        self.calls.append(call)
        if await self.refuses(call):
            return
        assert self.pinned.pop(id_of(call), None), "KV that is not there, or was fetched before"
        if body["stream"]:
            call.open_stream()
        await self.stop_at("transfer")
        await self.answer(call, self.text_of(call))

    def _fetch_only(self, call):
        if self.pinned.pop(id_of(call), None) is None:
            call.reply(b'{"error":{"message":"no such KV"}}', 400)
            return
        call.open_stream()
        call.chunk(token("A", last=True).encode() + DONE.encode())
        call.end()

    async def settled(self):
        """No release is due, and no KV is left of which the coordinator has read."""
        await until(lambda: not self.engine.pinned())
        await until(lambda: all(call.peer.gone.is_set() for call in self.pinned.values()))


class SglangAdapter(PairAdapter):
    """Both at once, tied together by a room.

    Decode is told of the end of a request that prefill has refused; that is no abort in the kit's sense, which means
    those that a client or a failure of another instance has caused. Nobody reads prefill's answer, so that one without
    sense hurts no one: its nonsense is an answer without a body.
    """

    name = "sglang"

    def __init__(self):
        super().__init__()
        self.rooms = {}
        self.refused = set()

    def make_engine(self):
        return SglangEngine(self.context)

    def _room(self, call):
        """What the two calls of a room wait for: decode's arrival and the transfer's end."""
        room = json.loads(call.body)["bootstrap_room"]
        assert str(room) == id_of(call)
        return self.rooms.setdefault(room, (asyncio.Event(), asyncio.Event()))

    async def _prefill(self, call):
        self.calls.append(call)
        here, sent = self._room(call)
        await self.stop_at("prefill")
        fault = self.script.prefill_fault
        if fault:
            self.refused.add(id_of(call))
            self.finished(call)
            if fault == "nonsense":
                call.reply(b"")
            else:
                await break_off(call, fault)
            return
        await here.wait()
        self.finished(call)
        if json.loads(call.body)["stream"]:
            call.open_stream()
            call.chunk(token(self.text_of(call)[0]).encode() + DONE.encode())
            call.end()
        else:
            call.reply(answer(self.text_of(call)[:1]))
        sent.set()

    async def _decode(self, call):
        self.calls.append(call)
        here, sent = self._room(call)
        if await self.refuses(call):
            return
        if json.loads(call.body)["stream"]:
            call.open_stream()
        here.set()
        await sent.wait()
        await self.stop_at("transfer")
        await self.answer(call, self.text_of(call))

    async def aborted(self):
        return await super().aborted() - self.refused
