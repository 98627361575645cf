"""The prefill role: first token, handover to decode, envelope (MindIE protocol page §4)."""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from instances.answers import kv_digest
from instances.faults import Chosen
from instances.ledger import OutOfBlocks
from instances.mindie.ask import Family, Job, Token
from instances.mindie.control_headers import Control
from instances.mindie.refusal import Refused

if TYPE_CHECKING:
    from instances.mindie.instance import MindieEngine

ENQUEUE = "Failed to enqueue inferRequest."
USED_BEFORE = "Runtime request has been used before."
SEND_FAILED = "[P Node] Send D request failed:"


@dataclass(slots=True)
class Held:
    """A request that this instance knows. `handover`: what decode must name to get the KV."""

    job: Job
    chosen: Chosen
    handover: str
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Prefill:
    """Requests of a prefill instance, from their arrival until decode has pulled the KV."""

    def __init__(self, engine: "MindieEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self.live: dict[str, Held] = {}
        self._lingering: set[str] = set()
        self._numbers = itertools.count(1)
        self.refused_duplicates = 0

    async def serve(self, control: Control, family: Family, job: Job, chosen: Chosen) -> web.Response:
        """Run one request and answer the envelope, or an error."""
        req_id = job.req_id
        if req_id in self.live or req_id in self._lingering:
            self.refused_duplicates += 1
            raise Refused(self._engine.settings.enqueue_status, f"{ENQUEUE} {USED_BEFORE}")
        if "enqueue_refused" in chosen:
            raise Refused(424, ENQUEUE)
        instance = self._instance
        try:
            instance.ledger.allocate(req_id, job.kv_tokens, "prefill")
        except OutOfBlocks as full:
            raise Refused(424, f"{ENQUEUE} {full}") from None
        held = Held(job, chosen, f"{instance.name}:{time.time_ns()}:{next(self._numbers)}")
        self.live[req_id] = held
        await self._compute(held)
        token = Token(job.sent, by_prefill=True, took_ms=job.prefill_ms)
        job.sent += 1
        self._engine.meters.prefilled(len(job.ask.wish.prompt), job.prefill_ms / 1000)
        last = job.is_last(token.index)
        if last:
            self._forget(held, "answered by prefill alone")
            self._engine.meters.ended(len(job.plan), job.prefill_ms / 1000)
        else:
            await self._hand_over(control, held)
            if "reply_delay" in chosen:
                await asyncio.sleep(chosen.number("reply_delay"))
            if "fail_after_accept" in chosen:
                raise Refused(500, "Engine callback timeout.")
        return _envelope(family, job, token, chosen, last=last)

    async def _compute(self, held: Held) -> None:
        job, instance = held.job, self._instance
        prompt = (*job.ask.wish.prompt, *job.ask.done)
        job.cached_tokens = instance.prefix.lookup(prompt)
        began_s = time.monotonic()
        wait_s = instance.clockwork.prefill_wait_s(len(prompt) - job.cached_tokens, began_s)
        if wait_s:
            try:
                async with asyncio.timeout(wait_s):
                    await held.stopped.wait()
            except TimeoutError:
                pass
        job.prefill_ms = (time.monotonic() - began_s) * 1000
        if held.stopped.is_set():
            raise Refused(424, "the request was stopped")

    async def _hand_over(self, control: Control, held: Held) -> None:
        """Give the request to decode; returns when decode has accepted."""
        job, instance = held.job, self._instance
        instance.ledger.pin(job.req_id, "until decode has pulled it")
        port = control.target_port or instance.port
        host = f"[{control.target_host}]" if ":" in control.target_host else control.target_host
        record = {
            "handover": held.handover,
            "req_id": job.req_id,
            "path": job.ask.path,
            "body": dict(job.ask.body),
            "recompute": control.recompute,
            "sent": job.sent,
            "prefill": instance.url,
            "prefill_ms": job.prefill_ms,
            "cached": job.cached_tokens,
        }
        try:
            async with instance.client.post(f"http://{host}:{port}/sim/handover", json=record) as reply:
                answer = await reply.json(content_type=None) if reply.status == 200 else {"reason": reply.reason}
                reason = None if answer.get("accepted") else str(answer.get("reason"))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
        if reason is not None:
            self._forget(held, "handover failed")
            raise Refused(500, f"{SEND_FAILED}{reason}")

    async def release(self, request: web.Request) -> web.Response:
        """`POST /sim/release`: decode has the KV; it is released here. 404 if it is not here (any more)."""
        given = await request.json()
        held = self.live.get(given["req_id"])
        if held is None or held.handover != given["handover"]:
            return web.json_response({"error": "no such KV"}, status=404)
        self._forget(held, "pulled by decode")
        if self._engine.settings.linger_s > 0:
            self._instance.tasks.spawn(self._linger(held.job.req_id), f"{self._instance.name} lingers")
        kv = kv_digest(held.job.ask.wish.prompt, self._instance.options.seed)
        return web.json_response({"kv": kv[::-1] if "wrong_kv" in held.chosen else kv})

    async def _linger(self, req_id: str) -> None:
        self._lingering.add(req_id)
        try:
            await asyncio.sleep(self._engine.settings.linger_s)
        finally:
            self._lingering.discard(req_id)

    def _forget(self, held: Held, why: str) -> None:
        req_id = held.job.req_id
        if self.live.get(req_id) is held:
            del self.live[req_id]
            self._instance.ledger.release(req_id, why)

    def stop(self, req_id: str) -> bool:
        """Stop a request: its KV is released; False if it is not known."""
        held = self.live.get(req_id)
        if held is None:
            return False
        held.stopped.set()
        self._forget(held, "stopInfer")
        return True

    def forget(self) -> None:
        """Lose all requests."""
        for held in self.live.values():
            held.stopped.set()
        self.live.clear()
        self._lingering.clear()

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "prefilling": list(self.live),
            "lingering": len(self._lingering),
            "refused_duplicates": self.refused_duplicates,
        }


def _output(family: Family, job: Job, token: Token, *, last: bool) -> str:
    """What goes into `output`: pieces joined for a stream, the whole answer otherwise."""
    if not job.stream:
        return family.whole(job).decode()
    opening = b"" if job.ask.done else family.opening(job)
    if last:
        return (opening + b"".join(family.last(job, token))).decode()
    piece = family.piece(job, token) if job.plan.texts[token.index] else b""
    return (opening + piece).decode()


def _envelope(family: Family, job: Job, token: Token, chosen: Chosen, *, last: bool) -> web.Response:
    envelope: dict[str, Any] = {"reqId": job.req_id, "isStream": job.stream}
    if job.stream or last:
        envelope["isLastResp"] = last
        envelope["output"] = _output(family, job, token, last=last)
    if "wrong_req_id" in chosen:
        envelope["reqId"] = str(int(job.req_id, 16) + 1)
    if "empty_output" in chosen:
        envelope["output"] = ""
    for fault, key in (("no_output", "output"), ("no_is_last", "isLastResp")):
        if fault in chosen:
            envelope.pop(key, None)
    text = json.dumps(envelope, separators=(",", ":"), ensure_ascii=False)
    body = b"this is not JSON" if "not_json" in chosen else text.encode("utf-8", "replace")
    # the real engine says so and keeps the connection open all the same (MindIE protocol page §4.2)
    return web.Response(body=body, content_type="application/json", headers={"Connection": "close"})
