"""Being known by etcd: the key of an instance, its lease, the master (xLLM protocol page §5.1)."""

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from instances.timing import Timing
from instances.xllm.etcd import Etcd, EtcdError
from instances.xllm.presence import Presence
from instances.xllm.settings import TYPES

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

MASTER, PING = "XLLM:SERVICE:MASTER", "XLLM_PING"
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (1, 8, 32, 64)


def ttft_profile(timing: Timing) -> list[list[float]]:
    """[[prompt tokens, ms]] as the timing model has it."""
    speed = timing.speed or float("inf")
    return [[tokens, (timing.prefill_ms + timing.prefill_token_ms * tokens) / speed] for tokens in _LENGTHS]


def tpot_profile(timing: Timing) -> list[list[float]]:
    """[[tokens, batch, ms]] as the timing model has it."""
    speed = timing.speed or float("inf")
    return [
        [tokens, batch, timing.decode_ms * (1 + timing.decode_load * (batch - 1)) / speed]
        for tokens in _LENGTHS
        for batch in _BATCHES
    ]


class Registration(Presence):
    """Presence by etcd: no master, no service; no key, a new one."""

    def __init__(self, engine: "XllmEngine") -> None:
        super().__init__(engine)
        self._etcd: Etcd | None = None
        self._lease = 0
        self.puts = 0

    @property
    def etcd(self) -> Etcd:
        """The client."""
        settings = self.engine.settings
        if self._etcd is None:
            login = settings.etcd_username, settings.etcd_password
            self._etcd = Etcd(self.engine.instance.client, settings.etcd, settings.etcd_namespace, login)
        return self._etcd

    @property
    def key(self) -> str:
        """Where the instance stands."""
        return f"XLLM:{self.engine.type}:{self.engine.name}"

    async def _announce(self) -> None:
        self.tasks.spawn(self._come(), f"{self.engine.instance.name} registers")

    async def _come(self) -> None:
        self.master = ""
        pause_s = self.engine.settings.master_poll_s
        while not self.master:
            try:
                await self.etcd.put(PING, "PING")
                self.master = await self.etcd.get(MASTER) or ""
            except EtcdError as error:
                self.engine.note(str(error))
            if not self.master:
                self.engine.note("Master service not set")
                await asyncio.sleep(pause_s)
        await self.engine.open_pd_port()
        await self._put()  # if it fails, the missing key is seen to later
        name = self.engine.instance.name
        self.tasks.spawn(self._keep_lease(), f"{name} keeps its lease")
        self.tasks.spawn(self._keep_key(), f"{name} keeps its key")
        self.tasks.spawn(self._keep_master(), f"{name} watches the master")
        await self.serve()

    async def _put(self) -> bool:
        try:
            self._lease = await self.etcd.grant(self.engine.settings.etcd_ttl_s)
            await self.etcd.put(self.key, json.dumps(self.described()), self._lease)
        except EtcdError as error:
            self.engine.note(f"Register instance failed: {error}")
            return False
        self.puts += 1
        return True

    def described(self) -> dict[str, Any]:
        """The instance's JSON."""
        engine, settings = self.engine, self.engine.settings
        timing = engine.instance.options.timing
        described: dict[str, Any] = {
            "name": engine.name,
            "rpc_address": f"{engine.instance.host}:{engine.pd_port}" if engine.pd_port else engine.name,
            "incarnation_id": self.incarnation_id,
            "register_ts_ms": self.register_ts_ms,
            "type": TYPES.index(engine.type),
            "cluster_ids": engine.cluster_ids,
            "addrs": engine.addrs,
            "dp_size": settings.dp_size,
            "ports": engine.link_ports,
            "ttft_profiling_data": ttft_profile(timing),
            "tpot_profiling_data": tpot_profile(timing),
        }
        if settings.proto == "old":
            ids = [number + 1 for number in range(len(engine.cluster_ids))]
            return {**described, "k_cache_ids": ids, "v_cache_ids": ids, "device_ips": engine.addrs}
        newer = {"worker_free_phy_pages": [], "total_phy_pages": 0, "model_weight_segments": {}}
        return {**described, "kv_split_size": settings.kv_split_size, **newer}

    def _is_lost(self) -> bool:
        return "lease_lost" in self.engine.instance.faults.always()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self.engine.settings.etcd_ttl_s / 3)
            if self._lease and not self._is_lost():
                try:
                    if not await self.etcd.keep_alive(self._lease):
                        self._lease = 0
                except EtcdError as error:
                    self.engine.note(str(error))

    async def _keep_key(self) -> None:
        """Put the key again when it is missing."""
        while True:
            await asyncio.sleep(self.engine.settings.heartbeat_s)
            if self._is_lost():
                continue
            try:
                found = await self.etcd.get(self.key)
            except EtcdError as error:
                self.engine.note(str(error))
                continue
            if not found:
                self.engine.note("Detected missing instance registration in etcd")
                await self._put()

    async def _keep_master(self) -> None:
        """Follow the master; without one there is nobody to tell."""
        while True:
            try:
                value, revision = await self.etcd.look(MASTER)
                self.master = value or ""
                async for changed in self.etcd.watch(MASTER, revision):
                    self.master = changed or ""
            except EtcdError as error:
                self.engine.note(str(error))
            await asyncio.sleep(min(1.0, self.engine.settings.master_poll_s))

    async def lose_key(self) -> None:
        """The key goes, as when somebody takes it away."""
        with contextlib.suppress(EtcdError):
            await self.etcd.delete(self.key)

    async def leave(self) -> None:
        """Take the key away, and stop."""
        lease, self._lease = self._lease, 0
        await self.stop()
        if lease:
            with contextlib.suppress(EtcdError):
                await self.etcd.revoke(lease)

    def state(self) -> dict[str, Any]:
        """What is known, as JSON."""
        return {**super().state(), "key": self.key, "puts": self.puts}
