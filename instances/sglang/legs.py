"""What the legs of a request do before and after their tokens: alone, on prefill, on decode."""

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp

from instances.answers import Plan, kv_digest, wrong_plan
from instances.faults import Chosen
from instances.openai.ask import Choice, Job
from instances.openai.computing import Computing
from instances.openai.refusal import Refused
from instances.sglang.bootstrap import Meeting, Ranks
from instances.sglang.refusal import ABORTED
from instances.sglang.rooms import Room

if TYPE_CHECKING:
    from instances.sglang.instance import SglangEngine


class Alone(Computing):
    """An ordinary engine: KV is computed here and given back at the end."""

    kind = "alone"
    # the first token comes out of the prefill, on decode with its KV
    first_token_ready = True
    engine: "SglangEngine"

    def __init__(self, engine: "SglangEngine", job: Job, chosen: Chosen) -> None:
        self.engine = engine
        self.instance = engine.instance
        self.job = job
        self.chosen = chosen

    async def finish(self) -> None:
        """Nothing more."""

    def ended(self) -> None:
        """All blocks go back."""
        for choice in self.job.choices:
            self.instance.ledger.release(choice.key, "end of request")

    def note(self) -> str:
        """What happened, for the record."""
        return f"{self.kind}: {sum(choice.sent for choice in self.job.choices)} tokens"


class _Leg(Alone):
    """One of two legs, which meet in a room for each sequence."""

    def __init__(self, engine: "SglangEngine", job: Job, meetings: list[Meeting], ranks: Ranks, chosen: Chosen) -> None:
        super().__init__(engine, job, chosen)
        self.meetings = meetings
        self.ranks = ranks

    async def prepare(self) -> None:
        """Every sequence meets its other leg; raises Refused as soon as one does not."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice, meeting in zip(self.job.choices, self.meetings, strict=True):
                    group.create_task(self.meet(choice, meeting), name=f"{self.instance.name} room {meeting.room}")
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def meet(self, choice: Choice, meeting: Meeting) -> None:
        """Everything up to the end of the transfer; raises Refused."""
        raise NotImplementedError

    def duplicate(self, meeting: Meeting) -> Refused:
        """A room that is live was opened again: refused, or the instance dies."""
        self.engine.duplicate_rooms += 1
        if self.engine.settings.duplicate_room == "crash":
            self.instance.crash()
        return Refused(400, f"bootstrap_room {meeting.room} is in use", "bootstrap_room")


class PrefillLeg(_Leg):
    """Waits for decode, computes, transfers, and answers with one token."""

    kind = "prefill"

    def __init__(self, engine: "SglangEngine", job: Job, meetings: list[Meeting], ranks: Ranks, chosen: Chosen) -> None:
        super().__init__(engine, job, meetings, ranks, chosen)
        for choice in job.choices:
            choice.plan = Plan(choice.plan.tokens[:1], choice.plan.texts[:1], "length")
            choice.finish = "length"

    async def meet(self, choice: Choice, meeting: Meeting) -> None:
        """Open the room; whatever happens afterwards, decode is told."""
        rooms = self.engine.rooms
        room = rooms.enter((rooms.rank(meeting.room, self.ranks.own), meeting.room))
        if room is None:
            raise self.duplicate(meeting)
        outcome: dict[str, Any] = {"error": ABORTED}
        try:
            await self.take_blocks(choice)
            await self._within(room.decode, self.engine.settings.bootstrap_timeout_s)
            await self.compute(choice)
            outcome = await self._transfer(choice, room)
        except Refused as refused:
            outcome = {"error": refused.text}
            raise
        finally:
            rooms.leave(room, outcome)
        self.instance.ledger.release(choice.key, "transferred")

    async def _within(self, event: asyncio.Event, limit_s: float) -> None:
        """Wait for the other leg; alone, a leg times out."""
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            self.engine.timeouts += 1
            raise Refused(500, ABORTED) from None

    async def _transfer(self, choice: Choice, room: Room) -> dict[str, Any]:
        """The KV; if decode has left, nobody takes it, and the time runs out."""
        if (fault := self.chosen.get("prefill_error")) is not None:
            raise Refused(500, fault.value or "Prefill failed.")
        transfer_s = self.instance.clockwork.transfer_s(len(choice.prompt.tokens))
        if transfer_s:
            await asyncio.sleep(transfer_s)
        if "prefill_stall" in self.chosen or not room.decode.is_set():
            await self._within(asyncio.Event(), self.engine.settings.waiting_timeout_s)
        kv = kv_digest(choice.prompt.tokens, self.instance.options.seed)
        return {"kv": kv[::-1] if "wrong_kv" in self.chosen else kv, "cached": choice.cached_tokens}

    async def finish(self) -> None:
        """Answer late, or fail late: decode has what it needs by then."""
        for name in ("late_reply", "late_error"):
            if name in self.chosen:
                await asyncio.sleep(self.chosen.number(name))
        if "late_error" in self.chosen:
            raise Refused(500, "Prefill failed.")


class DecodeLeg(_Leg):
    """Waits for the KV, then decodes."""

    kind = "decode"

    async def meet(self, choice: Choice, meeting: Meeting) -> None:
        """Join the room at prefill's bootstrap server and wait for the end of the transfer."""
        key = (meeting.host, meeting.port, meeting.room)
        if key in self.engine.joined:
            raise self.duplicate(meeting)
        self.engine.joined.add(key)
        try:
            await self.take_blocks(choice)
            told = await self._join(meeting)
        finally:
            self.engine.joined.discard(key)
        if "transfer_failed" in self.chosen:
            raise Refused(500, f"Decode transfer failed for bootstrap_room {meeting.room}.")
        if "error" in told:
            if "garbage" not in self.chosen:
                self.engine.transfers_failed += 1
                raise Refused(500, str(told["error"]))
            told = {"kv": "garbage", "cached": 0}
        if told["kv"] != kv_digest(choice.prompt.tokens, self.instance.options.seed):
            self.engine.wrong_kv += 1
            choice.plan = wrong_plan(choice.plan, 0)
            choice.finish = choice.plan.finish
        choice.cached_tokens = told["cached"]
        self.engine.meters.transferred(choice)

    async def _join(self, meeting: Meeting) -> dict[str, Any]:
        settings = self.engine.settings
        host = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
        asked = {
            "room": meeting.room,
            "rank": self.ranks.prefill,
            "bootstrap_timeout_s": settings.bootstrap_timeout_s,
            "waiting_timeout_s": settings.waiting_timeout_s,
        }
        try:
            async with self.instance.client.post(
                f"http://{host}:{meeting.port}/sim/room/join",
                json=asked,
                timeout=aiohttp.ClientTimeout(total=None, connect=5),
            ) as reply:
                told: dict[str, Any] = await reply.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {"error": f"The bootstrap server {meeting.host}:{meeting.port} cannot be reached."}
        return told if "kv" in told or "error" in told else {"error": "This is no bootstrap server."}
