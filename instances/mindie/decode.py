"""The decode role: takes handovers, pulls KV from prefill, decodes in batches, reports on `/dresult`."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from instances.answers import kv_digest, wrong_plan
from instances.batch import Batch
from instances.faults import BadFault
from instances.ledger import OutOfBlocks
from instances.mindie import frames
from instances.mindie.ask import Call
from instances.mindie.decoding import Decoding
from instances.mindie.dresult import Dresult
from instances.mindie.families import family_of
from instances.mindie.refusal import Refused

if TYPE_CHECKING:
    from instances.mindie.instance import MindieEngine

_SEEN_KEPT = 10_000
_ACCEPTING = ("decode", "flex")


class Decode:
    """Live requests of a decode instance."""

    def __init__(self, engine: "MindieEngine") -> None:
        self._engine = engine
        self.instance = engine.instance
        self.ledger = engine.instance.ledger
        self.meters = engine.meters
        self.dresult = Dresult(engine.instance, engine.settings.heartbeat_s)
        self.batch = Batch(
            engine.instance.clockwork, engine.instance.options.max_running, self.dresult.room, self.dresult.flush
        )
        self.live: dict[str, Decoding] = {}
        self._seen: deque[str] = deque(maxlen=_SEEN_KEPT)
        self.accepted = self.preempted = self.stopped = self.lost_messages = self.wrong_kv = 0

    # --- the private channel

    async def handover(self, request: web.Request) -> web.Response:
        """`POST /sim/handover`: take a request over from prefill, or refuse it with a reason."""
        given = await request.json()
        reason = self._refusal(given)
        if reason is None:
            try:
                reason = self._accept(given)
            except (Refused, BadFault) as refused:
                reason = str(refused)
        return web.json_response({"accepted": reason is None, "reason": reason})

    def _refusal(self, given: dict[str, Any]) -> str | None:
        if self.instance.starting or self.instance.role not in _ACCEPTING:
            return f"this instance is {self.instance.role}, not decode"
        if given["handover"] in self._seen:
            return "this handover was taken already"
        if given["req_id"] in self.live:
            return "the request id is live here"
        return None

    def _accept(self, given: dict[str, Any]) -> str | None:
        self.accepted += 1
        body = given["body"]
        family = family_of(given["path"], body)
        ask = family.parse(
            Call(given["path"], body, given["recompute"], dmi=True, limit=self.instance.options.max_new_tokens)
        )
        chosen = self.instance.faults.choose(self.accepted, ask.prompt_text)
        if (fault := chosen.get("refuse_handover")) is not None:
            return fault.value or "refused on request"
        job = self._engine.job(given["req_id"], ask)
        job.sent = given["sent"]
        job.prefill_ms, job.cached_tokens = given["prefill_ms"], given["cached"]
        try:
            self.ledger.allocate(job.req_id, job.kv_tokens, "handover accepted")
        except OutOfBlocks as full:
            return str(full)
        self._seen.append(given["handover"])
        decoding = Decoding(self, job, family, chosen)
        self.live[job.req_id] = decoding
        self.instance.tasks.spawn(
            self._pull(decoding, given["prefill"], given["handover"]), f"{self.instance.name} pulls {job.req_id}"
        )
        return None

    async def _pull(self, decoding: Decoding, prefill_url: str, handover: str) -> None:
        """Move the KV over, then join the batch."""
        job = decoding.job
        transfer_s = self.instance.clockwork.transfer_s(job.kv_tokens)
        if transfer_s:
            await asyncio.sleep(transfer_s)
        kv = None
        fault = decoding.chosen.get("pull_failed")
        if fault is None:
            kv = await self._fetch(prefill_url, job.req_id, handover)
        if self.live.get(job.req_id) is not decoding:
            return  # stopped meanwhile
        decoding.bind(self.dresult.current)
        if kv is None:
            reversible = fault is not None and fault.value == "reversibly"
            decoding.fail(frames.PULL_FAILED_REVERSIBLY if reversible else frames.PULL_FAILED)
            self.dresult.flush()
            return
        if kv != kv_digest(job.ask.wish.prompt, self.instance.options.seed):
            self.wrong_kv += 1
            job.plan = wrong_plan(job.plan, job.sent)
        if "slow" in decoding.chosen:
            await self._alone(decoding)
        else:
            self.batch.join(decoding)

    async def _fetch(self, prefill_url: str, req_id: str, handover: str) -> str | None:
        """Prefill's KV for the request, which prefill then releases; None if it has none."""
        try:
            async with self.instance.client.post(
                f"{prefill_url}/sim/release", json={"req_id": req_id, "handover": handover}
            ) as reply:
                answer = await reply.json()
        except (aiohttp.ClientError, TimeoutError):
            return None
        kv = answer.get("kv")
        return kv if isinstance(kv, str) else None

    async def _alone(self, decoding: Decoding) -> None:
        """Decode at a pace of its own."""
        while self.live.get(decoding.job.req_id) is decoding:
            await asyncio.sleep(decoding.chosen.number("slow", 1))
            if self.live.get(decoding.job.req_id) is not decoding or not decoding.step():
                break
            self.dresult.flush()
        self.dresult.flush()

    # --- ends

    def finished(self, decoding: Decoding, why: str) -> None:
        """The request is over: its blocks go back."""
        req_id = decoding.job.req_id
        if self.live.get(req_id) is decoding:
            del self.live[req_id]
            self.ledger.release(req_id, why)

    def stop(self, req_id: str) -> bool:
        """Stop a live request; False if there is none of that id. A few late events may still come."""
        decoding = self.live.get(req_id)
        if decoding is None:
            return False
        self.batch.leave(decoding)
        self.finished(decoding, "stopInfer")
        self.stopped += 1
        late = int(decoding.chosen.number("late_events", 1, self._engine.settings.late_events))
        if late:
            self.instance.tasks.spawn(self._late(decoding, late), f"{self.instance.name} late for {req_id}")
        return True

    async def _late(self, decoding: Decoding, count: int) -> None:
        await asyncio.sleep(0.002)  # after the answer to the stop
        for _ in range(count):
            decoding.late()
        self.dresult.flush()

    def preempt_all(self) -> None:
        """Every request in the batch loses its KV."""
        for decoding in list(self.live.values()):
            self.batch.leave(decoding)
            decoding.preempt()
        self.dresult.flush()

    def go_on(self) -> None:
        """No `stall` holds the requests that are live."""
        for decoding in self.live.values():
            if decoding.go_on():
                self.batch.join(decoding)

    def forget(self) -> None:
        """Lose all requests; nothing is told to anybody."""
        self.live.clear()
        self.batch.clear()

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        current = self.dresult.current
        return {
            "dresult": {"open": current is not None and current.alive, "opened": self.dresult.opened},
            "decoding": list(self.live),
            "batch": {"running": self.batch.running, "waiting": self.batch.waiting},
            "accepted": self.accepted,
            "preempted": self.preempted,
            "stopped": self.stopped,
            "wrong_kv": self.wrong_kv,
            "lost_messages": self.lost_messages,
        }


def require_object(body: object) -> dict[str, Any]:
    """A JSON object, or 422."""
    if not isinstance(body, dict):
        raise Refused(422, "the body must be a JSON object")
    return body
