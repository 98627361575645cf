"""A request on its way, and the watch over its deadlines."""

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from coordinator.core.errors import DeadlineExceeded, EngineFailed, RequestError
from coordinator.core.request import Request
from coordinator.dispatch.waits import Waits
from coordinator.observability.access import RequestRecord
from coordinator.relay import Relay
from coordinator.scheduler import Lease


class Flight:
    """One live request: what it asks for, where its answer goes, what it holds.

    Attributes:
        avoid: ids of instances that have failed it, or given it back for want of room.
        failure: of the last attempt since it came or was given back, see `keep`.
        tries: placements since it came or was given back.
        split: whether the stages before the first token have been timed.
    """

    __slots__ = ("avoid", "failure", "lease", "record", "relay", "request", "split", "tries")

    def __init__(self, request: Request, relay: Relay, record: RequestRecord) -> None:
        self.request = request
        self.relay = relay
        self.record = record
        self.lease: Lease | None = None
        self.avoid: frozenset[str] = frozenset()
        self.failure: EngineFailed | None = None
        self.tries = 0
        self.split = False

    def keep(self, failure: EngineFailed) -> None:
        """Keep a failure without traceback and causes: these know all that has served the attempt, and this flight."""
        failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        self.failure = failure

    def kept(self) -> EngineFailed:
        """The failure, to be raised: it is not kept any more, for its traceback will know this flight again."""
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure

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

    It waits for one thing at a time, and looks again only when that is over: a token costs nothing here.
    """

    __slots__ = ("_clock", "_flight", "_interrupt", "_waits", "due_s", "timer")

    def __init__(
        self, flight: Flight, interrupt: Callable[[RequestError], None], clock: Callable[[], float], waits: Waits
    ) -> None:
        self._flight = flight
        self._interrupt = interrupt
        self._clock = clock
        self._waits = waits
        self.due_s = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waits.stop(self)

    def _arm(self) -> None:
        """Wait for the next deadline, or for as long as a silence may last if one could begin meanwhile."""
        now_s = self._clock()
        deadlines = self._flight.request.deadlines
        wait_s = min(self._flight.expiry()[0] - now_s, deadlines.inter_token_s)
        first_s = deadlines.first_token_s - now_s
        if 0 < first_s < wait_s:
            wait_s = first_s
        if wait_s < math.inf:
            self._waits.start(self, now_s, wait_s)

    def fire(self) -> None:
        """See `Waiter`."""
        self.timer = None
        expiry_s, stage = self._flight.expiry()
        if expiry_s <= self._clock():
            self._interrupt(DeadlineExceeded(stage))
        else:
            self._arm()
