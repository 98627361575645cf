"""Where the KV of a request comes from and where it goes: computed here, kept for decode, read from prefill."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from instances.answers import kv_digest, wrong_plan
from instances.faults import Chosen
from instances.openai.ask import Choice, Job
from instances.openai.computing import Computing
from instances.openai.refusal import Refused

if TYPE_CHECKING:
    from instances.vllm.instance import VllmEngine

_KEPT_NOTHING = ("no_params", "null_params", "empty_params")


class Local(Computing):
    """KV is computed here and given back at the end: an ordinary engine."""

    kind = "local"
    first_token_ready = True
    engine: "VllmEngine"

    def __init__(self, engine: "VllmEngine", job: Job) -> None:
        self.engine = engine
        self.instance = engine.instance
        self.job = job
        self._pinned: set[str] = set()

    async def finish(self) -> None:
        """No params."""
        self.job.extra["kv_transfer_params"] = None

    def ended(self) -> None:
        """The blocks go back, but for those that wait for a peer."""
        for choice in self.job.choices:
            if choice.key not in self._pinned:
                self.instance.ledger.release(choice.key, "end of request")

    def note(self) -> str:
        """What happened, for the record."""
        return f"{self.kind}: {sum(choice.sent for choice in self.job.choices)} tokens"


class Prefilling(Local):
    """A request with `do_remote_decode`: its KV is kept for a decode instance."""

    kind = "prefill"

    def __init__(self, engine: "VllmEngine", job: Job, request_id: str, chosen: Chosen) -> None:
        super().__init__(engine, job)
        self._request_id = request_id
        self._chosen = chosen

    async def finish(self) -> None:
        """Keep the KV; the params of the first sequence stand in the answer, further ones nobody is told of."""
        chosen, extra = self._chosen, self.job.extra
        if "finish_stop" in chosen:
            for choice in self.job.choices:
                choice.finish = "stop"
        told: list[dict[str, Any] | None] = [self._keep(choice) for choice in self.job.choices]
        extra["kv_transfer_params"] = told[0]
        if "no_params" in chosen:
            del extra["kv_transfer_params"]
        elif "empty_params" in chosen:
            extra["kv_transfer_params"] = {}
        elif "stale_params" in chosen and told[0] is not None:
            extra["kv_transfer_params"] = {**told[0], "remote_engine_id": "00000000-dead-4000-8000-000000000000"}

    def _keep(self, choice: Choice) -> dict[str, Any] | None:
        """Params, or None where nothing is kept."""
        settings, count = self.engine.settings, len(choice.prompt.tokens)
        block = self.instance.ledger.block_tokens
        all_cached = 0 < choice.cached_tokens == min(count // block * block, count - 1)
        if any(name in self._chosen for name in _KEPT_NOTHING) or count < settings.min_kv_tokens:
            return None
        if all_cached and not settings.params_on_hit:
            return None
        self._pinned.add(choice.key)
        return self.engine.handoffs.offer(choice, self._request_id, wrong="wrong_kv" in self._chosen)

    def note(self) -> str:
        """What happened, for the record."""
        kept = "params given" if self.job.extra.get("kv_transfer_params") else "no params"
        return f"{super().note()}, {kept}"


class Reading(Local):
    """A request with `do_remote_prefill`: its KV is read from prefill, for each sequence anew."""

    kind = "decode"
    first_token_ready = False  # the last prompt token is computed again to get it

    def __init__(self, engine: "VllmEngine", job: Job, params: dict[str, Any], request_id: str, chosen: Chosen) -> None:
        super().__init__(engine, job)
        self._params = params
        self._request_id = request_id
        self._chosen = chosen
        self._reason = ""

    async def prepare(self) -> None:
        """Take blocks and read; kv_load_failure_policy decides what happens without the KV."""
        for choice in self.job.choices:
            await self.take_blocks(choice)
            kv, self._reason = await self._read(choice)
            if self._reason:
                await self._without_kv(choice)
            elif kv != kv_digest(choice.prompt.tokens, self.instance.options.seed):
                self.engine.wrong_kv += 1
                choice.plan = wrong_plan(choice.plan, 0)
                choice.finish = choice.plan.finish

    async def _without_kv(self, choice: Choice) -> None:
        self.engine.load_failures[self._reason] += 1
        if self.engine.settings.kv_load_failure_policy == "fail":
            raise Refused(500, "Internal server error")
        self.engine.recomputed_locally += 1
        await self.compute(choice)

    async def _read(self, choice: Choice) -> tuple[str, str]:
        """(the KV, the reason why there is none).

        Prefill hears of it in any case, if the caller leaves too (vLLM protocol page §1.5); only a transfer that
        fails leaves the KV there, until its lease ends.
        """
        if "transfer_failed" in self._chosen:
            return "", "transfer failed"
        began_s = time.monotonic()
        transfer_s = self.instance.clockwork.transfer_s(len(choice.prompt.tokens))
        try:
            status, got = await self._call("open", request_id=self._request_id, transfer_s=transfer_s)
            if status != 200:
                return "", str(got.get("reason") or "unreachable")
            if transfer_s:
                await asyncio.sleep(transfer_s)
            status, gone = await self._call("close", read=True)
            if status != 200:
                return "", str(gone.get("reason") or "unreachable")
        except asyncio.CancelledError:
            self.instance.tasks.spawn(self._call("close", read=False), f"{self.instance.name} gives KV up")
            raise
        choice.cached_tokens = got["tokens"]
        self.engine.transferred(choice, time.monotonic() - began_s)
        return str(got["kv"]), ""

    async def _call(self, name: str, **more: Any) -> tuple[int, dict[str, Any]]:
        """A private call to prefill's side channel, which the params name."""
        host, port = self._params.get("remote_host"), self._params.get("remote_port")
        shown = f"[{host}]" if ":" in str(host) else host
        try:
            async with self.instance.client.post(
                f"http://{shown}:{port}/sim/kv/{name}", json={"params": self._params, **more}
            ) as reply:
                return reply.status, await reply.json(content_type=None) or {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0, {}

    def note(self) -> str:
        """What happened, for the record."""
        return f"{super().note()}, " + (f"no KV: {self._reason}" if self._reason else "KV read")
