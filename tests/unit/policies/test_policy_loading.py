"""Policies by name."""

import pytest

from coordinator.core.instance import Role
from coordinator.policies import POLICY_NAMES, LoadBalance, Policies, Policy, RoundRobin, load_policy


class Nearest(Policy):
    """A plug-in."""

    def __init__(self, factor=1):
        if factor < 0:
            raise ValueError("factor is below 0")
        self.factor = factor

    def cost(self, load, instance, demand):
        return load.requests * self.factor


class Unfit:
    """No policy: it has no cost."""


def test_built_in_policies():
    assert POLICY_NAMES == ("load_balance", "round_robin", "xllm_cache_aware", "xllm_slo")
    assert isinstance(load_policy("round_robin"), RoundRobin)
    assert isinstance(load_policy("load_balance"), LoadBalance)
    assert load_policy("round_robin") is not load_policy("round_robin")


def test_options_reach_the_policy():
    policy = load_policy("load_balance", {"request_cost": 3, "order": "shortest", "block_limit_rate": 2})
    assert policy.options.request_cost == 3
    assert (policy.accounting.order, policy.accounting.block_limit_rate) == ("shortest", 2)
    assert load_policy("round_robin", {"order": "longest"}).accounting.order == "longest"


def test_a_plug_in():
    policy = load_policy("test_policy_loading:Nearest", {"factor": 4})
    assert (type(policy).__name__, policy.factor) == ("Nearest", 4)
    assert not policy.per_request
    assert policy.chosen(None, None) is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "least_load",
            {},
            "unknown policy 'least_load'; known: load_balance, round_robin, xllm_cache_aware, .*, or module:Class",
        ),
        ("", {}, "unknown policy"),
        (
            "load_balance",
            {"request_costs": 1},
            "unknown option 'request_costs' of policy load_balance; known: .*request_cost",
        ),
        ("load_balance", {"request_cost": -1}, "policy load_balance: request_cost must be"),
        ("no_such_module:Policy", {}, "cannot be loaded: No module named"),
        ("test_policy_loading:Missing", {}, "cannot be loaded: .*Missing"),
        ("test_policy_loading:Nearest", {"colour": 1}, "cannot be loaded: .*colour"),
        ("test_policy_loading:Nearest", {"factor": -1}, "cannot be loaded: factor is below 0"),
        ("test_policy_loading:Unfit", {}, "is no policy"),
        (":", {}, "cannot be loaded"),
        ("..a:b", {}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_is_told_in_words(name, options, words):
    with pytest.raises(ValueError, match=words):
        load_policy(name, options)


def test_policies_by_role():
    prefill, decode, hybrid = (load_policy("round_robin") for _ in range(3))
    assert [Policies(prefill, decode).of(role) for role in Role] == [prefill, decode, prefill]
    assert Policies(prefill, decode, hybrid).of(Role.HYBRID) is hybrid
