"""KV between prefill and decode, by private calls in place of the NPU link, and who is linked with whom."""

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from instances.answers import kv_digest
from instances.xllm.proto.engine_pb2 import ClusterInfos, InstanceClusterInfo
from instances.xllm.proto.service_pb2 import InstanceMetaInfo

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine
    from instances.xllm.job import Job
    from instances.xllm.prefill import Held

Described = InstanceMetaInfo | InstanceClusterInfo | ClusterInfos


def identity(described: Described) -> dict[str, Any]:
    """What a link is made with."""
    return {
        "cluster_ids": list(described.cluster_ids),
        "addrs": list(described.addrs),
        "ports": list(described.ports),
        "dp_size": described.dp_size,
    }


def topology(described: Described) -> tuple[int, int]:
    """(dp, tp); raises ValueError for what cannot be one (xLLM protocol page §9)."""
    count = len(described.cluster_ids)
    if described.dp_size <= 0:
        raise ValueError("dp_size must be greater than 0")
    if not count:
        raise ValueError("cluster_ids must not be empty")
    if count % described.dp_size:
        raise ValueError("cluster_ids.size() must be divisible by dp_size")
    return described.dp_size, count // described.dp_size


class Links:
    """Peers that this instance is linked with."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._peers: dict[str, dict[str, Any]] = {}
        self.asked = self.implicit = self.failed = 0

    def __contains__(self, name: object) -> bool:
        return name in self._peers

    def names(self) -> list[str]:
        """Who is linked."""
        return list(self._peers)

    def clear(self) -> None:
        """Forget all links."""
        self._peers.clear()

    def peer(self, name: str) -> dict[str, Any] | None:
        """What a peer was linked with."""
        return self._peers.get(name)

    def link(self, name: str, described: Described) -> bool:
        """Link with a peer; False if its topology does not go with ours."""
        try:
            fits = topology(described) == (self._engine.settings.dp_size, self._engine.settings.tp_size)
        except ValueError as wrong:
            self._engine.note(f"Link instance failed, instance name : {name}: {wrong}")
            fits = False
        if fits and name:
            self._peers[name] = identity(described)
            return True
        self.failed += 1
        return False

    def unlink(self, name: str) -> bool:
        """Drop a link; False if there is none."""
        return self._peers.pop(name, None) is not None


class KvTransfer:
    """The KV calls of one instance, both ends."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance
        self.pushed = self.pulled = self.failed = 0

    # --- prefill

    async def push(self, held: "Held") -> None:
        """Write the KV to decode's blocks; a failure is noted, nobody is told."""
        transfer_s = self._instance.clockwork.transfer_s(len(held.ask.tokens))
        if transfer_s:
            await asyncio.sleep(transfer_s)
        if "kv_lost" in held.chosen:
            return
        given = {
            "prefill": self._engine.name,
            "req_id": held.ask.req_id,
            "block_ids": held.decode_blocks,
            "kv": self._kv(held),
            "target": identity(held.decode),
        }
        reason, _ = await self._call(held.decode.name, "push", given)
        if reason:
            self._failed(held.ask.req_id, reason)
        else:
            self.pushed += 1

    def _kv(self, held: "Held") -> str:
        kv = kv_digest(held.ask.tokens, self._instance.options.seed)
        return kv[::-1] if "wrong_kv" in held.chosen else kv

    async def pull_call(self, request: web.Request) -> web.Response:
        """`POST /sim/kv/pull`: decode reads the KV of a request."""
        given = await request.json()
        held = self._engine.prefill.live.get(given["req_id"])
        if held is None or held.blocks != given["block_ids"]:
            return web.json_response({"reason": "no such KV"}, status=404)
        if self._engine.is_other(given["target"]):
            return web.json_response({"reason": "decode was linked with the wrong values"}, status=404)
        if "kv_lost" in held.chosen:
            return web.json_response({"reason": "lost"}, status=404)
        return web.json_response({"kv": self._kv(held)})

    # --- decode

    async def push_call(self, request: web.Request) -> web.Response:
        """`POST /sim/kv/push`: prefill writes the KV of a request."""
        given = await request.json()
        job = self._engine.decode.waiting.get(given["req_id"])
        if job is None or job.blocks != given["block_ids"]:
            return web.json_response({"reason": "no such blocks"}, status=404)
        if given["prefill"] not in self._engine.links:
            return web.json_response({"reason": "not linked"}, status=404)
        if self._engine.is_other(given["target"]):
            return web.json_response({"reason": "GetInstanceInfo gave the wrong values"}, status=404)
        job.kv = given["kv"]
        return web.json_response({})

    async def pull(self, job: "Job", block_ids: list[int]) -> None:
        """Read the KV from prefill's blocks; a failure is noted, nobody is told."""
        peer = self._engine.links.peer(job.prefill)
        given = {"req_id": job.ask.req_id, "block_ids": block_ids, "target": peer}
        reason, got = await self._call(job.prefill, "pull", given) if peer else ("not linked", {})
        if reason:
            self._failed(job.ask.req_id, reason)
            return
        transfer_s = self._instance.clockwork.transfer_s(len(job.ask.tokens))
        if transfer_s:
            await asyncio.sleep(transfer_s)
        self.pulled += 1
        job.kv = got["kv"]

    # --- both

    def _failed(self, req_id: str, reason: str) -> None:
        self.failed += 1
        self._engine.note(f"KV of {req_id}: {reason}")

    async def _call(self, name: str, what: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(the reason why it failed, the answer)."""
        try:
            async with self._instance.client.post(f"http://{name}/sim/kv/{what}", json=given) as reply:
                answer = await reply.json(content_type=None) or {}
                return str(answer.get("reason") or "refused") if reply.status != 200 else "", answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return str(error) or type(error).__name__, {}

    def state(self) -> dict[str, Any]:
        """Counts, as JSON."""
        return {"pushed": self.pushed, "pulled": self.pulled, "failed": self.failed}
