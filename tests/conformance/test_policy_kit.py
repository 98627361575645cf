"""Every policy in the table against the kit, and the kit against policies that are wrong."""

import random
from functools import partial

import pytest

pytest.register_assert_rewrite("policy_kit")

from policy_kit import PolicyKit  # noqa: E402

from coordinator.policies import POLICY_NAMES, Policy, RoundRobin, load_policy  # noqa: E402

VARIANTS = [(name, {}) for name in POLICY_NAMES] + [
    ("round_robin", {"order": "shortest", "count_blocks": False}),
    ("load_balance", {"count_blocks": False, "respect_capacity": False}),
    ("load_balance", {"request_cost": 7, "reported_cost": 0.5, "block_cost": 0}),
    ("load_balance", {"sequence_cost": 0.3, "busiest_cost": 2}),
]
CHECKS = [name for name in vars(PolicyKit) if not name.startswith("_") and name != "check"]


@pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=lambda value: value if isinstance(value, str) else len(value)
)
@pytest.mark.parametrize("check", CHECKS)
def test_policy_conforms(name, options, check):
    getattr(PolicyKit(partial(load_policy, name, options)), check)()


class Affine(Policy):
    """A policy with a memory: prompts that begin alike go to the same instance."""

    per_request = True

    def __init__(self):
        self.seen = {}

    def cost(self, load, instance, demand):
        return 0 if self.seen.get(demand.request.body[:40]) == instance.id else 1

    def chosen(self, instance, request):
        self.seen[request.body[:40]] = instance.id


def test_a_policy_with_a_memory_conforms():
    PolicyKit(Affine).check()


class NotANumber(RoundRobin):
    def cost(self, load, instance, demand):
        return float("nan") if load.requests > 5 else 0.0


class Endless(RoundRobin):
    def cost(self, load, instance, demand):
        return 1 / 1e-999 if load.pinned == 3 else 0.0


class Counting(RoundRobin):
    def __init__(self):
        super().__init__()
        self.asked = 0

    def cost(self, load, instance, demand):
        self.asked += 1
        return 0.0


class Moody(RoundRobin):
    def cost(self, load, instance, demand):
        return random.random()


class Partial(RoundRobin):
    """Has a favourite."""

    def cost(self, load, instance, demand):
        return 0.0 if instance.id.endswith("0") else 1.0


class Meddling(RoundRobin):
    def cost(self, load, instance, demand):
        load.lengths.clear()
        return 0.0


class Shapeless:
    per_request = False


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Shapeless, "is_a_policy"),
        (partial(lambda made: made, RoundRobin()), "is_a_policy"),
        (NotANumber, "costs_are_finite_numbers"),
        (partial(Endless), "costs_are_finite_numbers"),
        (Counting, "cost_changes_nothing"),
        (Meddling, "cost_changes_nothing"),
        (Moody, "cost_is_deterministic"),
        (Moody, "choices_are_deterministic"),
        (Partial, "spreads_evenly_where_nothing_tells_instances_apart"),
    ],
)
def test_the_kit_finds_what_is_wrong(wrong, check):
    with pytest.raises((AssertionError, ZeroDivisionError)):
        getattr(PolicyKit(wrong), check)()
