"""Finds the instances for one request in one pool: the pure part of a decision."""

from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from typing import NamedTuple

from coordinator.core.instance import Instance, Role
from coordinator.core.request import Request

from .pool import Cell, Excluded, Fallback, Pool, linked
from .ranking import Pricing, Rank, Seat


class Found(NamedTuple):
    """Where a request goes; without a cell it is a hybrid instance, which serves alone."""

    prefill: Seat
    decode: Seat
    cell: Cell | None


class Search:
    """One request's way through pools. Made for each decision, read only.

    Args:
        pricing: the policies by role.
        fallback: whether hybrid instances are taken where prefill or decode instances are there, but no pair is free.
        request: the request to place.
    """

    __slots__ = ("_fallback", "_pricing", "_request")

    def __init__(self, pricing: Mapping[Role, Pricing], fallback: Fallback, request: Request) -> None:
        self._pricing = pricing
        self._fallback = fallback
        self._request = request

    def best(self, pools: tuple[Pool, ...], avoid: Excluded) -> tuple[Found | None, bool]:
        """The best free choice, and whether any choice exists at all, be it full.

        An instance to avoid is taken only for a role in which the request has no other, be that other one full.
        """
        exclusions: Iterable[tuple[Excluded, Excluded]] = (((), ()),)
        if avoid:
            exclusions = ((avoid, avoid), ((), avoid), (avoid, ()), ((), ()))
        if len(pools) > 1:
            pools = tuple(sorted(pools, key=_head))
        for not_prefill, not_decode in exclusions:
            for pool in pools:
                if found := self._pair(pool, not_prefill, not_decode):
                    return found, True
            for pool in pools:
                if found := self._hybrid(pool, not_prefill or not_decode):
                    return found, True
            if any(pool.can_serve(self._fallback, not_prefill, not_decode) for pool in pools):
                return None, True
        return None, False

    def _hybrid(self, pool: Pool, excluded: Excluded) -> Found | None:
        if not pool.hybrids.offers or not pool.uses_hybrids(self._fallback):
            return None
        for *_, seat in pool.hybrids.ordered(self._request, self._pricing[Role.HYBRID]):
            if seat.instance.id not in excluded:
                return Found(seat, seat, None)
        return None

    def _pair(self, pool: Pool, not_prefill: Excluded, not_decode: Excluded) -> Found | None:
        """The best prefill instance that has a partner, with the best of its partners.

        A pair of ready instances goes before all others, whichever its costs.
        """
        if not pool.cells:
            return None
        tier, least_bad = pool.cells[0][0], None
        for rank, cell in self._prefills(pool):
            if rank[3].instance.id in not_prefill:
                continue
            partner = self._partner(rank[3].instance, cell, not_decode)
            if partner is None:
                continue
            both = rank[0] + partner[0]
            if both <= tier:
                return Found(rank[3], partner[3], cell)
            if least_bad is None or both < least_bad[0]:
                least_bad = (both, Found(rank[3], partner[3], cell))
        return least_bad[1] if least_bad else None

    def another_decode(
        self, pools: tuple[Pool, ...], prefill: Instance, failed: Instance, avoid: Excluded
    ) -> Seat | None:
        """The best free partner of a prefill instance other than those to avoid; None: there is none.

        Where the request names no model, it must be one of the same model as the one that has failed.
        """
        best: Rank | None = None
        for pool in pools:
            cell = pool.cell_of(prefill)
            model = failed.model if len(pools) > 1 else None
            rank = None if cell is None else self._partner(prefill, cell, avoid, model)
            if rank is not None and (best is None or rank < best):
                best = rank
        return None if best is None else best[3]

    def _partner(self, prefill: Instance, cell: Cell, excluded: Excluded, model: str | None = None) -> "Rank | None":
        for rank in cell.decode.ordered(self._request, self._pricing[Role.DECODE]):
            decode = rank[3].instance
            if decode.id not in excluded and linked(prefill, decode) and (model is None or decode.model == model):
                return rank
        return None

    def _prefills(self, pool: Pool) -> Iterator[tuple[Rank, Cell]]:
        cells = [entry[3] for entry in pool.cells]
        pricing = self._pricing[Role.PREFILL]
        if pricing.policy.per_request:
            homes = {rank[3]: cell for cell in cells for rank in cell.prefill.offers}
            for rank in pricing.scored(list(homes), self._request):
                yield rank, homes[rank[3]]
            return
        first = cells[0]
        if len(cells) == 1:
            for rank in first.prefill.offers:
                yield rank, first
            return
        head = first.prefill.offers[0]
        yield head, first
        for rank, cell in merge(*([(rank, cell) for rank in cell.prefill.offers] for cell in cells)):
            if rank[3] is not head[3]:
                yield rank, cell


def _head(pool: Pool) -> tuple[int, float, int]:
    """What to sort pools by: their best cell."""
    return pool.cells[0][:3] if pool.cells else (9, 0.0, 0)
