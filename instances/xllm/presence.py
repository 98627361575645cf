"""Being known: which service is the master, and the heartbeats to it (xLLM protocol page §5.1, §5.2)."""

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from instances.tasks import Tasks
from instances.xllm.errors import RpcError, RpcLost
from instances.xllm.proto.service_pb2 import HeartbeatRequest, Status

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

HEARTBEAT = ("xllm_service.proto.XllmRpcService", "Heartbeat")
_MS = 1000


class Presence:
    """An instance as its service sees it, from one start to the next crash.

    Attributes:
        master: `ip:port` of the service; empty: not known.
        ready: whether requests are served.
        incarnation_id: another one after each start.
    """

    def __init__(self, engine: "XllmEngine") -> None:
        self.engine = engine
        self.master = engine.settings.service
        self.ready = False
        self.incarnation_id = ""
        self.register_ts_ms = 0
        self.beats = self.beats_refused = self.beats_lost = 0
        self._recent_ttft_ms: int | None = None
        self._recent_tbt_ms: int | None = None
        self.tasks = Tasks()

    async def start(self) -> None:
        """A new incarnation: make it known, serve, beat."""
        self.incarnation_id = uuid.uuid4().hex[:22]
        self.register_ts_ms = int(time.time() * _MS)
        await self._announce()

    async def _announce(self) -> None:
        """Without etcd: the service knows of us from somewhere else."""
        await self.serve()

    async def serve(self) -> None:
        """Take requests, and beat."""
        await self.engine.open_pd_port()
        self.ready = True
        self.tasks.spawn(self.beat(), f"{self.engine.instance.name} beats")

    async def stop(self) -> None:
        """As if the process were gone."""
        self.ready = False
        await self.tasks.aclose()

    async def leave(self) -> None:
        """Leave in an orderly way."""
        await self.stop()

    # --- heartbeats

    def first_token(self, took_s: float) -> None:
        """A time to the first token, for the next heartbeat."""
        self._recent_ttft_ms = max(self._recent_ttft_ms or 0, round(took_s * _MS))

    def next_token(self, took_s: float) -> None:
        """A time between tokens, for the next heartbeat."""
        self._recent_tbt_ms = max(self._recent_tbt_ms or 0, round(took_s * _MS))

    async def beat(self) -> None:
        """Heartbeats for ever."""
        while True:
            await asyncio.sleep(self.engine.settings.heartbeat_s)
            if self.master and "silence" not in self.engine.instance.faults.always():
                await self.beat_once()

    async def beat_once(self) -> None:
        """One heartbeat."""
        try:
            answer = await self.engine.channel(self.master).call(HEARTBEAT, self.heartbeat(), Status)
        except (RpcError, RpcLost) as error:
            self.beats_lost += 1
            self.engine.note(f"Failed to send heartbeat to master xservice {self.master}, error msg is: {error}")
            return
        self.beats += 1
        self.beats_refused += not answer.ok

    def heartbeat(self) -> HeartbeatRequest:
        """What a heartbeat says."""
        engine = self.engine
        wrong = "wrong_incarnation" in engine.instance.faults.always()
        message = HeartbeatRequest(name=engine.name, incarnation_id="another" if wrong else self.incarnation_id)
        ledger = engine.instance.ledger
        message.load_metrics.waiting_requests_num = engine.waiting
        message.load_metrics.gpu_cache_usage_perc = ledger.used_blocks / ledger.total_blocks
        if self._recent_ttft_ms is not None:
            message.latency_metrics.recent_max_ttft = self._recent_ttft_ms
        if self._recent_tbt_ms is not None:
            message.latency_metrics.recent_max_tbt = self._recent_tbt_ms
        self._recent_ttft_ms = self._recent_tbt_ms = None
        events = engine.cache.events()
        if events.stored_cache or events.removed_cache:
            message.cache_event.CopyFrom(events)
        return message

    def state(self) -> dict[str, Any]:
        """What is known, as JSON."""
        return {
            "master": self.master,
            "ready": self.ready,
            "incarnation_id": self.incarnation_id,
            "heartbeats": self.beats,
            "heartbeats_refused": self.beats_refused,
            "heartbeats_lost": self.beats_lost,
        }
