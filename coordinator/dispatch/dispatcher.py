"""Attempts of one request, one after the other, until it is answered or nothing is left to try."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.core.abilities import PreparingEngine
from coordinator.core.errors import (
    BadRequest,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRefused,
    NoInstance,
    RequestError,
    Side,
    TooManyRequests,
)
from coordinator.core.ports import Answer, Completed, EngineProtocol, Members, Outcome, Resume
from coordinator.core.request import Request
from coordinator.dispatch.flight import Flight, Watch
from coordinator.dispatch.timing import note_attempt
from coordinator.dispatch.waits import Waits
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.observability.trace import Move
from coordinator.relay import Relay
from coordinator.scheduler import Lease, Scheduler
from coordinator.transport.scope import Scope


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """How much and how often."""

    max_requests: int = 10000
    max_attempts: int = 3
    max_recomputes: int = 16


class Dispatcher:
    """Runs requests: the one place that admits, places, retries and resumes them.

    Args:
        scheduler: says where.
        cluster: is told what went well and what failed.
        engines: protocols by the name that instances carry.

    Attributes:
        draining: new requests are refused.
        records: what is known of each live request, by the scope that it runs in.
        elsewhere: where several processes serve, the live requests of the others, which count for the limit too.
        on_live: told the number of live requests whenever it changes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Members,
        engines: Mapping[str, EngineProtocol],
        metrics: Metrics,
        limits: DispatchLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._engines = engines
        self._metrics = metrics
        self.renew(limits)
        self._clock = clock
        self.records: dict[Scope, RequestRecord] = {}
        self._idle = asyncio.Event()
        self._run_on: tuple[asyncio.AbstractEventLoop, Waits] | None = None
        self.draining = False
        self.elsewhere: Callable[[], int] | None = None
        self.on_live: Callable[[int], None] | None = None

    def renew(self, limits: DispatchLimits) -> None:
        """Go by these limits, and by the engines that there are, from here on; what runs goes on."""
        self._limits = limits
        self._preparing = tuple(engine for engine in self._engines.values() if isinstance(engine, PreparingEngine))

    @property
    def live(self) -> int:
        """Requests that are there and have not ended."""
        return len(self.records)

    async def run(self, request: Request, relay: Relay, record: RequestRecord) -> None:
        """See a request through to its end.

        Raises:
            RequestError: how it failed; what was sent until then stays sent.

        Cancellation (the client has left) stops both instances and gives the whole load back.
        """
        if self.draining:
            raise Draining
        taken = len(self.records) + (self.elsewhere() if self.elsewhere is not None else 0)
        if taken >= self._limits.max_requests:
            raise TooManyRequests("too many requests are being served")
        loop, waits = self._running()
        scope = Scope(loop)
        self._enter(scope, record)
        try:
            async with scope:
                relay.on_cut = scope.interrupt
                flight = Flight(request, relay, record)
                with Watch(flight, scope.interrupt, self._clock, waits):
                    for engine in self._preparing:
                        if engine.prepares:
                            flight.request = await engine.prepare(flight.request)
                    await self._attempts(flight)
        finally:
            relay.on_cut = None
            relay.settle()
            self._leave(scope)

    def _running(self) -> tuple[asyncio.AbstractEventLoop, Waits]:
        """The event loop and its waits; asking for the loop costs a system call, so it is asked for once."""
        if self._run_on is None:
            loop = asyncio.get_running_loop()
            self._run_on = (loop, Waits(loop, self._clock))
        return self._run_on

    def _enter(self, scope: Scope, record: RequestRecord) -> None:
        self.records[scope] = record
        if self.on_live is not None:
            self.on_live(len(self.records))

    def _leave(self, scope: Scope) -> None:
        self.records.pop(scope, None)
        if self.on_live is not None:
            self.on_live(len(self.records))
        if not self.records:
            self._idle.set()

    async def _attempts(self, flight: Flight) -> None:
        record, relay = flight.record, flight.relay
        reason = "first"
        while True:
            lease = await self._place(flight)
            record.attempts += 1
            flight.tries += 1
            self._metrics.attempts.labels(reason).inc()
            sent_before = relay.pieces
            try:
                outcome = await self._attempt(flight, lease)
            except EngineFailed as error:
                untouched = relay.pieces == sent_before and (not relay.started or bool(flight.request.wire_id))
                if not untouched or flight.tries >= self._limits.max_attempts:
                    raise
                flight.avoid |= {error.instance_id, error.doubted or error.instance_id}
                reason = error.reason
                flight.keep(error)
                continue
            if isinstance(outcome, Completed):
                return
            flight.request = self._resumed(flight, outcome, lease)
            if outcome.avoid:
                flight.avoid |= {outcome.avoid}
            reason, flight.tries, flight.failure = "recompute", 0, None

    def _resumed(self, flight: Flight, outcome: Resume, lease: Lease) -> Request:
        """The request that decode has given back; what was sent stays sent, model and kind of answer stay too."""
        request = flight.request
        flight.record.recomputes += 1
        self._metrics.recomputes.labels().inc()
        if flight.record.recomputes > self._limits.max_recomputes:
            raise EngineFailed(Side.DECODE, lease.decode.id, "recompute", detail="given back too often")
        try:
            ask = flight.relay.family.parse(request.path, outcome.body)
        except BadRequest as error:
            raise EngineFailed(Side.DECODE, lease.decode.id, "recompute", detail=error.message) from error
        ask = replace(ask, model=request.ask.model, stream=request.ask.stream)
        return request.resumed(outcome.body, ask, outcome.wire_id)

    async def _place(self, flight: Flight) -> Lease:
        """Get a placement; where a failed attempt leaves none to try, that failure is the answer."""
        request = flight.request
        if flight.record.attempts:
            # a wait of its own: the time that the attempts so far have taken was no waiting
            deadlines = request.deadlines
            limit_s = self._clock() + deadlines.scheduled_s - request.arrived_s
            request = replace(request, deadlines=replace(deadlines, scheduled_s=limit_s))
        try:
            lease = await self._scheduler.place(request, flight.avoid)
        except NoInstance:
            if flight.failure is not None:
                raise flight.kept() from None
            raise
        record = flight.record
        record.prefill, record.decode = lease.prefill.id, lease.decode.id
        if record.queue_s is None:
            record.queue_s = lease.placed_s - request.arrived_s
            self._metrics.stages.queue.observe(record.queue_s)
        return lease

    async def _attempt(self, flight: Flight, lease: Lease) -> Outcome:
        flight.lease = lease
        lease.mover = lambda failure: self._move_decode(flight, failure)
        engine = self._engines[lease.prefill.engine]
        failure: EngineFailed | None = None
        try:
            with lease:
                outcome = await engine.serve(flight.request, lease, flight.relay)
        except EngineFailed as error:
            failure = error
            if error.reason == "timeout" and self._clock() >= flight.request.deadlines.finished_s:
                raise DeadlineExceeded("request") from error  # the engine's call ended with it, a moment earlier
            self._blame(lease, error)
            flight.record.blame(error)
            raise
        except EngineRefused:
            self._cluster.credit(lease.prefill)
            raise
        finally:
            flight.lease = None
            note_attempt(self._metrics, flight, lease, failure)
            del failure  # its traceback knows this frame
        self._cluster.credit(lease.prefill)
        if lease.decode is not lease.prefill and isinstance(outcome, Completed):
            self._cluster.credit(lease.decode)
        return outcome

    def _blame(self, lease: Lease, error: EngineFailed) -> None:
        """Charge the guilty instance, and it alone."""
        guilty = lease.prefill if error.instance_id == lease.prefill.id else lease.decode
        self._metrics.engine_failures.labels(error.instance_id, error.side, error.reason).inc()
        self._cluster.charge(guilty, error)

    def _move_decode(self, flight: Flight, failure: EngineFailed) -> bool:
        """See `core.ports.Placement.another_decode`."""
        lease, record = flight.lease, flight.record
        if lease is None or flight.relay.started or flight.tries >= self._limits.max_attempts:
            return False
        failed = lease.decode
        avoid = flight.avoid | {failed.id}
        if not self._scheduler.move_decode(lease, flight.request, avoid):
            return False
        flight.avoid = avoid
        flight.tries += 1
        record.attempts += 1
        record.decode = lease.decode.id
        if record.trace is not None:
            record.trace.moves.append(Move(self._clock(), failed.id, failure.reason))
        self._metrics.attempts.labels(failure.reason).inc()
        self._metrics.decode_replays.inc()
        self._metrics.engine_failures.labels(failed.id, failure.side, failure.reason).inc()
        self._cluster.charge(failed, failure)
        record.blame(failure)
        return True

    async def call(self, request: Request) -> Answer:
        """Pass a call that is no inference to the instance with the least to do.

        Raises:
            RequestError: as for inference; one instance is tried.
        """
        if self.draining:
            raise Draining
        model = request.ask.model
        able = [i for i in self._cluster.view.ready if model is None or i.model is None or i.model == model]
        if not able:
            raise NoInstance("no instance is ready")
        instance = min(able, key=self._scheduler.in_flight)
        left_s = request.deadlines.finished_s - self._clock()
        try:
            async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                return await self._engines[instance.engine].call(request, instance)
        except TimeoutError:
            raise DeadlineExceeded("request") from None
        except EngineFailed as error:
            self._cluster.charge(instance, error)
            raise

    async def drained(self, within_s: float) -> None:
        """Wait until no request is live, at most `within_s` (infinity: as long as it takes)."""
        while self.records:
            self._idle.clear()
            try:
                async with asyncio.timeout(None if math.isinf(within_s) else within_s):
                    await self._idle.wait()
            except TimeoutError:
                return

    def interrupt_all(self, error: RequestError) -> None:
        """End every live request with `error`."""
        for scope in list(self.records):
            scope.interrupt(error)
