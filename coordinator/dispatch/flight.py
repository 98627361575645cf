"""A request on its way, and the watch over its deadlines."""

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from coordinator.core.errors import DeadlineExceeded, RequestError
from coordinator.core.request import Request
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay
from coordinator.scheduler import Lease

SHORTEST_WAIT_S = 0.002  # timers of the event loop count in milliseconds


class Flight:
    """One live request: what it asks for, where its answer goes, what it holds.

    Attributes:
        avoid: ids of instances that have failed it, or given it back for want of room.
        tries: placements since it came or was given back.
    """

    __slots__ = ("avoid", "lease", "record", "relay", "request", "tries")

    def __init__(self, request: Request, relay: Relay, record: RequestRecord) -> None:
        self.request = request
        self.relay = relay
        self.record = record
        self.lease: Lease | None = None
        self.avoid: frozenset[str] = frozenset()
        self.tries = 0

    def expiry(self) -> tuple[float, str]:
        """The next deadline as it stands (monotonic seconds) and the stage that it ends.

        The wait for an instance has its deadline in the scheduler.
        """
        deadlines, ask = self.request.deadlines, self.request.ask
        finished = (deadlines.finished_s, "request")
        lease = self.lease
        if lease is None:
            return finished
        last_s = self.relay.last_token_s
        if not math.isnan(last_s):
            return min(finished, (last_s + deadlines.inter_token_s, "inter_token")) if ask.stream else finished
        if ask.stream or lease.prefilled_s is None:
            return min(finished, (deadlines.first_token_s, "first_token"))
        return finished


class Watch:
    """Ends a flight that runs into a deadline.

    One timer per request, set anew only when it fires: a token costs nothing here.
    """

    __slots__ = ("_clock", "_flight", "_handle", "_interrupt", "_loop")

    def __init__(
        self,
        flight: Flight,
        interrupt: Callable[[RequestError], None],
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._flight = flight
        self._interrupt = interrupt
        self._clock = clock
        self._loop = loop or asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        """Wait for the next deadline, or for as long as a silence may last if one could begin meanwhile."""
        now_s = self._clock()
        wait_s = min(self._flight.expiry()[0] - now_s, self._flight.request.deadlines.inter_token_s)
        first_s = self._flight.request.deadlines.first_token_s - now_s
        if 0 < first_s < wait_s:
            wait_s = first_s
        if math.isfinite(wait_s):
            self._handle = self._loop.call_later(max(SHORTEST_WAIT_S, wait_s), self._fire)

    def _fire(self) -> None:
        expiry_s, stage = self._flight.expiry()
        if expiry_s <= self._clock():
            self._handle = None
            self._interrupt(DeadlineExceeded(stage))
        else:
            self._arm()
