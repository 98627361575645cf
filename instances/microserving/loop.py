"""The engine behind the HTTP server: requests by id, KV pages, and a loop that can die on its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from instances.batch import Batch
from instances.front import Severed
from instances.ledger import OutOfBlocks
from instances.microserving.asks import Ask
from instances.microserving.memory import Pages, Radix
from instances.microserving.metadata import Segments
from instances.microserving.refusal import Refused, failed
from instances.microserving.running import Running
from instances.microserving.settings import Settings
from instances.microserving.stream import Output, Stream
from instances.server import Instance


class Fatal(Exception):
    """An assertion that ends the engine thread (ICHECK)."""


@dataclass(slots=True)
class Reservation:
    """Pages that prep_recv took for a request.

    Attributes:
        end: the KV of the prompt before it comes from elsewhere, but for the first `matched` tokens.
        models: where it is to be written.
        wanted: what must be there; kv: what was written there last.
    """

    ask: Ask
    end: int
    matched: int
    models: tuple[Segments, ...]
    wanted: str
    kv: str = ""
    since_s: float = field(default_factory=time.monotonic)

    @property
    def complete(self) -> bool:
        """Whether the right KV is there."""
        return self.matched == self.end or self.kv == self.wanted


class Loop:
    """One engine.

    Args:
        instance: the instance.
        settings: of the engine.
        pages: its KV pages.
    """

    def __init__(self, instance: Instance, settings: Settings, pages: Pages) -> None:
        self.instance = instance
        self.settings = settings
        self.pages = pages
        self.radix = Radix(instance.options.prefix_blocks)
        self.batch = Batch(instance.clockwork, instance.options.max_running, _nothing, lambda: None)
        self.streams: dict[str, Stream] = {}
        self.reservations: dict[str, Reservation] = {}
        self.running: dict[Stream, Running] = {}
        self.counts: Counter[str] = Counter()
        self.made_tokens = self.prompt_tokens = 0
        self.died_of = ""
        self._heard: set[Stream] = set()

    @property
    def dead(self) -> bool:
        """Whether the loop has died; HTTP goes on."""
        return bool(self.died_of)

    @property
    def most_tokens(self) -> int:
        """Longest sequence."""
        return min(self.settings.max_sequence_length, self.pages.total_blocks * self.pages.block_tokens)

    def die(self, why: str) -> None:
        """The engine thread ends: nothing is answered or freed any more, until the process starts anew."""
        self.died_of = self.died_of or why
        self.batch.clear()

    # --- requests by id

    def submit(self, user: str) -> Stream:
        """Open the stream of a request; `release` must follow.

        Raises:
            Refused: the id is in use. The request that uses it is aborted, and its stream never finishes.
        """
        if user in self.streams:
            self.counts["duplicates"] += 1
            self.abort(self.streams[user], "aborted: duplicate user")
            raise failed(f"the request id {user} exists already")
        stream = self.streams[user] = Stream(user)
        self._heard.add(stream)
        return stream

    def release(self, stream: Stream) -> None:
        """Nobody listens to a stream any more."""
        self._heard.discard(stream)

    def work(self, stream: Stream, doing: Coroutine[Any, Any, None]) -> None:
        """Let the engine work on a request; a dead one never begins."""
        if self.dead:
            doing.close()
        else:
            stream.work = self.instance.tasks.spawn(self._guarded(stream, doing), f"request {stream.user}")

    async def _guarded(self, stream: Stream, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except Fatal as fatal:
            self.die(str(fatal))
        except Refused as refused:
            self.close(stream)
            stream.fail(refused)

    def close(self, stream: Stream) -> None:
        """A request is over: its id is free."""
        if self.streams.get(stream.user) is stream:
            del self.streams[stream.user]

    def abort(self, stream: Stream, why: str) -> None:
        """End a request in the waiting or running queue; a reservation is in neither, and stays (protocol page §8)."""
        if self.streams.get(stream.user) is not stream:
            return
        self.close(stream)
        if self.dead:
            return
        self.counts["aborted"] += 1
        if stream.work is not None:
            stream.work.cancel()
        self._leave(stream, why)

    def _leave(self, stream: Stream, why: str) -> None:
        running = self.running.pop(stream, None)
        if running is not None:
            self.batch.leave(running)
            self.pages.release(running.key, why)

    def reset(self, why: str) -> None:
        """`/debug/reset_engine`: every request and reservation is gone; whoever waits for one goes on waiting."""
        for stream in list(self.streams.values()):
            if stream.work is not None:
                stream.work.cancel()
        self.streams.clear()
        self.running.clear()
        self.batch.clear()
        self.reservations.clear()
        self.pages.clear(why)
        self.radix.clear()

    def restart(self) -> None:
        """A new process: alive, with nothing; whoever waits is cut off."""
        self.reset("restart")
        self.died_of = ""
        for stream in self._heard:
            stream.fail(Severed("the engine is gone"))

    async def sleep(self, seconds: float) -> None:
        """Simulated work, which a dead loop never ends."""
        if seconds:
            await asyncio.sleep(seconds)
        if self.dead:
            await asyncio.Event().wait()

    def metrics(self) -> dict[str, float]:
        """What the engine tells of itself."""
        return {
            "running_requests": len(self.running),
            "waiting_requests": self.pages.waiting,
            "prompt_tokens_sum": self.prompt_tokens,
            "completion_tokens_sum": self.made_tokens,
            "available_pages": self.pages.free_blocks,
            "total_pages": self.pages.total_blocks,
        }

    # --- running requests

    def start(self, running: Running, *, first_token_ready: bool) -> None:
        """Put a request whose KV is there into the batch."""
        chosen = running.ask.chosen
        if "zero_chunks" in chosen:
            self._over(running, "ended without output")
            running.stream.end()
        elif "slow" in chosen:
            pace_s = chosen.number("slow", 1)
            self.instance.tasks.spawn(running.run_slowly(pace_s), f"request {running.ask.user} slow")
        elif not first_token_ready or running.step():
            self.batch.join(running)

    def grow(self, running: Running) -> bool:
        """Pages for the next tokens; while there are none the newest request loses its own. False: it was this one."""
        while True:
            try:
                self.pages.grow(running.key, running.kv_tokens + len(running.sequences))
            except OutOfBlocks:
                newest = next(reversed(self.running.values()))
                if self.settings.disagg:
                    self.preempt(newest)
                else:
                    self._put_back(newest)
                if newest is running:
                    return False
            else:
                return True

    def _put_back(self, running: Running) -> None:
        """Without disaggregation a preempted request waits, is computed again and goes on."""
        self.counts["put_back"] += 1
        self.running.pop(running.stream)
        self.batch.leave(running)
        self.pages.release(running.key, "preempted, to be computed again")
        self.work(running.stream, self._again(running))

    async def _again(self, running: Running) -> None:
        await self.pages.wait_room(running.key, running.kv_tokens + len(running.sequences), "computed again")
        self.running[running.stream] = running
        await self.sleep(self.instance.clockwork.prefill_wait_s(running.kv_tokens, time.monotonic()))
        self.batch.join(running)

    def preempt(self, running: Running) -> None:
        """End a request for good, with the finish reason `preempt`; all of its state is gone."""
        self.counts["preempted"] += 1
        self._over(running, "preempted")
        running.preempt()

    def finish(self, running: Running) -> None:
        """A request has all of its tokens."""
        self._over(running, "end of generation")
        if not running.lost:
            first = running.sequences[0]
            self.radix.insert((*running.ask.prompt, *first.plan.tokens[: first.sent]))
        running.stream.push(Output(usage=running.final_usage()))
        running.stream.end()

    def _over(self, running: Running, why: str) -> None:
        self.close(running.stream)
        self._leave(running.stream, why)
        self.made_tokens += running.made
        self.prompt_tokens += len(running.ask.prompt)


async def _nothing() -> None:
    return
