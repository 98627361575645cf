"""Who may serve one model, and which prefill instance may hand over to which decode instance."""

from bisect import bisect_left, insort
from collections.abc import Collection
from math import gcd, lcm
from typing import Literal, TypeAlias

from coordinator.core.instance import Instance, Role

from .ranking import Ranking, Seat

Fallback = Literal["hybrid", "none"]
Excluded = Collection[str]
CellRank: TypeAlias = "tuple[int, float, int, Cell]"


def linked(prefill: Instance, decode: Instance) -> bool:
    """Whether KV can go from one to the other, as far as their peers are known (protocols: MindIE §9.1, §10.2)."""
    if prefill.peers is None and decode.peers is None:
        return True
    if prefill.peers is not None and decode.id in prefill.peers:
        return True
    return (decode.peers is not None and prefill.id in decode.peers) or prefill.id == decode.id


class Cell:
    """Prefill and decode instances of one engine and group: each of them may be paired with each, peers permitting."""

    __slots__ = ("_turns", "decode", "key", "pool", "prefill", "rank")

    def __init__(self, pool: "Pool", key: tuple[str, str | None]) -> None:
        self.pool = pool
        self.key = key
        self.prefill = Ranking(self)
        self.decode = Ranking(self)
        self.rank: CellRank | None = None
        """Rank of its best prefill instance, behind those of cells whose best are suspect; None: no pair to offer."""
        self._turns = 0

    def reranked(self) -> None:
        """Keep the pool's cells in the order of their best."""
        rank: CellRank | None = None
        if self.prefill.offers and self.decode.offers:
            tier, cost, picked, _ = self.prefill.offers[0]
            rank = (tier + self.decode.offers[0][0], cost, picked, self)
        if rank == self.rank:
            return
        cells = self.pool.cells
        if self.rank is not None:
            del cells[bisect_left(cells, self.rank)]
        if rank is not None:
            insort(cells, rank)
        self.rank = rank

    def restaffed(self) -> None:
        """Note that a member has come or gone."""
        self.reranked()
        self.pool.restaffed()

    def turn(self) -> bool:
        """Count a placement; True when decode's rotation must skip a turn.

        Two rotations whose lengths have a common factor would lock: with two prefill and two decode instances only two
        of the four pairs would ever occur. So each time both have come full circle, decode's begins one further on;
        everybody still has one turn in each circle.
        """
        ours = self.prefill.ready or len(self.prefill.members)
        theirs = self.decode.ready or len(self.decode.members)
        if gcd(ours, theirs) <= 1:
            return False
        self._turns += 1
        if self._turns < lcm(ours, theirs):
            return False
        self._turns = 0
        return True


class Pool:
    """The instances that accept one model: those of that name and those that pass any name through."""

    __slots__ = ("_all_cells", "_pairable", "cells", "hybrids", "named")

    def __init__(self) -> None:
        self._all_cells: dict[tuple[str, str | None], Cell] = {}
        self._pairable: bool | None = False
        self.cells: list[CellRank] = []
        """Cells with a pair to offer, best first."""
        self.hybrids = Ranking(self)
        self.named = 0
        """Instances here that have the model's name."""

    def add(self, seat: Seat) -> None:
        """Let an instance serve the model."""
        instance = seat.instance
        self.named += instance.model is not None
        if instance.role is Role.HYBRID:
            self.hybrids.add(seat)
            return
        key = (instance.engine, instance.group)
        cell = self._all_cells.get(key)
        if cell is None:
            cell = self._all_cells[key] = Cell(self, key)
        (cell.prefill if instance.role is Role.PREFILL else cell.decode).add(seat)

    def remove(self, seat: Seat) -> None:
        """Undo `add`."""
        instance = seat.instance
        self.named -= instance.model is not None
        if instance.role is Role.HYBRID:
            self.hybrids.remove(seat)
            return
        key = (instance.engine, instance.group)
        cell = self._all_cells[key]
        (cell.prefill if instance.role is Role.PREFILL else cell.decode).remove(seat)
        if not cell.prefill.members and not cell.decode.members:
            del self._all_cells[key]

    def cell_of(self, prefill: Instance) -> Cell | None:
        """Where the partners of a prefill instance are, be it in the view or not."""
        return self._all_cells.get((prefill.engine, prefill.group))

    def reranked(self) -> None:
        """Nothing depends on the order of hybrid instances."""

    def restaffed(self) -> None:
        """Forget what was found out about pairs."""
        self._pairable = None

    def uses_hybrids(self, fallback: Fallback) -> bool:
        """Whether its hybrid instances may be chosen."""
        return fallback == "hybrid" or not self._all_cells

    def can_serve(self, fallback: Fallback, not_prefill: Excluded = (), not_decode: Excluded = ()) -> bool:
        """Whether a pair or hybrid instance without these ids exists, be it full.

        Without ids this is looked up once for each change of members, so that a refusal costs next to nothing.
        """
        excluded = not_prefill or not_decode
        if excluded:
            pairable = self._has_pair(not_prefill, not_decode)
        else:
            if self._pairable is None:
                self._pairable = self._has_pair((), ())
            pairable = self._pairable
        if pairable:
            return True
        return self.uses_hybrids(fallback) and any(seat.instance.id not in excluded for seat in self.hybrids.members)

    def _has_pair(self, not_prefill: Excluded, not_decode: Excluded) -> bool:
        return any(
            linked(prefill.instance, decode.instance)
            for cell in self._all_cells.values()
            for prefill in cell.prefill.members
            if prefill.instance.id not in not_prefill
            for decode in cell.decode.members
            if decode.instance.id not in not_decode
        )
