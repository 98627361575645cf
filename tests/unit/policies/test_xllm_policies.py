"""The policies of xLLM: what is in caches, what profiles promise."""

import struct
from types import SimpleNamespace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.abilities import News
from coordinator.core.instance import Address, Instance, Role
from coordinator.core.request import Prepared
from coordinator.policies import NO_DEMAND, Demand, Policies, RoundRobin, inform, load_policy
from coordinator.policies.block_hashes import block_hashes
from coordinator.policies.profiles import DecodeProfile, PrefillProfile, least_squares

TTFT = tuple((length, 10 + 0.1 * length + 0.001 * length**2) for length in (100, 200, 400, 800))
TPOT = tuple((length, batch, 5 + 2 * batch + 0.01 * length * batch) for length in (100, 1000) for batch in (1, 4, 16))


def instance(name="p0", role=Role.PREFILL, **options):
    return Instance(name, role, Address("10.0.0.1", 8010), "xllm", options=options)


class Load:
    def __init__(self, *lengths, elsewhere=(0, 0)):
        self.requests = len(lengths) + elsewhere[0]
        self.tokens = sum(lengths) + elsewhere[1]
        self.blocks = self.requests
        self.lengths = {length: lengths.count(length) for length in lengths}
        self.pinned = 0
        self.picked = 0


def demand(tokens=0, hashes=(), busiest=0):
    request = replace(NO_DEMAND.request, prepared=Prepared((), tuple(hashes)))
    return Demand(request, tokens, busiest)


# --- names of blocks


def test_hashes_chain_over_full_blocks():
    ids = list(range(300))
    first = xxhash.xxh3_128_digest(struct.pack("<128i", *ids[:128]), seed=1024)
    native = struct.pack("<QQ", *reversed(struct.unpack(">QQ", first)))  # low64, high64 as they lie in memory
    second = xxhash.xxh3_128_digest(native + struct.pack("<128i", *ids[128:256]), seed=1024)[::-1]
    assert block_hashes(ids) == (native, second)
    assert block_hashes(ids[:256]) == (native, second)
    assert block_hashes(ids[:255]) == (native,)
    assert block_hashes(ids[:127]) == ()
    assert block_hashes([]) == ()


def test_a_block_is_named_for_all_that_stands_before_it():
    same = list(range(128))
    assert block_hashes([1] * 128 + same)[1] != block_hashes([2] * 128 + same)[1]


# --- cache aware


def aware(**news):
    policy = load_policy("xllm_cache_aware")
    policy.inform([news])
    return policy


def test_scores_are_real_numbers_and_everybody_is_a_candidate():
    hashes = [b"a", b"b", b"c", b"d"]
    policy = aware(p0=News(blocks=dict.fromkeys([b"a", b"b"])), p1=News(blocks=dict.fromkeys([b"a"])), p2=News())
    costs = [policy.cost(Load(), instance(name), demand(hashes=hashes)) for name in ("p0", "p1", "p2", "p3")]
    assert costs == [-0.5, -0.25, 0, 0]


def test_a_hole_in_the_chain_ends_the_match():
    policy = aware(p0=News(blocks=dict.fromkeys([b"a", b"c", b"d"])))
    assert policy.cost(Load(), instance(), demand(hashes=[b"a", b"b", b"c", b"d"])) == -0.25


def test_load_outweighs_a_small_match():
    policy = aware(
        p0=News(waiting=4, cache_usage=0.9, blocks=dict.fromkeys([b"a"])), p1=News(waiting=1, cache_usage=0.2)
    )
    wanted = demand(hashes=[b"a", b"b"], busiest=4)
    assert policy.cost(Load(), instance("p0"), wanted) > policy.cost(Load(), instance("p1"), wanted)


def test_without_cache_events_load_decides():
    policy = aware(p0=News(waiting=2, cache_usage=0.5), p1=News(waiting=2, cache_usage=0.4))
    assert policy.cost(Load(), instance("p0"), demand()) > policy.cost(Load(), instance("p1"), demand())


def test_what_was_placed_since_the_last_heartbeat_counts():
    policy = aware(p0=News(), p1=News())
    wanted = demand(busiest=2)
    assert policy.cost(Load(1, 1), instance("p0"), wanted) > policy.cost(Load(), instance("p1"), wanted)


