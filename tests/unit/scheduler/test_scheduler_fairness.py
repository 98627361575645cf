"""Who is chosen of those that may be."""

from collections import Counter

import pytest
from scheduler_world import fleet, instance, pair, request, scheduler, see, series, shares

from coordinator.policies import Policies, load_policy
from coordinator.scheduler import Scheduler

BOTH = pytest.mark.parametrize("policy", ["round_robin", "load_balance"])


def even(counts, members):
    """Whether all of so many members have their share, give or take one."""
    assert len(counts) == members, counts
    assert max(counts.values()) - min(counts.values()) <= 1, counts


@BOTH
@pytest.mark.parametrize("prefills", range(1, 7))
@pytest.mark.parametrize("decodes", range(1, 7))
def test_each_has_its_share_and_all_pairs_occur(policy, prefills, decodes):
    made = scheduler(*fleet(prefills, decodes), policy=policy)
    pairs = series(made, 6 * prefills * decodes)
    for count in range(max(prefills, decodes), len(pairs)):
        even(shares(pairs[:count], 0), prefills)
        even(shares(pairs[:count], 1), decodes)
    assert len(set(pairs)) == prefills * decodes


@BOTH
def test_the_order_of_the_list_does_not_matter(policy):
    members = fleet(2, 3)
    made = scheduler(*members, policy=policy)
    pairs = []
    for turn in range(120):
        see(made, *(members[::-1] if turn % 2 else members))
        pairs += series(made, 1)
    even(shares(pairs, 0), 2)
    even(shares(pairs, 1), 3)
    assert len(set(pairs)) == 6


def test_refreshed_records_keep_their_turn():
    made = scheduler(*fleet(3, 2))
    pairs = []
    for used in range(90):
        see(made, *fleet(3, 2, used=used))
        pairs += series(made, 1)
    even(shares(pairs, 0), 3)
    even(shares(pairs, 1), 2)


def test_two_models_do_not_disturb_each_other():
    members = [instance(f"{role}{model}{n}", model=model) for role in "pd" for model in "ab" for n in range(2)]
    made = scheduler(*members)
    pairs = []
    for _ in range(40):
        pairs += series(made, 1, request("a")) + series(made, 1, request("b"))
    for model in "ab":
        mine = [entry for entry in pairs if entry[0][1] == model]
        even(shares(mine, 0), 2)
        even(shares(mine, 1), 2)
        assert len(set(mine)) == 4


def test_groups_of_different_size_give_each_prefill_its_share():
    members = [instance("p0", group="a"), instance("d0", group="a")]
    members += [instance(f"p{n}", group="b") for n in (1, 2)] + [instance("d1", group="b")]
    even(shares(series(scheduler(*members), 60), 0), 3)


@BOTH
def test_a_newcomer_takes_its_turn_and_no_more(policy):
    made = scheduler(*fleet(2, 2), policy=policy)
    series(made, 51)
    see(made, *fleet(3, 3))
    pairs = series(made, 60)
    even(shares(pairs, 0), 3)
    even(shares(pairs, 1), 3)
    assert Counter(pairs).most_common(1)[0][1] < 30


def test_one_that_was_suspect_is_not_made_up_to():
    p0, d0, d1 = fleet(1, 2)
    made = scheduler(p0, d0, suspect=[d1])
    series(made, 50)
    see(made, p0, d0, d1)
    even(shares(series(made, 10), 1), 2)


def test_round_robin_does_not_look_at_load():
    made = scheduler(*fleet(1, 2))
    leases = [made.try_place(request(prompt_bytes=1 if n % 2 else 10**6)) for n in range(20)]
    even(Counter(lease.decode.id for lease in leases), 2)


def test_a_long_prompt_counts_as_prefill_load():
    made = scheduler(*fleet(2, 2), policy="load_balance")
    big = made.try_place(request(prompt_bytes=130_000))
    small = [made.try_place(request(prompt_bytes=50)) for _ in range(10)]
    assert all(lease.prefill is not big.prefill for lease in small)
    for lease in (big, *small):
        lease.end()
    even(shares(series(made, 10), 0), 2)


