"""Measures of requests and of fullness."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from coordinator.core.instance import Capacity
from coordinator.core.request import Ask
from coordinator.policies import Accounting

ASK = Ask(stream=True, model=None, prompt_bytes=1000)


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2), (1000, 220), (1001, 221)])
def test_tokens_are_estimated_from_bytes_rounded_up(prompt_bytes, tokens):
    assert Accounting().tokens(replace(ASK, prompt_bytes=prompt_bytes)) == tokens


@pytest.mark.parametrize("tokens", [0, 7])
def test_counted_tokens_go_before_the_estimate(tokens):
    assert Accounting().tokens(replace(ASK, prompt_tokens=tokens)) == tokens


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 1), (1, 1), (128, 1), (129, 2), (1280, 10)])
def test_blocks_are_rounded_up(tokens, blocks):
    assert Accounting().blocks(tokens, 128) == blocks
    assert Accounting(count_blocks=False).blocks(tokens, 128) == 1


@pytest.mark.parametrize(
    ("capacity", "requests", "blocks", "full"),
    [
        (Capacity(), 10**6, 10**9, False),
        (Capacity(max_requests=2), 1, 10**9, False),
        (Capacity(max_requests=2), 2, 0, True),
        (Capacity(max_requests=0), 0, 0, True),
        (Capacity(total_blocks=100), 10**6, 110, False),
        (Capacity(total_blocks=100), 1, 111, True),
        (Capacity(max_requests=2, total_blocks=100), 2, 0, True),
        (Capacity(max_requests=2, total_blocks=100), 1, 111, True),
    ],
)
def test_full(capacity, requests, blocks, full):
    held = SimpleNamespace(requests=requests, blocks=blocks)
    assert Accounting(block_limit_rate=1.1).full(held, capacity) is full


def test_without_respect_for_capacity_only_requests_count():
    accounting = Accounting(respect_capacity=False)
    capacity = Capacity(max_requests=2, total_blocks=100)
    assert not accounting.full(SimpleNamespace(requests=1, blocks=10**6), capacity)
    assert accounting.full(SimpleNamespace(requests=2, blocks=0), capacity)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_to_tokens", -1),
        ("bytes_to_tokens", float("nan")),
        ("bytes_to_tokens", "0.22"),
        ("block_limit_rate", float("inf")),
        ("block_limit_rate", True),
        ("count_blocks", 1),
        ("respect_capacity", "yes"),
        ("order", "random"),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        Accounting(**{name: value})


@pytest.mark.parametrize(
    ("capacity", "respect", "caps"),
    [
        (Capacity(), True, False),
        (Capacity(max_requests=3), True, True),
        (Capacity(max_requests=3), False, True),
        (Capacity(total_blocks=3), True, True),
        (Capacity(total_blocks=3), False, False),
    ],
)
def test_what_can_never_be_full(capacity, respect, caps):
    assert Accounting(respect_capacity=respect).caps(capacity) is caps