def test_decode_does_not_look_at_the_cache():
    policy = aware(d0=News(blocks={b"a": None}))
    assert policy.cost(Load(), instance("d0", Role.DECODE), demand(hashes=[b"a"])) == 0


def test_without_news_it_is_a_policy_all_the_same():
    policy = load_policy("xllm_cache_aware")
    assert policy.cost(Load(1), instance(), demand(busiest=1)) > policy.cost(Load(), instance("p1"), demand(busiest=1))


def test_news_are_brought_to_policies_that_want_them():
    engine = SimpleNamespace(news={"p0": News(cache_usage=0.75)})
    policies = Policies(load_policy("xllm_cache_aware"), RoundRobin())
    assert inform(policies, [object(), engine]) is policies
    assert policies.prefill.cost(Load(), instance(), demand()) == 0.75


# --- profiles


def test_profiles_are_fitted():
    prefill = PrefillProfile.of(instance(ttft_profiling_data=TTFT))
    assert prefill.ttft_ms(300) == pytest.approx(10 + 30 + 90)
    decode = DecodeProfile.of(instance(tpot_profiling_data=TPOT))
    assert decode.tpot_ms(8, 4000) == pytest.approx(5 + 16 + 40)
    assert PrefillProfile.of(instance(ttft_profiling_data=[list(point) for point in TTFT])) == prefill


@pytest.mark.parametrize("points", [(), ((100, 5),), ((100, 5), (200, 6)), ((100, 5),) * 5, "nonsense"])
def test_too_few_points_are_no_profile(points):
    assert PrefillProfile.of(instance(ttft_profiling_data=points)) is None
    assert DecodeProfile.of(instance()) is None


def test_predictions_are_never_negative():
    falling = PrefillProfile.of(instance(ttft_profiling_data=((100, 30), (200, 20), (300, 10))))
    assert falling.ttft_ms(10_000) == 0


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=3))
def test_what_lies_on_a_plane_is_found_again(coefficients):
    rows = [(1.0, float(x), float(x * x % 7)) for x in range(8)]
    wanted = [sum(c * v for c, v in zip(coefficients, row, strict=True)) for row in rows]
    assert least_squares(rows, wanted) == pytest.approx(coefficients, abs=1e-6)


# --- SLO aware


def test_prefill_with_the_least_predicted_time_is_best():
    policy = load_policy("xllm_slo")
    given_ = instance(ttft_profiling_data=TTFT)
    busy, idle = Load(800), Load(100, 100)
    assert policy.cost(busy, given_, demand(100)) > policy.cost(idle, given_, demand(100))
    assert policy.cost(Load(), given_, demand(400)) == pytest.approx(10 + 40 + 160)


def test_requests_of_other_processes_count_by_their_sum():
    policy = load_policy("xllm_slo")
    given_ = instance(ttft_profiling_data=TTFT)
    assert policy.cost(Load(elsewhere=(2, 400)), given_, demand(100)) == pytest.approx(
        policy.cost(Load(200, 200), given_, demand(100))
    )


def test_decode_instances_within_the_target_are_all_as_good():
    policy = load_policy("xllm_slo", {"target_tpot_ms": 50})
    given_ = instance("d0", Role.DECODE, tpot_profiling_data=TPOT)
    assert policy.cost(Load(), given_, demand(100)) == policy.cost(Load(500), given_, demand(100)) == 0
    late, later = Load(*[1000] * 5), Load(*[1000] * 9)
    assert 50 < policy.cost(late, given_, demand(100)) < policy.cost(later, given_, demand(100))


def test_without_profiles_load_decides_and_known_ones_come_first():
    policy = load_policy("xllm_slo")
    for role in (Role.PREFILL, Role.DECODE):
        plain = instance("x", role)
        assert policy.cost(Load(5, 5), plain, demand(1)) > policy.cost(Load(5), plain, demand(1))
    known = instance(ttft_profiling_data=TTFT)
    assert policy.cost(Load(800), known, demand(1)) < policy.cost(Load(), instance("y"), demand(1))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="target_tpot_ms"):
        load_policy("xllm_slo", {"target_tpot_ms": -1})
