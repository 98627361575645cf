"""Requests that wait until an instance is free: bounded, in order, none in the way of another that could go."""

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from itertools import count
from typing import TypeAlias

from coordinator.core.errors import DeadlineExceeded, RequestError, TooManyRequests
from coordinator.core.request import Request

from .lease import Lease
from .pool import Pool

Lane: TypeAlias = "list[tuple[int, int, Waiter]]"
LaneKey = tuple[tuple[Pool, ...], frozenset[str]]


class Waiter:
    """One waiting request. Its future gets a lease, or the error that ends the wait.

    Its lane's entry is `(*rank, waiter)`; the rank alone finds it, as no two are equal.
    """

    __slots__ = ("avoid", "future", "key", "lane", "rank", "request")

    def __init__(self, request: Request, avoid: frozenset[str], future: asyncio.Future[Lease]) -> None:
        self.request = request
        self.avoid = avoid
        self.future = future
        self.key: LaneKey = ((), avoid)
        self.lane: Lane = []
        self.rank = (0, 0)


class WaitingLine:
    """Waiting requests, in lanes of those that the same instances can take.

    Within a lane, whoever cannot be placed shows that nobody behind can; lanes do not hold each other up.

    Args:
        limit: how many may wait.
        weight: what to sort by within a lane, before the order of arrival; the same for all: first come, first served.
        lane_of: the pools that a request may be placed in.
        seek: places a waiting request: a lease, or None if it has to wait on; raises RequestError if it is hopeless.

    Attributes:
        limit: as given; may change.
    """

    def __init__(
        self,
        limit: int,
        *,
        weight: Callable[[Request], int],
        lane_of: Callable[[Request], tuple[Pool, ...]],
        seek: Callable[[Request, frozenset[str]], Lease | None],
    ) -> None:
        self.limit = limit
        self._weight = weight
        self._lane_of = lane_of
        self._seek = seek
        self._lanes: dict[LaneKey, Lane] = {}
        self._arrivals = count()
        self._waiting = 0
        self._elsewhere: Callable[[], int] | None = None
        self._on_change: Callable[[int], None] | None = None

    def share(self, elsewhere: Callable[[], int], on_change: Callable[[int], None]) -> None:
        """Have the limit hold for several processes.

        Args:
            elsewhere: how many wait in the others.
            on_change: told how many wait here.
        """
        self._elsewhere = elsewhere
        self._on_change = on_change

    def __len__(self) -> int:
        return self._waiting

    async def wait(self, request: Request, avoid: frozenset[str], now_s: float) -> Lease:
        """Wait for a lease, at most until the request's scheduling deadline.

        A cancelled wait leaves nothing behind; a lease that came at the same moment is given back.

        Raises:
            TooManyRequests: `limit` requests wait already.
            DeadlineExceeded: `schedule`.
            RequestError: what `seek` raised after a change of view.
        """
        if self._waiting + (0 if self._elsewhere is None else self._elsewhere()) >= self.limit:
            raise TooManyRequests("too many requests are waiting for an instance")
        left_s = request.deadlines.scheduled_s - now_s
        if left_s <= 0:
            raise DeadlineExceeded("schedule")
        loop = asyncio.get_running_loop()
        waiter = Waiter(request, avoid, loop.create_future())
        waiter.rank = (self._weight(request), next(self._arrivals))
        self._join(waiter)
        self._count(1)
        timer = None if left_s == math.inf else loop.call_later(left_s, self._expire, waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().end()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(waiter)
            del waiter  # the error that it may have got knows this frame

    def serve(self) -> None:
        """Place whoever can be placed; to be called when an instance stops being full."""
        heads = [(lane[0], lane) for lane in self._lanes.values()]
        heapify(heads)
        while heads:
            (_, _, waiter), lane = heads[0]
            if not self._settled(waiter):
                heappop(heads)
            elif lane:
                heapreplace(heads, (lane[0], lane))
            else:
                heappop(heads)

    def regroup(self, *, reweigh: bool = False) -> None:
        """Form the lanes anew and serve them; to be called when the pools, or (`reweigh`) the weights, have changed."""
        waiters = [entry[2] for lane in self._lanes.values() for entry in lane]
        self._lanes.clear()
        for waiter in waiters:
            if reweigh:
                waiter.rank = (self._weight(waiter.request), waiter.rank[1])
            self._join(waiter)
        self.serve()

    def _settled(self, waiter: Waiter) -> bool:
        """Try to end a wait; whoever is done leaves the lane."""
        if not waiter.future.done():
            try:
                lease = self._seek(waiter.request, waiter.avoid)
            except RequestError as error:
                waiter.future.set_exception(error)
            else:
                if lease is None:
                    return False
                waiter.future.set_result(lease)
        self._leave(waiter)
        return True

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(DeadlineExceeded("schedule"))
            self._leave(waiter)

    def _count(self, more: int) -> None:
        self._waiting += more
        if self._on_change is not None:
            self._on_change(self._waiting)

    def _join(self, waiter: Waiter) -> None:
        waiter.key = (self._lane_of(waiter.request), waiter.avoid)
        waiter.lane = self._lanes.setdefault(waiter.key, [])
        insort(waiter.lane, (*waiter.rank, waiter))

    def _leave(self, waiter: Waiter) -> None:
        lane = waiter.lane
        at = bisect_left(lane, waiter.rank)
        if at < len(lane) and lane[at][2] is waiter:
            del lane[at]
            self._count(-1)
            if not lane:
                del self._lanes[waiter.key]
