"""Running requests: header, KV, tokens, end; the same for both engines."""

import asyncio

from aiohttp import web

from instances.batch import Batch
from instances.openai.generation import Call, Generation, Sequence
from instances.openai.meters import Meters
from instances.openai.outlet import DONE, Outlet
from instances.openai.refusal import Refused, answer
from instances.server import Instance

_LOST = "the engine lost the request"


class Serving:
    """All live requests of one instance.

    Args:
        instance: the instance.
        meters: what is counted.
    """

    def __init__(self, instance: Instance, meters: Meters) -> None:
        self._instance = instance
        self._meters = meters
        self.live: set[Generation] = set()
        self.batch = Batch(instance.clockwork, instance.options.max_running, _nothing, lambda: None)

    async def run(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Answer a request. A caller that leaves cancels this, which ends the request and gives its KV back.

        Raises:
            Refused: the request failed, and its answer is not a stream.
        """
        generation = Generation(call, self._meters, self._instance.crash)
        self.live.add(generation)
        self._meters.requests += 1
        reason = "abort"
        try:
            response = await (self._stream if call.job.ask.stream else self._whole)(request, generation)
            reason = "error" if generation.failure is not None else ""
        except Refused:
            reason = "error"
            raise
        else:
            return response
        finally:
            for sequence in generation.sequences:
                self.batch.leave(sequence)
            generation.over.set()
            self.live.discard(generation)
            call.work.ended()
            self._meters.end(call.job, reason)

    async def _produce(self, generation: Generation) -> None:
        await generation.prepare()
        generation.opening()
        slow = "slow" in generation.call.chosen
        for sequence in generation.sequences:
            if slow:
                pace_s = generation.call.chosen.number("slow", 1)
                self._instance.tasks.spawn(_alone(generation, sequence, pace_s), f"{self._instance.name} slow")
            elif not generation.call.work.first_token_ready or sequence.step():
                self.batch.join(sequence)
        await generation.over.wait()
        if generation.failure is not None:
            raise generation.failure
        if not generation.struck:
            await generation.finish()

    async def _whole(self, request: web.Request, generation: Generation) -> web.StreamResponse:  # noqa: ARG002
        await self._produce(generation)
        if "not_json" in generation.call.chosen:
            return web.Response(text="this is not JSON", content_type="application/json")
        return answer(generation.call.writer.whole(generation.call.job))

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        call = generation.call
        outlet = generation.outlet = await Outlet.open(request, call.chosen)
        if outlet is None:
            return web.Response()
        if "empty" in call.chosen:
            return outlet.response
        try:
            await self._produce(generation)
        except Refused as refused:
            generation.failure = refused
            outlet.event(call.writer.error(call.job, refused))
        if not generation.struck:
            if generation.failure is None:
                for value in call.writer.closing(call.job):
                    outlet.event(value)
            if "no_done" not in call.chosen:
                outlet.event(DONE)
        await outlet.end(generation.struck)
        return outlet.response

    def go_on(self) -> None:
        """No `stall` holds the requests that are live."""
        for generation in self.live:
            for sequence in generation.sequences:
                if sequence.go_on():
                    self.batch.join(sequence)

    def forget(self) -> None:
        """Every request fails where it stands."""
        for generation in self.live:
            generation.fail(Refused(500, _LOST))
        self.batch.clear()


async def _alone(generation: Generation, sequence: Sequence, pace_s: float) -> None:
    while not generation.over.is_set():
        await asyncio.sleep(pace_s)
        if not sequence.step():
            return


async def _nothing() -> None:
    return
