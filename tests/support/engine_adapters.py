"""Engines as the conformance kit drives them: what their instances do, in words that fit every engine.

To put a further engine under the kit, derive from `Adapter`, let its fake instances follow `Script`, and add it to
`ADAPTERS`.
"""

import asyncio
import json
from dataclasses import dataclass

from engine_world import Watcher, chat, context, instance, request, scheduler, until
from fake_instances import FakeDecode, FakeInstance, envelope

from coordinator.engines.hybrid import HybridEngine
from coordinator.engines.mindie import MindieEngine

ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
DONE = "data: [DONE]\n\n"


def token(word, *, last=False):
    finish = '"stop"' if last else "null"
    return f'data: {{"choices":[{{"index":0,"delta":{{"content":"{word}"}},"finish_reason":{finish}}}]}}\n\n'


def answer(words):
    return json.dumps({"choices": [{"message": {"content": "".join(words)}}]}).encode()


def words_of(body):
    """The text of a stream or of a whole answer, as a client would put it together."""
    if not body.startswith(b"data:"):
        return json.loads(body)["choices"][0]["message"]["content"]
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    return "".join(
        json.loads(event)["choices"][0]["delta"].get("content", "") for event in events if event != b"[DONE]"
    )


@dataclass
class Script:
    """What the instances do with the requests that come.

    Attributes:
        words: the answer, a token each; the first one is prefill's where there is a prefill.
        prefill_fault: None, an HTTP status as text, `reset`, `closed` or `nonsense`.
        decode_fault: None, `before` its first output or `after` it.
        hold: None, or the stage in which every instance stops and waits for `release` or for the end.
        late: send something more after the end of the answer, or after the coordinator has given up.
    """

    words: tuple = ("A", "B", "C", "D")
    prefill_fault: str | None = None
    decode_fault: str | None = None
    hold: str | None = None
    late: bool = False


class Adapter:
    """One engine with a scheduler and fake instances around it.

    Attributes:
        stages: where a request can be held, in order.
        stands: connections of the coordinator that stand open all the time.
    """

    name = ""
    stages = ()
    stands = 0

    def __init__(self):
        self.script = Script()
        self.context = context()
        self.release = asyncio.Event()
        self.reached = asyncio.Event()  # an instance waits in the stage to hold
        self.fakes = []

    async def __aenter__(self):
        self.instances = await self.start()
        self.scheduler = scheduler(*self.instances, max_queue=100)
        return self

    async def __aexit__(self, *_):
        await self.engine.aclose()
        await self.context.client.aclose()
        for fake in self.fakes:
            await fake.aclose()

    async def start(self):
        """Start fakes and engine; returns the instances."""
        raise NotImplementedError

    def request(self, **more):
        return request(**more)

    def asked(self):
        """Inference requests that instances got, as calls."""
        raise NotImplementedError

    def wire_ids(self):
        """Ids under which they came."""
        raise NotImplementedError

    async def aborted(self):
        """Ids that each instance that has to know was told to end, or saw the connection of closed; once each."""
        raise NotImplementedError

    def over(self):
        """Ids whose work at the instances ended by itself, as far as the engine can know it without an abort."""
        return set()

    async def settled(self):
        """Wait until the engine has nothing more to send for requests that are over."""

    async def refuse(self):
        """Make whoever gets the request first refuse connections."""
        await self.fakes[0].refuse()

    async def say_late(self, wire_id):
        """Let the instances say something for a request that is over."""

    async def stop_at(self, stage):
        if self.script.hold == stage:
            self.reached.set()
            await self.release.wait()

    def open_request_connections(self):
        """Connections that instances see and that belong to a request, idle ones aside."""
        client = self.context.client
        return sum(len(fake.peers) for fake in self.fakes) - self.stands - client.idle_connections

    def text_of(self, call):
        """The answer's words for one request: what it asks to be said, else the script's."""
        content = json.loads(call.body)["messages"][0]["content"]
        return tuple(content.removeprefix("say ")) if content.startswith("say ") else self.script.words


async def break_off(call, fault):
    """Fail a call as a fault says."""
    if fault == "reset":
        call.rst()
    elif fault == "closed":
        call.fin()
    elif fault == "nonsense":
        call.reply(b"this is not JSON")
    else:
        call.reply(b'{"error":{"message":"so says the engine"}}', int(fault), ("Retry-After", "3"))


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


ADAPTERS = (MindieAdapter, HybridAdapter)


def say(text, *, stream=True):
    """A body that asks for these letters, one token each."""
    return chat(f"say {text}", stream=stream)
