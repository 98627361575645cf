"""What every policy must do, whoever wrote it: `PolicyKit(make).check()` with a callable that makes a fresh policy."""

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from coordinator.core.instance import Address, Capacity, Instance, Role
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.core.view import ClusterView
from coordinator.policies import NO_DEMAND, Accounting, Demand, Policies, Policy
from coordinator.scheduler import Scheduler

CALLS_PER_REQUEST = 8
"""Costs asked for one request, from placement to end, by a policy that does not look at requests."""


@dataclass(frozen=True)
class Held:
    """A load that cannot be changed."""

    requests: int
    blocks: int
    tokens: int
    pinned: int
    picked: int
    lengths: dict = field(hash=False)


def held(dice):
    """A random load, idle in one of four cases."""
    lengths = Counter(dice.randrange(1, 5000) for _ in range(dice.choice([0, 1, 10, 60])))
    tokens = sum(length * count for length, count in lengths.items())
    return Held(lengths.total(), tokens // 128, tokens, dice.randrange(5), dice.randrange(10**6), dict(lengths))


def instance(role, number, **more):
    """One instance of a role."""
    return Instance(f"{role}{number}", role, Address("10.0.0.1", 1000 + number), "mindie", **more)


def request(dice, model="m"):
    """A request whose prompt nothing else shares."""
    prompt = dice.randbytes(dice.randrange(1, 2000)).hex()
    return Request(
        id=prompt[:8],
        api="openai",
        path="/v1/completions",
        query="",
        headers=((b"content-type", b"application/json"),),
        body=f'{{"prompt":"{prompt}"}}'.encode(),
        ask=Ask(stream=True, model=model, prompt_bytes=len(prompt)),
        arrived_s=0.0,
        deadlines=Deadlines(math.inf, math.inf, math.inf, 60.0),
    )


class Counted(Policy):
    """A policy that counts how often it is asked."""

    def __init__(self, policy):
        self.per_request = policy.per_request
        self.accounting = policy.accounting
        self.calls = 0
        self._policy = policy

    def cost(self, load, instance, demand):
        self.calls += 1
        return self._policy.cost(load, instance, demand)

    def chosen(self, instance, request):
        self._policy.chosen(instance, request)


class PolicyKit:
    """The checks; each may be called alone.

    Args:
        make: makes a policy; two that it makes must behave alike.
        seed: of all that is random here.
    """

    def __init__(self, make, seed=1):
        self._make = make
        self._seed = seed

    def check(self):
        """All checks."""
        self.is_a_policy()
        self.costs_are_finite_numbers()
        self.cost_changes_nothing()
        self.cost_is_deterministic()
        self.choices_are_deterministic()
        self.is_told_only_what_may_be_chosen()
        self.spreads_evenly_where_nothing_tells_instances_apart()
        self.asks_no_more_than_it_says()

    def is_a_policy(self):
        policy = self._make()
        assert isinstance(policy, Policy)
        assert isinstance(policy.per_request, bool)
        assert isinstance(policy.accounting, Accounting)
        assert self._make() is not policy, "one object for one role"

    def costs_are_finite_numbers(self):
        policy = self._make()
        for load, found, demand in self._cases(policy):
            cost = policy.cost(load, found, demand)
            assert isinstance(cost, int | float), f"{cost!r} for {found.id}"
            assert math.isfinite(cost), f"{cost!r} for {found.id}"

    def cost_changes_nothing(self):
        policy = self._make()
        for load, found, demand in self._cases(policy):
            before = copy.deepcopy((vars(policy), load, demand))
            policy.cost(load, found, demand)
            assert (vars(policy), load, demand) == before

    def cost_is_deterministic(self):
        first, second = self._make(), self._make()
        for load, found, demand in self._cases(first):
            costs = {first.cost(load, found, demand), first.cost(load, found, demand), second.cost(load, found, demand)}
            assert len(costs) == 1, costs

    def choices_are_deterministic(self):
        """The same traffic on the same cluster takes the same ways."""
        assert self._traffic(self._cluster()) == self._traffic(self._cluster())

    def is_told_only_what_may_be_chosen(self):
        """Nobody is chosen who may not be, however cheap: other group or model, full, suspect, tried before."""
        dice = random.Random(self._seed)
        roles = (Role.PREFILL, Role.DECODE)
        kinds = list(itertools.product("ab", "01"))
        sound = {
            (role, *kind): instance(role, n, model=kind[0], group=kind[1], capacity=Capacity(max_requests=3))
            for role in roles
            for n, kind in enumerate(kinds)
        }
        spare = [instance(role, 9 + n, model=kind[0], group=kind[1]) for role in roles for n, kind in enumerate(kinds)]
        scheduler = self._scheduler(sound.values(), suspect=spare)
        live, spilled = [], 0
        for _ in range(400):
            model, group = dice.choice(kinds)
            tried = frozenset(found.id for found in (*sound.values(), *spare) if found.group != group)
            full = {role: scheduler.in_flight(sound[role, model, group]) == 3 for role in roles}
            lease = scheduler.try_place(request(dice, model), tried)
            for found in (lease.prefill, lease.decode):
                assert (found.model, found.group) == (model, group)
                assert (found is sound[found.role, model, group]) is not full[found.role]
                spilled += full[found.role]
            live.append(lease)
            for ended in [other for other in live if dice.random() < 0.08]:
                ended.end()
                live.remove(ended)
        assert 0 < spilled < 800

    def spreads_evenly_where_nothing_tells_instances_apart(self):
        dice = random.Random(self._seed)
        for prefills, decodes in itertools.product((1, 2, 3, 4), repeat=2):
            members = [instance(Role.PREFILL, n) for n in range(prefills)] + [
                instance(Role.DECODE, n) for n in range(decodes)
            ]
            scheduler = self._scheduler(members)
            pairs = []
            for _ in range(12 * prefills * decodes):
                with scheduler.try_place(request(dice)) as lease:
                    pairs.append((lease.prefill.id, lease.decode.id))
            assert len(set(pairs)) == prefills * decodes, f"pairs that occur: {sorted(set(pairs))}"
            for side in zip(*pairs, strict=True):
                shares = Counter(side)
                assert max(shares.values()) - min(shares.values()) <= 1, shares

    def asks_no_more_than_it_says(self):
        """Without a look at requests a choice costs the same in a large cluster; else one question per instance."""
        dice = random.Random(self._seed)
        for size in (10, 300):
            members = [instance(role, n) for role in (Role.PREFILL, Role.DECODE) for n in range(size)]
            policies = Policies(Counted(self._make()), Counted(self._make()))
            scheduler = self._scheduler(members, policies=policies)
            for _ in range(20):
                policies.prefill.calls = policies.decode.calls = 0
                with scheduler.try_place(request(dice)) as lease:
                    lease.prefilled(0.0)
                    lease.decoding(0.0)
                for policy in (policies.prefill, policies.decode):
                    assert policy.calls <= (size if policy.per_request else CALLS_PER_REQUEST)

    def _scheduler(self, ready, *, suspect=(), policies=None):
        scheduler = Scheduler(policies or Policies(self._make(), self._make()), max_queue=0, clock=lambda: 0.0)
        scheduler.on_view(ClusterView(1, ready=tuple(ready), suspect=tuple(suspect)))
        return scheduler

    def _cases(self, policy):
        """Loads, instances and demands of all kinds."""
        dice = random.Random(self._seed)
        capacities = [
            Capacity(),
            Capacity(max_requests=10, total_blocks=1000, reported_used_blocks=400, block_tokens=16),
            Capacity(max_requests=0, total_blocks=0),
        ]
        for role, capacity, number in itertools.product(Role, capacities, range(10)):
            load = held(dice)
            demand = NO_DEMAND
            if policy.per_request:
                asked = request(dice)
                demand = Demand(asked, policy.accounting.tokens(asked.ask), load.requests + dice.randrange(3))
            yield load, replace(instance(role, number), capacity=capacity), demand

    def _cluster(self):
        return [instance(role, n) for role in (Role.PREFILL, Role.DECODE) for n in range(5)]

    def _traffic(self, members):
        dice = random.Random(self._seed)
        scheduler, ways, live = self._scheduler(members), [], []
        for _ in range(300):
            lease = scheduler.try_place(request(dice))
            ways.append((lease.prefill.id, lease.decode.id))
            live.append(lease)
            for other in [other for other in live if dice.random() < 0.1]:
                dice.choice([other.end, lambda other=other: other.prefilled(0.0)])()
        return ways
