"""What the engine does for each kind of request (microserving protocol page §3)."""

import asyncio
import itertools
import time

from instances.answers import kv_digest
from instances.microserving import metadata
from instances.microserving.asks import Ask
from instances.microserving.loop import Fatal, Loop, Reservation
from instances.microserving.memory import PAGE_TOKENS
from instances.microserving.metadata import Segments
from instances.microserving.running import Running, usage_of
from instances.microserving.stream import Delta, Output, Stream
from instances.microserving.world import World, Write


class Worker:
    """The engine's work, and the KV that arrives without its doing.

    Args:
        loop: the engine.

    Attributes:
        went_on: set: no `send_late` holds a send any more.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.went_on = asyncio.Event()
        self._instance = loop.instance
        self.world = World(loop.settings.world, self.deliver, loop.instance.tasks)
        self.first_rank = -1
        self._slots = metadata.Slots(PAGE_TOKENS)
        self._numbers = itertools.count(1)

    async def do(self, stream: Stream, ask: Ask, models: tuple[Segments, ...]) -> None:
        """Whatever the request is; `models`: where remote_send shall write to."""
        loop = self._loop
        if len(ask.prompt) >= loop.settings.max_sequence_length:
            loop.close(stream)
            stream.push(Output(tuple(Delta("", (), "length") for _ in range(ask.n))))
            stream.push(Output(usage=usage_of(0, 0)))
            stream.end()
            return
        kind = ask.disagg.kind if ask.disagg is not None else None
        if ask.special:
            loop.close(stream)
            stream.push(Output(usage=usage_of(0, 0, loop.metrics())))
            stream.end()
        elif kind is None:
            await self.complete(stream, ask)
        elif not loop.settings.disagg:
            await asyncio.Event().wait()  # no action of the engine consumes it (protocol page §7)
        elif kind == "prepare_receive":
            await self.prepare(stream, ask)
        elif kind == "remote_send":
            await self.send(stream, ask, models)
        else:
            await self.generate(stream, ask)

    # --- decode: reservations

    async def prepare(self, stream: Stream, ask: Ask) -> None:
        """prep_recv: reserve pages for the prompt up to the window's end, and tell where they are."""
        loop, window = self._loop, ask.disagg
        length = len(ask.prompt)
        end = metadata.resolve((window and window.kv_window_end) or 0, length)
        if not 0 <= end < length:
            raise Fatal(f"prepare_receive: end {end} of {length}")
        await loop.sleep(ask.chosen.number("prep_late"))
        matched = loop.radix.match(ask.prompt[:end])
        known = ask.user in loop.reservations
        if not known:
            await loop.pages.wait_room(ask.user, end - matched, "prep_recv", loop.settings.reserve_pages)
            await loop.sleep(0)
        models = tuple(
            self._slots.take(end - matched, loop.settings.segments) for _ in range(1 + loop.settings.draft_models)
        )
        if known:
            # the old state stays, nobody keeps the new one (protocol page §7)
            loop.counts["reused_ids"] += 1
        else:
            wanted = self._kv(ask, matched, end)
            loop.reservations[ask.user] = Reservation(ask, end, matched, models, wanted)
            loop.pages.pin(ask.user, "reserved until start_generate")
        loop.close(stream)
        told = {"prefix_matched_length": matched, "kv_append_metadata": metadata.encode(models)}
        stream.push(Output(usage=usage_of(0, 0, told)))
        stream.end()

    def _kv(self, ask: Ask, begin: int, end: int, *, wrong: bool = False) -> str:
        """Stands for the KV of a window."""
        kv = kv_digest(ask.prompt[:end], self._instance.options.seed)
        return f"{kv[::-1] if wrong else kv}:{begin}:{end}"

    def deliver(self, rank: int, write: Write) -> bool:
        """A write to one of the instance's ranks; it lands where it says, whoever has that place."""
        models = tuple(tuple(tuple(segment) for segment in model) for model in write["models"])
        found = [r for r in self._loop.reservations.values() if r.models == models and rank == self.first_rank]
        for reservation in found:
            reservation.kv = write["kv"]
        self._loop.counts["writes_received" if found else "writes_astray"] += 1
        return bool(found)

    # --- prefill

    async def send(self, stream: Stream, ask: Ask, models: tuple[Segments, ...]) -> None:
        """remote_send: compute the window and write it to a rank of another engine."""
        loop, window = self._loop, ask.disagg
        assert window is not None
        length, begin = len(ask.prompt), window.kv_window_begin or 0
        end = metadata.resolve(window.kv_window_end or 0, length)
        lengths = [metadata.length_of(segments) for segments in models]
        if not 0 <= begin < end < length:
            raise Fatal(f"remote_send: {begin} to {end} of {length}")
        if lengths != [end - begin] * (1 + loop.settings.draft_models):
            raise Fatal(f"remote_send: addresses of {lengths} tokens for {begin} to {end}")
        if "send_die" in ask.chosen:
            raise Fatal("fault")
        key = await self._room(ask, end, "remote_send")
        try:
            cached = loop.radix.match(ask.prompt[:end])
            clockwork = self._instance.clockwork
            await loop.sleep(clockwork.prefill_wait_s(end - cached, time.monotonic()))
            await loop.sleep(clockwork.transfer_s(end - begin))
            if "send_late" in ask.chosen:
                await self._be_late(ask.chosen.number("send_late"))
            if "send_nothing" in ask.chosen:
                loop.counts["not_sent"] += 1
            else:
                kv = self._kv(ask, begin, end, wrong="wrong_kv" in ask.chosen)
                outcome = await self.world.write(window.dst_group_offset or 0, {"models": models, "kv": kv})
                loop.counts[f"sent_{outcome}"] += 1
                loop.prompt_tokens += end - begin
            loop.radix.insert(ask.prompt[:end])
        finally:
            if not loop.dead:
                loop.pages.release(key, "sent")
        loop.close(stream)
        stream.end()

    async def _be_late(self, seconds: float) -> None:
        """Wait so long, or until told to go on."""
        try:
            async with asyncio.timeout(seconds):
                await self.went_on.wait()
        except TimeoutError:
            pass
        await self._loop.sleep(0)  # a dead loop sends nothing

    async def _room(self, ask: Ask, kv_tokens: int, why: str) -> str:
        """Wait for pages; gives the name under which they are held."""
        key = f"{ask.user} #{next(self._numbers)}" if self._loop.pages.holds(ask.user) else ask.user
        await self._loop.pages.wait_room(key, kv_tokens, why)
        await self._loop.sleep(0)
        return key

    # --- generation

    async def generate(self, stream: Stream, ask: Ask) -> None:
        """start_generate: prefill from the window's begin on, then decode, with what prep_recv was asked for."""
        loop = self._loop
        reservation = loop.reservations.get(ask.user)
        if reservation is None:
            raise Fatal("start_generation without prepare_receive")
        asked, begin = reservation.ask, (ask.disagg and ask.disagg.kv_window_begin) or 0
        length = len(asked.prompt)
        begin = metadata.resolve(begin, length)
        if not 0 <= begin < length:
            raise Fatal(f"start_generation: begin {begin} of {length}")
        del loop.reservations[ask.user]
        loop.pages.resume(ask.user, "generation")
        lost = not reservation.complete or begin != reservation.end
        loop.counts["wrong_kv"] += lost
        running = Running(loop, stream, asked, ask.user, lost=lost)
        running.base_tokens = length - reservation.matched
        loop.running[stream] = running
        # one token that is left is taken for the first sampled one, and needs no prefill
        fast = length - begin == 1 and asked.n == 1
        if not fast:
            await loop.sleep(self._instance.clockwork.prefill_wait_s(length - begin, time.monotonic()))
        loop.start(running, first_token_ready=not fast)

    async def complete(self, stream: Stream, ask: Ask) -> None:
        """An ordinary request."""
        loop, length = self._loop, len(ask.prompt)
        key = await self._room(ask, length, "completion")
        cached = min(loop.radix.match(ask.prompt), length - 1)
        running = Running(loop, stream, ask, key, lost=False)
        loop.running[stream] = running
        await loop.sleep(self._instance.clockwork.prefill_wait_s(length - cached, time.monotonic()))
        loop.start(running, first_token_ready=True)