def test_prefill_load_ends_with_prefill():
    made = scheduler(*fleet(2, 2), policy="load_balance")
    big = made.try_place(request(prompt_bytes=130_000))
    big.prefilled(1.0)
    even(shares(series(made, 10), 0), 2)


def test_a_decode_that_comes_back_is_filled_up_to_the_level_of_the_other_and_no_further():
    p0, d0, d1 = fleet(1, 2)
    made = scheduler(p0, d0, policy="load_balance")
    old = [made.try_place(request()) for _ in range(50)]
    see(made, p0, d0, d1)
    new = [made.try_place(request()) for _ in range(50)]
    assert Counter(lease.decode.id for lease in old) == {"d0": 50}
    assert Counter(lease.decode.id for lease in new) == {"d1": 50}
    more = [made.try_place(request()) for _ in range(20)]
    even(Counter(lease.decode.id for lease in more), 2)


def test_reported_blocks_count_for_decode():
    made = scheduler(instance("p0"), instance("d0", used=500), instance("d1", used=0), policy="load_balance")
    assert set(series(made, 10)) == {("p0", "d1")}


def test_roles_have_their_own_policies():
    made = Scheduler(Policies(prefill=load_policy("round_robin"), decode=load_policy("load_balance")), max_queue=0)
    see(made, *fleet(2, 2))
    big = made.try_place(request(prompt_bytes=10**6))
    later = [made.try_place(request(prompt_bytes=1)) for _ in range(10)]
    even(Counter(lease.prefill.id for lease in (big, *later)), 2)
    assert all(lease.decode is not big.decode for lease in later)


def test_costs_that_depend_on_the_request_score_everybody():
    made = scheduler(*fleet(2, 3), policy="load_balance", options={"busiest_cost": 1000, "block_cost": 0})
    held = [made.try_place(request()) for _ in range(5)]
    level = Counter(lease.decode.id for lease in held)
    busiest, count = level.most_common(1)[0]
    assert count == 2
    assert made.try_place(request()).decode.id != busiest
    even(shares(series(scheduler(*fleet(2, 3), policy="load_balance", options={"sequence_cost": 1}), 60), 1), 3)


def test_a_scored_choice_keeps_to_groups_and_tiers():
    members = [instance("p0", group="a"), instance("d0", group="a"), instance("p1", group="b")]
    made = scheduler(*members, suspect=[instance("d1", group="b")], policy="load_balance", options={"sequence_cost": 1})
    assert set(series(made, 10)) == {("p0", "d0")}


class Broken:
    """A plug-in gone wrong."""

    def __init__(self, policy, answer):
        self.per_request = policy.per_request
        self.accounting = policy.accounting
        self.answer = answer

    def cost(self, load, instance, demand):
        if instance.id.endswith("0"):
            return self.answer() if callable(self.answer) else self.answer
        return 1.0

    def chosen(self, instance, request):
        raise RuntimeError("chosen")


@pytest.mark.parametrize("answer", [float("nan"), "much", lambda: 1 / 0])
@pytest.mark.parametrize("per_request", [False, True])
def test_a_faulty_policy_puts_its_instances_last_and_breaks_nothing(answer, per_request, caplog):
    broken = Broken(load_policy("round_robin"), answer)
    broken.per_request = per_request
    made = Scheduler(Policies(broken, broken), max_queue=0)
    see(made, *fleet(2, 2))
    assert set(series(made, 10)) == {("p1", "d1")}
    see(made, *fleet(1, 1))
    assert series(made, 2) == [("p0", "d0")] * 2
    assert len(caplog.records) == 2  # once for each role
    assert all("Broken" in record.getMessage() for record in caplog.records)


def test_pairs_of_concurrent_requests_are_level():
    made = scheduler(*fleet(4, 4), policy="load_balance")
    leases = [made.try_place(request()) for _ in range(64)]
    assert set(Counter(lease.prefill.id for lease in leases).values()) == {16}
    assert set(Counter(lease.decode.id for lease in leases).values()) == {16}
    assert len({pair(lease) for lease in leases}) == 16
