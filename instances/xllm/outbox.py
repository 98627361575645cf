"""Generations on their way to the services: who gets them, and what the answers mean (xLLM protocol page §5.5)."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instances.xllm.errors import RpcError, RpcLost
from instances.xllm.proto.engine_pb2 import DisaggStreamGeneration, DisaggStreamGenerations, StatusSet

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

GENERATIONS = ("xllm_service.proto.XllmRpcService", "Generations")
_BACKLOG = 1000


@dataclass(frozen=True, slots=True)
class Parcel:
    """One generation. `address`: of the service, empty: the master; `told`: called with the status of the answer."""

    message: DisaggStreamGeneration
    address: str
    told: Callable[[bool], None]


class Outbox:
    """Sends generations; a call that fails counts as ok=false for all that were in it, as with the real engine."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._queue: deque[tuple[list[Parcel], bool]] = deque()
        self._wake = asyncio.Event()
        self._short = asyncio.Event()
        self._short.set()
        self.calls = self.lost_calls = self.sent = self.refused = 0

    def batch(self, parcels: list[Parcel], *, apart: bool = False) -> None:
        """Send a step's generations, after all earlier batches; `apart`: one call for each, all at once."""
        self._queue.append((parcels, apart))
        self._wake.set()
        if len(self._queue) >= _BACKLOG:
            self._short.clear()

    async def room(self) -> None:
        """Wait while too much waits to be told."""
        await self._short.wait()

    def state(self) -> dict[str, Any]:
        """Counts, as JSON."""
        return {
            "calls": self.calls,
            "lost_calls": self.lost_calls,
            "generations": self.sent,
            "refused": self.refused,
            "waiting_batches": len(self._queue),
        }

    def clear(self) -> None:
        """Forget what was not sent."""
        self._queue.clear()
        self._short.set()

    async def run(self) -> None:
        """Send batches for ever: one thread does it, so one slow service holds up everything."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            parcels, apart = self._queue.popleft()
            if len(self._queue) < _BACKLOG:
                self._short.set()
            groups: dict[tuple[str, int], list[Parcel]] = {}
            for number, parcel in enumerate(parcels):
                key = (self._address(parcel), number if apart else 0)
                groups.setdefault(key, []).append(parcel)
            if not parcels:
                groups[(self._engine.presence.master, 0)] = []
            calls = [self.send(address, group) for (address, _), group in groups.items()]
            await asyncio.gather(*calls)

    def _address(self, parcel: Parcel) -> str:
        return parcel.address or self._engine.presence.master

    async def single(self, parcel: Parcel) -> None:
        """Send one generation by itself, past the batches."""
        await self.send(self._address(parcel), [parcel])

    async def send(self, address: str, parcels: Sequence[Parcel]) -> None:
        """One call, and what its answer means for each request."""
        messages = [parcel.message for parcel in parcels]
        if self._engine.settings.proto == "old":
            for message in messages:
                if message.HasField("usage"):
                    message.usage.ClearField("num_cached_tokens")
        self.calls += 1
        self.sent += len(messages)
        try:
            channel = self._engine.channel(address)
            answer = await channel.call(GENERATIONS, DisaggStreamGenerations(gens=messages), StatusSet)
        except (RpcError, RpcLost) as error:
            self.lost_calls += 1
            self._engine.note(f"Fail to response tokens to xservice server {address}: {error}")
            statuses = [False] * len(parcels)
        else:
            statuses = [status.ok for status in answer.all_status]
        if len(statuses) != len(parcels):
            self._engine.abort(f"Check failed: {len(statuses)} status for {len(parcels)} generations")
            return
        for parcel, is_ok in zip(parcels, statuses, strict=True):
            self.refused += not is_ok
            parcel.told(is_ok)
