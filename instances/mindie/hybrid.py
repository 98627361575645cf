"""Standard inference: one instance does both (hybrid role, or a target that is the instance itself)."""

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from instances.batch import Batch
from instances.faults import Chosen
from instances.ledger import OutOfBlocks
from instances.mindie.ask import Family, Job, Token
from instances.mindie.prefill import ENQUEUE, USED_BEFORE
from instances.mindie.refusal import Refused
from instances.replies import EventStream, reset

if TYPE_CHECKING:
    from instances.mindie.instance import MindieEngine

_STREAM_FAULTS = ("stream_end", "stream_close", "stream_reset")
_BUFFER_LIMIT = 1 << 20


class Standard:
    """One request of an ordinary engine, as a member of the batch."""

    def __init__(self, owner: "Hybrid", family: Family, job: Job, chosen: Chosen) -> None:
        self._owner = owner
        self._family = family
        self.job = job
        self.chosen = chosen
        self.stream: EventStream | None = None
        self.over = asyncio.Event()
        self.struck = ""
        self._last_s = time.monotonic()

    @property
    def gone(self) -> bool:
        """Whether the caller has left a stream."""
        return self.stream is not None and self.stream.pipe.closed

    def step(self) -> bool:
        """Make one token; False when there is nothing more to do."""
        job = self.job
        if self.over.is_set() or self.gone:
            self.over.set()
            return False
        if self.stream is not None and self.stream.pipe.transport.get_write_buffer_size() > _BUFFER_LIMIT:
            return True  # a slow reader of its own stream holds up nobody else
        if self._strikes(job.sent):
            return False
        now_s = time.monotonic()
        token = Token(job.sent, by_prefill=job.sent == len(job.ask.done), took_ms=(now_s - self._last_s) * 1000)
        self._last_s = now_s
        meters = self._owner.meters
        if token.by_prefill:
            meters.prefilled(len(job.ask.wish.prompt), job.prefill_ms / 1000)
        else:
            job.decode_ms.append(token.took_ms)
            meters.decoded(token.took_ms / 1000)
        job.sent += 1
        last = job.is_last(token.index)
        if self.stream is not None:
            self._write(self.stream, token, last=last)
        if last:
            self.over.set()
            meters.ended(len(job.plan), (job.prefill_ms + sum(job.decode_ms)) / 1000)
        return not last

    def _strikes(self, tokens: int) -> bool:
        """Faults that are due when so many tokens exist; True: no more tokens."""
        if self.chosen.at("stall", tokens) is not None:
            return True
        self.struck = next((name for name in _STREAM_FAULTS if self.chosen.at(name, tokens) is not None), "")
        if self.struck:
            self.over.set()
        return bool(self.struck)

    def _write(self, stream: EventStream, token: Token, *, last: bool) -> None:
        if last:
            for body in self._family.last(self.job, token):
                stream.pipe.chunk(body)
        elif self.job.plan.texts[token.index]:
            stream.pipe.chunk(self._family.piece(self.job, token))


class Hybrid:
    """The standard path of an instance."""

    def __init__(self, engine: "MindieEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self.meters = engine.meters
        self.live: dict[str, Standard] = {}
        self.batch = Batch(engine.instance.clockwork, engine.instance.options.max_running, _nothing, lambda: None)

    async def serve(self, request: web.Request, family: Family, job: Job, chosen: Chosen) -> web.StreamResponse:
        """Run one request and answer it in the family's own way."""
        if job.req_id in self.live:
            raise Refused(self._engine.settings.enqueue_status, f"{ENQUEUE} {USED_BEFORE}")
        instance = self._instance
        try:
            instance.ledger.allocate(job.req_id, job.kv_tokens + len(job.plan), "standard inference")
        except OutOfBlocks as full:
            raise Refused(424, f"{ENQUEUE} {full}") from None
        running = Standard(self, family, job, chosen)
        self.live[job.req_id] = running
        try:
            return await self._run(request, family, running)
        finally:
            self.batch.leave(running)
            del self.live[job.req_id]
            instance.ledger.release(job.req_id, "end of inference")

    async def _run(self, request: web.Request, family: Family, running: Standard) -> web.StreamResponse:
        job, chosen = running.job, running.chosen
        prompt = job.ask.wish.prompt
        job.cached_tokens = self._instance.prefix.lookup(prompt)
        wait_s = self._instance.clockwork.prefill_wait_s(len(prompt) - job.cached_tokens, time.monotonic())
        if wait_s:
            await asyncio.sleep(wait_s)
        job.prefill_ms = wait_s * 1000
        if job.stream:
            running.stream = await EventStream.open(request, chosen)
            if running.stream is None:
                return web.Response()
            running.stream.pipe.chunk(family.opening(job))
        if "slow" in chosen:
            self._instance.tasks.spawn(_alone(running), f"{self._instance.name} slow {job.req_id}")
        else:
            self.batch.join(running)
        await self._until_over(request, running)
        if running.stream is None:
            return web.Response(body=family.whole(job), content_type="application/json")
        await running.stream.pipe.drained()
        transport = running.stream.pipe.transport
        if running.struck == "stream_reset":
            reset(transport)
        elif running.struck == "stream_close":
            transport.close()
        return running.stream.response

    async def _until_over(self, request: web.Request, running: Standard) -> None:
        """Wait for the end; a caller that leaves is noticed within a moment, and the request ends with it."""
        while not running.over.is_set():
            try:
                async with asyncio.timeout(0.25):
                    await running.over.wait()
            except TimeoutError:
                if request.transport is None:
                    running.over.set()

    def stop(self, req_id: str) -> bool:
        """Stop a request: its answer ends there; False if it is not known."""
        running = self.live.get(req_id)
        if running is None:
            return False
        running.over.set()
        return True

    def forget(self) -> None:
        """Lose all requests."""
        for running in self.live.values():
            running.over.set()


async def _alone(running: Standard) -> None:
    while not running.over.is_set():
        await asyncio.sleep(running.chosen.number("slow", 1))
        if not running.step():
            return


async def _nothing() -> None:
    return
