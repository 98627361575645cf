"""What every adapter of the engine conformance kit has: scripts of what instances do, and the scheduler around them."""

import asyncio
import json
from dataclasses import dataclass

from engine_world import context, request, scheduler

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
        decode_fault: None, `before` its first output or `after` it; for some engines an HTTP status as text.
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
        pins: prefill keeps the KV until decode has it.
        refusals: statuses with which its instances can refuse a request.
        decode_faults: how their decode can fail.
        retry_after_s: what they say with them of another try.
        native: the engine speaks the client's dialect, so that its bytes are passed on as they are.
    """

    name = ""
    stages = ()
    stands = 0
    native = True
    pins = True
    refusals = ("400", "404", "422", "429")
    decode_faults = ("before", "after")
    retry_after_s = 3

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

    async def mended(self):
        """Wait until instances that a fault has restarted are there again."""

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
