"""A MindIE engine between a fake prefill and a fake decode instance."""

import asyncio

from engine_world import GUARD_S, Out, Placed, Watcher, context, instance, until
from fake_instances import FakeDecode, FakeInstance, envelope

from coordinator.engines.mindie import MindieEngine


def text(word, finish="null"):
    return f'data: {{"choices":[{{"index":0,"delta":{{"content":"{word}"}},"finish_reason":{finish}}}]}}\n\n'


LAST = text("z", '"stop"').encode()
DONE = b"data: [DONE]\n\n"


class World:
    """`serve` starts a request; tests script what the fakes answer."""

    def __init__(self, loop_settings=None):
        self.prefill = FakeInstance()
        self.decode = FakeDecode()
        self.context = context()
        self.engine = MindieEngine(self.context)
        self.watcher = Watcher()
        self.tasks = []

    async def __aenter__(self):
        await self.prefill.listen()
        await self.decode.listen()
        self.p0 = instance("p0", self.prefill.address)
        self.d0 = instance("d0", self.decode.address)
        self.prefill.infer = self.answer
        self.attached = self.d0
        self.engine.attach(self.d0, self.watcher)
        await until(lambda: self.watcher.up)
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.engine.aclose()
        await self.context.client.aclose()
        await self.prefill.aclose()
        await self.decode.aclose()

    async def answer(self, call):
        """What prefill does by default: its token, and more to come."""
        stream = b'"stream":true' in call.body
        call.reply(
            envelope(call.wire_id, text("A"), stream=stream, last=False)
            if stream
            else envelope(call.wire_id, stream=False)
        )

    def serve(self, asked, *, decode=None, out=None):
        """Start a request; returns its task, sink and placement."""
        out, placement = out or Out(), Placed(self.p0, decode or self.d0)
        task = asyncio.create_task(self.engine.serve(asked, placement, out), name="serve")
        self.tasks.append(task)
        return task, out, placement

    async def sent(self, number=1):
        """The request as prefill got it; `number` counts them."""
        await until(lambda: len(self.prefill.calls) >= number)
        return self.prefill.calls[number - 1]

    async def stopped(self):
        """Stops that came in at prefill and decode once none is under way."""
        await until(lambda: not self.engine._stops._tasks)
        return dict(self.prefill.stops), dict(self.decode.stops)


async def result(task):
    """What became of it: the outcome, or the error."""
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    return task.exception() or task.result()
