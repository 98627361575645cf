"""The costs of MindIE's DIGS (protocols: MindIE §10.2)."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from coordinator.core.instance import Address, Capacity, Instance, Role
from coordinator.policies import NO_DEMAND, LoadBalance, LoadBalanceOptions


@dataclass(frozen=True)
class Held:
    """A load as policies see it."""

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    pinned: int = 0
    picked: int = 0
    lengths: dict = field(default_factory=dict)


def instance(role, *, used=0):
    return Instance("i", role, Address("h", 1), "mindie", capacity=Capacity(reported_used_blocks=used))


def running(*tokens):
    """A load of running sequences with these prompts."""
    return Held(requests=len(tokens), lengths=dict(Counter(tokens)))


def cost(held, role=Role.DECODE, *, used=0, tokens=0, busiest=0, **options):
    policy = LoadBalance(LoadBalanceOptions(**options))
    demand = replace(NO_DEMAND, tokens=tokens, busiest=busiest) if policy.per_request else NO_DEMAND
    return policy.cost(held, instance(role, used=used), demand)


def test_prefill_counts_requests_and_blocks_and_nothing_else():
    assert cost(Held(requests=3, blocks=17, pinned=5), Role.PREFILL, used=1000) == 20


@pytest.mark.parametrize("role", [Role.DECODE, Role.HYBRID])
def test_decode_by_default_counts_reported_and_promised_blocks(role):
    assert cost(Held(requests=3, blocks=17), role, used=1000) == 1017


def test_each_weight():
    held = Held(requests=3, blocks=17)
    nothing = {"reported_cost": 0, "request_cost": 0, "block_cost": 0}
    assert cost(held, used=1000, **nothing) == 0
    assert cost(held, used=1000, **{**nothing, "reported_cost": 2}) == 2000
    assert cost(held, used=1000, **{**nothing, "request_cost": 2}) == 2 * (3 + 1)
    assert cost(held, used=1000, **{**nothing, "block_cost": 2}) == 34


def test_the_busiest_one_costs_one_more():
    options = {"busiest_cost": 10, "block_cost": 0}
    assert cost(Held(requests=4), busiest=5, **options) == 50
    assert cost(Held(requests=5), busiest=5, **options) == 60


def test_blocks_of_the_request_count_where_it_is_looked_at():
    assert cost(Held(blocks=4), tokens=129, sequence_cost=1, output_tokens=0) == 4 + 2 + 129


SEQUENCES = {"sequence_cost": 1, "output_tokens": 1000, "batch_size": 4, "small_batch": 1, "block_cost": 0}


def test_below_half_a_batch_sequences_are_summed():
    assert cost(running(10), tokens=7, busiest=1, **SEQUENCES) == 1010 + 7


def test_full_batches_last_as_long_as_their_longest():
    # sorted: 7 1010 1020 1030: one full batch
    assert cost(running(10, 20, 30), tokens=7, busiest=3, **SEQUENCES) == 4 * 1030


def test_a_small_rest_counts_half():
    # sorted: 7 1010 1020 1030 | 1041
    assert cost(running(10, 20, 30, 41), tokens=7, busiest=4, **SEQUENCES) == 4 * 1030 + 1041 // 2


def test_a_larger_rest_counts_whole():
    # sorted: 7 1010 1020 1030 | 1041 1050
    assert cost(running(10, 20, 30, 41, 50), tokens=7, busiest=5, **SEQUENCES) == 4 * 1030 + 2 * 1050


def test_equal_sequences_are_all_counted():
    assert cost(running(10, 10, 10, 10, 10, 10, 10), tokens=2000, busiest=7, **SEQUENCES) == 4 * 1010 + 4 * 2000


def test_half_a_batch_is_the_border():
    assert cost(running(10, 20), tokens=7, busiest=1, **SEQUENCES) == 1010 + 1020 + 7
    assert cost(running(10, 20), tokens=7, busiest=2, **SEQUENCES) == 3 * 1020


@pytest.mark.parametrize(
    ("options", "per_request"),
    [({}, False), ({"request_cost": 5}, False), ({"sequence_cost": 0.5}, True), ({"busiest_cost": 1}, True)],
)
def test_only_costs_that_look_at_the_request_score_everybody(options, per_request):
    assert LoadBalance(LoadBalanceOptions(**options)).per_request is per_request


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_cost", -1),
        ("busiest_cost", float("nan")),
        ("reported_cost", "1"),
        ("request_cost", None),
        ("block_cost", True),
        ("output_tokens", 1.5),
        ("batch_size", 0),
        ("small_batch", -1),
        ("bytes_to_tokens", -0.1),
        ("order", "last"),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        LoadBalanceOptions(**{name: value})
