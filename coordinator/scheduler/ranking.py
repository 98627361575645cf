"""The order in which instances of one role are offered, kept sorted so that a choice looks at the first few only."""

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from coordinator.core.instance import Instance
from coordinator.core.request import Request
from coordinator.policies import NO_DEMAND, Demand, Policy

from .load import Load

log = logging.getLogger("pd_coordinator.scheduler")

READY, SUSPECT = 0, 1
"""Tiers: a suspect instance stands behind every ready one."""

Rank: TypeAlias = "tuple[int, float, int, Seat]"
"""Tier, cost, last pick and the seat itself; the last pick is unique, so seats are never compared."""


class Pricing:
    """Asks one role's policy for costs, and stands between its faults and the scheduler."""

    __slots__ = ("_warned", "policy", "steady")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steady = policy.per_request or bool(getattr(policy, "constant", False))
        self._warned = False

    def cost(self, load: Load, instance: Instance, demand: Demand) -> float:
        """The policy's cost; infinite if it raises or gives no number, so that such an instance comes last."""
        try:
            cost = float(self.policy.cost(load, instance, demand))
            if not math.isnan(cost):  # which would break the order
                return cost
            reason = "it is not a number"
        except Exception as error:  # noqa: BLE001  (border to plug-ins)
            reason = repr(error)
        self._warn("cost", reason)
        return math.inf

    def chosen(self, instance: Instance, request: Request) -> None:
        """Tell a policy that looks at requests what became of this one."""
        if not self.policy.per_request:
            return
        try:
            self.policy.chosen(instance, request)
        except Exception as error:  # noqa: BLE001  (border to plug-ins)
            self._warn("chosen", repr(error))

    def scored(self, seats: Sequence["Seat"], request: Request) -> list[Rank]:
        """Seats ranked for one request, best first: for policies whose cost depends on it."""
        tokens = self.policy.accounting.tokens(request.ask)
        demand = Demand(request, tokens, max((seat.load.requests for seat in seats), default=0))
        return sorted(
            (seat.tier, self.cost(seat.load, seat.instance, demand), seat.load.picked, seat) for seat in seats
        )

    def _warn(self, what: str, reason: str) -> None:
        if not self._warned:
            self._warned = True
            name = type(self.policy).__name__
            log.warning("policy %s: %s failed, its instances come last (said once): %s", name, what, reason)


class Owner(Protocol):
    """What a ranking belongs to and tells of its changes."""

    def reranked(self) -> None:
        """The order, or who is in it, has changed."""
        ...

    def restaffed(self) -> None:
        """A member has come or gone."""
        ...


class Seat:
    """One instance of the view, with its load and its rank in the rankings where it stands.

    Attributes:
        steady: neither its cost nor whether it is full depends on its load: only being picked changes its rank.
    """

    __slots__ = ("full", "homes", "instance", "load", "pricing", "rank", "steady", "tier")

    def __init__(self, instance: Instance, tier: int, load: Load, pricing: Pricing) -> None:
        self.instance = instance
        self.tier = tier
        self.load = load
        self.pricing = pricing
        self.homes: list[Ranking] = []
        self.full = False
        self.steady = False
        self.rank: Rank = (tier, 0.0, load.picked, self)
        self.reprice(pricing)

    def reprice(self, pricing: Pricing) -> None:
        """Take the rank that it has by this policy."""
        self.pricing = pricing
        self.steady = False
        self.refresh()
        self.steady = pricing.steady and not pricing.policy.accounting.caps(self.instance.capacity)

    def refresh(self) -> bool:
        """Take the rank that belongs to the load as it is. Returns whether the instance was full and is no more."""
        load, was, was_full = self.load, self.rank, self.full
        if self.steady:
            cost, full = was[1], False
        else:
            policy = self.pricing.policy
            cost = 0.0 if policy.per_request else self.pricing.cost(load, self.instance, NO_DEMAND)
            full = policy.accounting.full(load, self.instance.capacity)
        if cost == was[1] and load.picked == was[2] and full == was_full:
            return False
        self.full = full
        self.rank = rank = (self.tier, cost, load.picked, self)
        for home in self.homes:
            if full or was_full:
                if not was_full:
                    home.withdraw(was)
                if not full:
                    home.offer(rank)
            else:
                home.exchange(was, rank)
            home.owner.reranked()
        return was_full and not self.full


class Ranking:
    """Seats of one role: all of them, and in order those that take requests."""

    __slots__ = ("members", "offers", "owner", "ready")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.members: set[Seat] = set()
        self.offers: list[Rank] = []
        self.ready = 0
        """Members of the first tier, full ones included."""

    def add(self, seat: Seat) -> None:
        """Let a seat stand here."""
        self.members.add(seat)
        self.ready += seat.tier == READY
        seat.homes.append(self)
        if not seat.full:
            self.offer(seat.rank)
        self.owner.restaffed()

    def remove(self, seat: Seat) -> None:
        """Undo `add`."""
        self.members.remove(seat)
        self.ready -= seat.tier == READY
        seat.homes.remove(self)
        if not seat.full:
            self.withdraw(seat.rank)
        self.owner.restaffed()

    def offer(self, rank: Rank) -> None:
        """Put a rank where it belongs."""
        insort(self.offers, rank)

    def withdraw(self, rank: Rank) -> None:
        """Take a rank out; it must be there."""
        del self.offers[bisect_left(self.offers, rank)]

    def exchange(self, old: Rank, new: Rank) -> None:
        """Put a rank in the place of another."""
        offers = self.offers
        if len(offers) == 1:
            offers[0] = new
        else:
            del offers[bisect_left(offers, old)]
            insort(offers, new)

    def ordered(self, request: Request, pricing: Pricing) -> Iterable[Rank]:
        """Those that take requests, best for this request first."""
        if pricing.policy.per_request:
            return pricing.scored([rank[3] for rank in self.offers], request)
        return self.offers
