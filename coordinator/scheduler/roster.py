"""From views of the cluster to pools; keeps loads over changes of view."""

from collections.abc import Iterable, Mapping
from itertools import count

from coordinator.core.instance import Address, Instance, Role
from coordinator.core.view import ClusterView
from coordinator.policies import Policies

from .load import Load
from .pool import Pool
from .ranking import READY, SUSPECT, Pricing, Seat

Key = tuple[str, Role, Address]


class Roster:
    """Everybody in the view, by the models that they accept, and everybody who still has load."""

    def __init__(self, policies: Policies) -> None:
        self.pricing: Mapping[Role, Pricing] = {role: Pricing(policies.of(role)) for role in Role}
        self.loads: dict[Key, Load] = {}
        self._stamps = count(1)
        self._seats: dict[int, Seat] = {}
        self._any_model: list[Seat] = []
        self._others = Pool()
        self._pools: dict[str, Pool] = {}
        self._choices: dict[str | None, tuple[Pool, ...]] = {None: (self._others,)}

    def reprice(self, policies: Policies) -> None:
        """Rank everybody by other policies; loads and turns stay."""
        self.pricing = {role: Pricing(policies.of(role)) for role in Role}
        for seat in self._seats.values():
            seat.reprice(self.pricing[seat.instance.role])

    def stamp(self) -> int:
        """The number of the next pick."""
        return next(self._stamps)

    def seats(self) -> Iterable[Seat]:
        """Everybody in the view."""
        return self._seats.values()

    def pools(self, model: str | None) -> tuple[Pool, ...]:
        """The pools that accept a request's model; all of them if it names none."""
        choice = self._choices.get(model)
        return (self._others,) if choice is None else choice

    def update(self, view: ClusterView) -> None:
        """Make the roster that of the view. Costs little for instances that are the same objects as before.

        An instance keeps its load and its turn if its key stays, whatever else about it changes; one that joins takes
        its first turn after all others. Loads of instances that have left are forgotten once nothing is on them.
        """
        wanted = {id(instance): (instance, SUSPECT) for instance in view.suspect}
        wanted.update((id(instance), (instance, READY)) for instance in view.ready)
        left: list[Load] = []
        for ref, seat in list(self._seats.items()):
            entry = wanted.get(ref)
            if entry is None or entry[1] != seat.tier:
                left.append(self._leave(ref, seat))
        for instances, tier in ((view.ready, READY), (view.suspect, SUSPECT)):
            for instance in instances:
                if id(instance) not in self._seats:
                    self._enter(instance, tier)
        for load in left:
            self.forget(load)
        self._choices = {model: (pool,) for model, pool in self._pools.items()}
        self._choices[None] = (*self._pools.values(), self._others)

    def forget(self, load: Load) -> bool:
        """Drop a load that nothing is on and whose instance has left. Returns whether that was so."""
        if load.seat is not None or load.own.requests or load.own.pinned:
            return False
        del self.loads[load.instance.key]
        return True

    def _enter(self, instance: Instance, tier: int) -> None:
        load = self.loads.get(instance.key)
        if load is None:
            load = self.loads[instance.key] = Load(instance, self.stamp())
        elif load.seat is not None:  # two records of one instance: the later one counts
            self._leave(id(load.seat.instance), load.seat)
        load.instance = instance
        seat = load.seat = self._seats[id(instance)] = Seat(instance, tier, load, self.pricing[instance.role])
        if instance.model is not None:
            self._pool(instance.model).add(seat)
            return
        self._any_model.append(seat)
        self._others.add(seat)
        for pool in self._pools.values():
            pool.add(seat)

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool()
            for seat in self._any_model:
                pool.add(seat)
        return pool

    def _leave(self, ref: int, seat: Seat) -> Load:
        del self._seats[ref]
        seat.load.seat = None
        model = seat.instance.model
        if model is None:
            self._any_model.remove(seat)
            self._others.remove(seat)
            for pool in self._pools.values():
                pool.remove(seat)
        else:
            pool = self._pools[model]
            pool.remove(seat)
            if not pool.named:
                del self._pools[model]
                for other in self._any_model:
                    pool.remove(other)
        return seat.load
