"""Who holds how many KV blocks, since when and why: what leak tests look at."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RELEASED_KEPT = 1000


class OutOfBlocks(Exception):
    """Not enough free KV blocks."""


@dataclass(slots=True)
class Holding:
    """KV blocks of one request. `state`: allocated (a live request works on them) or pinned (they wait for a peer)."""

    blocks: int
    state: str
    since_s: float
    why: str


class KvLedger:
    """Block counts per request id.

    Args:
        total_blocks: capacity.
        block_tokens: tokens per block.
        clock: monotonic seconds.
    """

    def __init__(self, total_blocks: int, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._clock = clock
        self._held: dict[str, Holding] = {}
        self._used = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.released_count = 0
        self.most_used_blocks = 0
        self.released: deque[dict[str, Any]] = deque(maxlen=_RELEASED_KEPT)
        self._line: deque[tuple[asyncio.Future[None], str, int, str]] = deque()

    def blocks(self, kv_tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-kv_tokens // self.block_tokens)

    def allocate(self, request_id: str, kv_tokens: int, why: str) -> None:
        """Take blocks for a request that has none yet; raises OutOfBlocks and changes nothing if there are too few."""
        if request_id in self._held:
            raise ValueError(f"request {request_id} holds KV already")
        blocks = self.blocks(kv_tokens)
        self._take(blocks)
        self._hold(request_id, blocks, why)

    async def wait_allocate(self, request_id: str, kv_tokens: int, why: str) -> None:
        """Take blocks as soon as there are enough, in order of arrival; raises OutOfBlocks if there can never be."""
        blocks = self.blocks(kv_tokens)
        if blocks > self.total_blocks:
            raise OutOfBlocks(f"{blocks} KV blocks wanted, {self.total_blocks} exist")
        if not self._line and self._used + blocks <= self.total_blocks:
            self.allocate(request_id, kv_tokens, why)
            return
        turn = asyncio.get_running_loop().create_future()
        place = (turn, request_id, blocks, why)
        self._line.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if place in self._line:
                self._line.remove(place)
                self._advance()
            else:
                self.release(request_id, "left while it waited for blocks")
            raise

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._line)

    def _hold(self, request_id: str, blocks: int, why: str) -> None:
        self._held[request_id] = Holding(blocks, "allocated", self._clock(), why)
        self._empty.clear()

    def _advance(self) -> None:
        """Serve the line as far as blocks are free."""
        while self._line and self._used + self._line[0][2] <= self.total_blocks:
            turn, request_id, blocks, why = self._line.popleft()
            if not turn.done():
                self._take(blocks)
                self._hold(request_id, blocks, why)
                turn.set_result(None)

    def grow(self, request_id: str, kv_tokens: int) -> None:
        """Make a holding large enough for `kv_tokens` in all; raises OutOfBlocks and changes nothing if it cannot."""
        holding = self._held[request_id]
        wanted = self.blocks(kv_tokens)
        if wanted > holding.blocks:
            self._take(wanted - holding.blocks)
            holding.blocks = wanted

    def _take(self, blocks: int) -> None:
        if self._used + blocks > self.total_blocks:
            raise OutOfBlocks(f"{blocks} KV blocks wanted, {self.total_blocks - self._used} free")
        self._used += blocks
        self.most_used_blocks = max(self.most_used_blocks, self._used)

    def pin(self, request_id: str, why: str) -> None:
        """The request's work here is over, its KV waits for a peer."""
        holding = self._held[request_id]
        holding.state, holding.since_s, holding.why = "pinned", self._clock(), why

    def resume(self, request_id: str, why: str) -> None:
        """The request's work goes on here: what was pinned is allocated again."""
        holding = self._held[request_id]
        holding.state, holding.since_s, holding.why = "allocated", self._clock(), why

    def release(self, request_id: str, why: str) -> bool:
        """Give the blocks back; False if the request holds none (any more)."""
        holding = self._held.pop(request_id, None)
        if holding is None:
            return False
        self._used -= holding.blocks
        self.released_count += 1
        held_s = round(self._clock() - holding.since_s, 6)
        self.released.append({"id": request_id, "blocks": holding.blocks, "why": why, "held_s": held_s})
        if not self._held:
            self._empty.set()
        self._advance()
        return True

    def clear(self, why: str) -> None:
        """Give everything back."""
        for request_id in list(self._held):
            self.release(request_id, why)

    def count(self, state: str) -> int:
        """Blocks held in that state: allocated or pinned."""
        return sum(holding.blocks for holding in self._held.values() if holding.state == state)

    @property
    def used_blocks(self) -> int:
        """Blocks that are not free."""
        return self._used

    @property
    def free_blocks(self) -> int:
        """Blocks that are free."""
        return self.total_blocks - self._used

    async def wait_empty(self, deadline_s: float) -> bool:
        """Wait until nothing is held; False if something still is after `deadline_s` seconds."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def snapshot(self) -> dict[str, Any]:
        """The ledger as JSON."""
        now_s = self._clock()
        return {
            "total_blocks": self.total_blocks,
            "block_tokens": self.block_tokens,
            "allocated": self.count("allocated"),
            "pinned": self.count("pinned"),
            "released_requests": self.released_count,
            "most_used_blocks": self.most_used_blocks,
            "held": [
                {"id": key, "blocks": h.blocks, "state": h.state, "for_s": round(now_s - h.since_s, 6), "why": h.why}
                for key, h in self._held.items()
            ],
            "released": list(self.released),
        }
