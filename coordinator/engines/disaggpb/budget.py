"""Memory for KV on its way from prefill to decode: who may hold how much of it, and who waits.

A request reserves what its KV will probably take before it goes to prefill, and each byte that comes is accounted for.
The sum of all reservations never exceeds the total. Whoever needs more than he has reserved asks for more and goes
before those who have nothing yet; if nobody who holds memory could go on otherwise, the youngest of them gives up.
"""

import asyncio
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from coordinator.core.errors import KvMemoryFull, KvTooLarge

SLACK_BYTES = 65536  # ids, lengths and tags around the KV data
SLACK_SHARE = 1 / 64
EASING = 1 / 8  # an estimate follows lower figures by this share; higher ones at once
MOST_KINDS = 1000
FULL = "the memory for KV is taken by other requests"
TOO_LARGE = "the prompt is too long: its KV is above what one request may take on its way through the coordinator"


@dataclass(frozen=True, slots=True)
class KvLimits:
    """How much memory there is.

    Attributes:
        request_bytes: for one request.
        total_bytes: for all together; not below `request_bytes`.
        queue: requests that may wait.
        wait_s: how long each of them may.
        bytes_per_token: KV of one prompt token, where it is known; None: it is learned.
    """

    request_bytes: int
    total_bytes: int
    queue: int = 1000
    wait_s: float = 30.0
    bytes_per_token: float | None = None


class _Waiter:
    """Somebody who waits for so many bytes; for those who have none yet they are estimated anew each time."""

    __slots__ = ("future", "more_bytes", "room")

    def __init__(self, room: "Room", more_bytes: int) -> None:
        self.room = room
        self.more_bytes = more_bytes
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class KvBudget:
    """The memory of one process.

    Args:
        limits: how much there is.

    Attributes:
        buffered_bytes: what has come and is held.
        reserved_bytes: what is given away, be it filled or not.
    """

    def __init__(self, limits: KvLimits) -> None:
        self.limits = limits
        self.buffered_bytes = 0
        self.reserved_bytes = 0
        self._per_token: dict[Hashable, float] = {}
        self._rooms: dict[Room, None] = {}  # in the order in which they were admitted
        self._line: deque[_Waiter] = deque()
        self._growing: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait, those among them that hold a part already included."""
        return len(self._line) + len(self._growing)

    async def admit(self, kind: Hashable, tokens: int) -> "Room":
        """Reserve memory for one request, in the order of arrival. Leave the room's scope to give it back.

        Args:
            kind: what has KV of the same size for each token (a model).
            tokens: of the prompt.

        Raises:
            KvTooLarge: by the configured size of a token it cannot fit.
            KvMemoryFull: `queue` requests wait already, or it has waited for `wait_s`.
        """
        limits, room = self.limits, Room(self, kind, tokens)
        if limits.bytes_per_token is not None and tokens * limits.bytes_per_token > limits.request_bytes:
            raise KvTooLarge(TOO_LARGE)
        need = self.estimate_bytes(kind, tokens)
        if not self.waiting and self._fits(need):
            self._reserve(room, need)
            return room
        if len(self._line) >= limits.queue:
            raise KvMemoryFull(FULL, detail="too many wait for it")
        waiter = _Waiter(room, need)
        self._line.append(waiter)
        try:
            await self._wait(self._line, waiter)
        except BaseException:
            room.release()  # it may have been given memory in this very moment
            raise
        return room

    def estimate_bytes(self, kind: Hashable, tokens: int) -> int:
        """What to reserve for a prompt: the most that a request may take, as long as nothing is known."""
        per_token = self.limits.bytes_per_token or self._per_token.get(kind)
        if per_token is None:
            return self.limits.request_bytes
        return min(self.limits.request_bytes, math.ceil(tokens * per_token * (1 + SLACK_SHARE)) + SLACK_BYTES)

    def expected_bytes(self, kind: Hashable, tokens: int) -> int:
        """What will probably come for a prompt; 0: nothing is known."""
        known = self.limits.bytes_per_token is not None or kind in self._per_token
        return self.estimate_bytes(kind, tokens) if known else 0

    def renew(self, limits: KvLimits) -> None:
        """Go by these limits; what is given away stays given, and whoever waits may have what is free by them."""
        self.limits = limits
        self._serve()

    # --- for rooms

    async def grow(self, room: "Room", more_bytes: int) -> None:
        """Reserve more for a request that holds a part already; raises KvMemoryFull."""
        if not self._growing and self._fits(more_bytes):
            self._reserve(room, more_bytes)
            return
        waiter = _Waiter(room, more_bytes)
        self._growing.append(waiter)
        self._unlock()
        await self._wait(self._growing, waiter)

    def learn(self, room: "Room") -> None:
        """Take the size of a whole KV into the estimates."""
        ratio = room.used_bytes / max(1, room.tokens)
        known = self._per_token.get(room.kind, 0.0)
        if known or len(self._per_token) < MOST_KINDS:
            self._per_token[room.kind] = ratio if ratio >= known else known + (ratio - known) * EASING

    def give_back(self, room: "Room", size_bytes: int) -> None:
        """Take back a part of a room's reservation, and let others have it."""
        room.reserved_bytes -= size_bytes
        self.reserved_bytes -= size_bytes
        if not room.reserved_bytes:
            self._rooms.pop(room, None)
        self._serve()

    # --- inside

    def _fits(self, size_bytes: int) -> bool:
        return self.reserved_bytes + size_bytes <= self.limits.total_bytes

    def _reserve(self, room: "Room", size_bytes: int) -> None:
        self._rooms[room] = None
        room.reserved_bytes += size_bytes
        self.reserved_bytes += size_bytes

    async def _wait(self, line: deque[_Waiter], waiter: _Waiter) -> None:
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await waiter.future
        except TimeoutError:
            raise KvMemoryFull(FULL, detail=f"none became free within {self.limits.wait_s:g} s") from None
        finally:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.exception()  # seen, also where the wait was cancelled in the same moment
            if waiter in line:
                line.remove(waiter)
                self._serve()

    def _serve(self) -> None:
        """Give away what is free."""
        while self._growing and self._fits(self._growing[0].more_bytes):
            self._grant(self._growing.popleft())
        if self._growing:
            self._unlock()
            return
        while self._line:
            waiter = self._line[0]
            waiter.more_bytes = self.estimate_bytes(waiter.room.kind, waiter.room.tokens)
            if not self._fits(waiter.more_bytes):
                return
            self._grant(self._line.popleft())

    def _grant(self, waiter: _Waiter) -> None:
        if not waiter.future.done():
            self._reserve(waiter.room, waiter.more_bytes)
            waiter.future.set_result(None)

    def _unlock(self) -> None:
        """Where everybody who holds memory waits for more, end the wait of the one who came last."""
        growing = {waiter.room: waiter for waiter in self._growing if not waiter.future.done()}
        if not growing or len(growing) < len(self._rooms):
            return
        youngest = growing[next(reversed(self._rooms))]
        youngest.future.set_exception(KvMemoryFull(FULL, detail="all who hold a part wait for more"))


