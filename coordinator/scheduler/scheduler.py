"""place(): where a request runs, and what that does to everybody's load."""

import time
from collections.abc import Callable, Iterator

from coordinator.core.errors import NoInstance
from coordinator.core.instance import Instance, Role
from coordinator.core.request import Request
from coordinator.core.view import ClusterView
from coordinator.policies import LoadView, Policies

from .lease import Lease
from .load import Load, Share
from .pool import Fallback, linked
from .ranking import Seat
from .roster import Roster
from .search import Found, Search
from .shared import SharedLoads
from .waiting import WaitingLine

NOBODY: frozenset[str] = frozenset()


class Scheduler:
    """Chooses instances and keeps account of what is on them. For one event loop; nothing here blocks.

    Who may be chosen: prefill and decode of one engine and group, with a link between them as far as peers are known,
    that both accept the request's model; not full; ready, or suspect where no ready one is free; an instance to avoid
    only where the request has no other. Who is best of these is up to the policies; of equals, whoever was picked least
    recently.

    Args:
        policies: who is better, by role.
        max_queue: requests that may wait for an instance that is not full; 0: none.
        fallback: `hybrid`: hybrid instances serve what no pair is free for. `none`: only models for which the view has
            neither prefill nor decode instances.
        clock: monotonic time in seconds.

    Attributes:
        on_idle: called with an instance that has left the view when the last request that needs it ends. Not called
            for one that leaves idle: ask `in_flight`.
    """

    def __init__(
        self,
        policies: Policies,
        *,
        max_queue: int,
        fallback: Fallback = "hybrid",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_idle: Callable[[Instance], None] | None = None
        self._fallback: Fallback = fallback
        self._clock = clock
        self._roster = Roster(policies)
        self._leases: set[Lease] = set()
        self._shared: SharedLoads | None = None
        self._line = WaitingLine(
            max_queue,
            weight=self._weight,
            lane_of=lambda request: self._roster.pools(request.ask.model),
            seek=self._seek,
        )

    def share(self, shared: SharedLoads) -> None:
        """Keep loads in step with those of other processes. Call it before the first view."""
        self._shared = shared
        self._line.share(shared.queued_elsewhere, shared.publish_queued)

    # --- the cluster's side

    def on_view(self, view: ClusterView) -> None:
        """Choose from this view from here on; waiting requests are looked at again."""
        self._roster.update(view)
        if self._shared is not None:
            for load in self._roster.loads.values():
                self._shared.place(load)
            self._take_in(self._shared)
        self._line.regroup()

    def renew(self, policies: Policies | None, *, max_queue: int, fallback: Fallback) -> None:
        """Go by these from here on; loads, placements and waits stay as they are.

        Args:
            policies: None: those there are stay, with what they remember.
            max_queue: whoever waits already goes on, be it too many.
            fallback: as at the start.
        """
        self._fallback = fallback
        self._line.limit = max_queue
        if policies is not None:
            self._roster.reprice(policies)
        self._line.regroup(reweigh=policies is not None)

    def can_serve(self, model: str | None = None) -> bool:
        """Whether the view has a pair or hybrid instance, be it full, for the model; None: for any model."""
        return any(pool.can_serve(self._fallback) for pool in self._roster.pools(model))

    def in_flight(self, instance: Instance) -> int:
        """Requests that still need the instance: computing a prompt, pinning its KV, or decoding."""
        load = self._roster.loads.get(instance.key)
        return 0 if load is None else load.in_flight

    def in_common(self, prefill_id: str, decode_id: str) -> int:
        """Requests that run on both instances (protocols: MindIE §9.2, query_tasks)."""
        return sum(lease.prefill.id == prefill_id and lease.decode.id == decode_id for lease in self._leases)

    def loads(self) -> Iterator[tuple[Instance, LoadView]]:
        """Every instance in the view, and those that have left it with requests still on them, with their loads."""
        for load in self._roster.loads.values():
            yield load.instance, load

    @property
    def queued(self) -> int:
        """Requests that wait for an instance."""
        return len(self._line)

    # --- the dispatcher's side

    async def place(self, request: Request, avoid: frozenset[str] = NOBODY) -> Lease:
        """Place a request; waits only if every instance that could serve it is full.

        Leave the lease's scope to give its load back. Await this directly, not through a task of its own, whose
        cancellation could lose a lease.

        Args:
            request: its model must be the canonical name.
            avoid: ids of instances that have failed the request.

        Raises:
            NoInstance: nothing in the view could serve it, also if the view becomes so while it waits.
            TooManyRequests: `max_queue` requests wait already.
            DeadlineExceeded: `schedule`.
        """
        lease = self.try_place(request, avoid)
        if lease is not None:
            return lease
        return await self._line.wait(request, avoid, self._clock())

    def try_place(self, request: Request, avoid: frozenset[str] = NOBODY) -> Lease | None:
        """Place a request at once; None if every instance that could serve it is full. Raises NoInstance."""
        if self._shared is not None:
            self._catch_up(self._shared)
        return self._seek(request, avoid)

    def _seek(self, request: Request, avoid: frozenset[str]) -> Lease | None:
        model = request.ask.model
        search = Search(self._roster.pricing, self._fallback, request)
        found, exists = search.best(self._roster.pools(model), avoid)
        if found is not None:
            return self._lease(found, request)
        if exists:
            return None
        raise NoInstance("no instances are available for this request", detail=f"model {model!r}")

    def move_decode(self, lease: Lease, request: Request, avoid: frozenset[str]) -> bool:
        """Give a placed request that has no output yet to another decode instance, its prefill being over.

        Returns:
            Whether there was one: free, a partner of the prefill instance, and none to avoid.
        """
        if lease.decode is lease.prefill:
            return False
        if self._shared is not None:
            self._catch_up(self._shared)
        search = Search(self._roster.pricing, self._fallback, request)
        seat = search.another_decode(self._roster.pools(request.ask.model), lease.prefill, lease.decode, avoid)
        if seat is None:
            return False
        lease.move(self._share(seat, request))
        return True

    def look_around(self) -> None:
        """Take in what other processes have given back, for the sake of requests that wait here."""
        if self._shared is not None:
            self._catch_up(self._shared)

    def _catch_up(self, shared: SharedLoads) -> None:
        """Take in what other processes have changed; whoever waits comes first."""
        if self._take_in(shared):
            self._line.serve()

    def _take_in(self, shared: SharedLoads) -> bool:
        """Rank anew what other processes have changed. Returns whether an instance was full and is no more."""
        freed = False
        for load in shared.refresh(self._clock()):
            if load.seat is not None:
                freed |= load.seat.refresh()
        return freed

    def _lease(self, found: Found, request: Request) -> Lease:
        prefill = None if found.cell is None else self._share(found.prefill, request)
        lease = Lease(prefill, self._share(found.decode, request), self, self._clock)
        self._leases.add(lease)
        if found.cell is not None and found.cell.turn() and found.cell.decode.offers:
            self._picked(found.cell.decode.offers[0][3])
        return lease

    def _share(self, seat: Seat, request: Request) -> Share:
        accounting = seat.pricing.policy.accounting
        tokens = accounting.tokens(request.ask)
        share = Share(seat.load, tokens, accounting.blocks(tokens, seat.instance.capacity.block_tokens))
        self._picked(seat)
        if self._shared is not None:
            self._shared.publish(seat.load)
        seat.pricing.chosen(seat.instance, request)
        return share

    def _picked(self, seat: Seat) -> None:
        seat.load.picked = self._roster.stamp()
        seat.refresh()

    def _weight(self, request: Request) -> int:
        accounting = self._roster.pricing[Role.PREFILL].policy.accounting
        if accounting.order == "fcfs":
            return 0
        tokens = accounting.tokens(request.ask)
        return tokens if accounting.order == "shortest" else -tokens

    # --- the leases' side

    def alike(self, lease: Lease, role: Role) -> list[tuple[Instance, int]]:
        """See `lease.Keeper`."""
        placed, other = (lease.prefill, lease.decode) if role is Role.PREFILL else (lease.decode, lease.prefill)
        if placed.role is not role:
            return []
        seats = [
            seat
            for seat in self._roster.seats()
            if (seat.instance.role, seat.instance.engine, seat.instance.group) == (role, placed.engine, placed.group)
            and seat.instance.model in (placed.model, None)
            and (linked(seat.instance, other) if role is Role.PREFILL else linked(other, seat.instance))
        ]
        return [(seat.instance, seat.load.requests) for seat in sorted(seats, key=lambda seat: seat.rank)]

    def share_like(self, share: Share, instance: Instance) -> Share | None:
        """See `lease.Keeper`."""
        load = self._roster.loads.get(instance.key)
        if load is None or load.seat is None:
            return None
        made = share.same_on(load)
        if made is not None:
            self._picked(load.seat)
            if self._shared is not None:
                self._shared.publish(load)
        return made

    def settle(self, load: Load) -> None:
        """See `lease.Keeper`."""
        if self._shared is not None:
            self._shared.publish(load)
        seat = load.seat
        if seat is not None:
            if not seat.steady and seat.refresh():
                self._line.serve()
        elif self._roster.forget(load) and self.on_idle is not None:
            self.on_idle(load.instance)

    def ended(self, lease: Lease) -> None:
        """See `lease.Keeper`."""
        self._leases.discard(lease)