class Room:
    """One request's memory; given back once, when its scope is left at the latest.

    Attributes:
        used_bytes: what has come.
        reserved_bytes: what others cannot have.
    """

    __slots__ = ("_budget", "kind", "reserved_bytes", "tokens", "used_bytes")

    def __init__(self, budget: KvBudget, kind: Hashable, tokens: int) -> None:
        self._budget = budget
        self.kind = kind
        self.tokens = tokens
        self.used_bytes = 0
        self.reserved_bytes = 0

    async def take(self, size_bytes: int) -> None:
        """Account for bytes that have come; waits where they are more than was reserved.

        Raises:
            KvTooLarge: the request has more than one may have.
            KvMemoryFull: there is no more, and none became free in time.
        """
        self.used_bytes += size_bytes
        self._budget.buffered_bytes += size_bytes
        if self.used_bytes > self._budget.limits.request_bytes:
            raise KvTooLarge(TOO_LARGE)
        if self.used_bytes > self.reserved_bytes:
            await self._budget.grow(self, self.used_bytes - self.reserved_bytes)

    def settle(self) -> None:
        """The KV is whole: give back what was reserved in vain, and remember its size for others."""
        self._budget.learn(self)
        self._budget.give_back(self, self.reserved_bytes - self.used_bytes)

    def release(self) -> None:
        """The KV is let go; the first call counts."""
        self._budget.buffered_bytes -= self.used_bytes
        self.used_bytes = 0
        self._budget.give_back(self, self.reserved_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
