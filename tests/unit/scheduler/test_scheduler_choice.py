"""Who may be chosen."""

import pytest
from scheduler_world import fleet, instance, pair, request, scheduler, see, series

from coordinator.core.errors import NoInstance


def reachable(made, asked=None, avoid=frozenset(), count=12):
    """The set of pairs that a number of requests in series get."""
    found = set()
    for _ in range(count):
        with made.try_place(asked or request(), avoid) as lease:
            found.add(pair(lease))
    return found


def test_groups_are_never_mixed():
    members = [instance(f"{role}{n}", group=f"g{n}") for role in "pd" for n in range(3)]
    assert reachable(scheduler(*members)) == {("p0", "d0"), ("p1", "d1"), ("p2", "d2")}


def test_a_prefill_whose_group_has_no_decode_gets_nothing():
    members = [instance("p0", group="a"), instance("p1", group="b"), instance("d1", group="b")]
    assert reachable(scheduler(*members)) == {("p1", "d1")}


def test_no_complete_group_is_no_instance():
    made = scheduler(instance("p0", group="a"), instance("d1", group="b"))
    with pytest.raises(NoInstance):
        made.try_place(request())
    assert not made.can_serve()


def test_a_group_and_no_group_do_not_pair():
    with pytest.raises(NoInstance):
        scheduler(instance("p0", group="a"), instance("d0")).try_place(request())


def test_engines_are_never_mixed():
    members = [instance("p0", engine="mindie"), instance("d0", engine="vllm"), instance("d1", engine="mindie")]
    assert reachable(scheduler(*members)) == {("p0", "d1")}


@pytest.mark.parametrize(
    ("prefill_peers", "decode_peers", "fine"),
    [
        (None, None, True),
        ({"d0"}, None, True),
        (None, {"p0"}, True),
        ({"d0"}, {"p0"}, True),
        ({"d0"}, {"p9"}, True),
        ({"d9"}, {"p0"}, True),
        ({"d9"}, None, False),
        (None, {"p9"}, False),
        (set(), set(), False),
    ],
)
def test_peers_restrict_where_known(prefill_peers, decode_peers, fine):
    def frozen(peers):
        return None if peers is None else frozenset(peers)

    made = scheduler(instance("p0", peers=frozen(prefill_peers)), instance("d0", peers=frozen(decode_peers)))
    assert made.can_serve() is fine
    if fine:
        assert pair(made.try_place(request())) == ("p0", "d0")
    else:
        with pytest.raises(NoInstance):
            made.try_place(request())


def test_equal_ids_are_linked_without_peers():
    same = instance("d0", peers=frozenset())
    other = instance("p0", peers=frozenset())
    made = scheduler(other, type(same)(**{**_fields(same), "id": "p0"}))
    assert pair(made.try_place(request())) == ("p0", "p0")


def _fields(found):
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def test_one_address_with_two_roles_is_a_pair():
    prefill = instance("p0")
    decode = type(prefill)(**{**_fields(instance("d0")), "address": prefill.address})
    made = scheduler(prefill, decode)
    with made.try_place(request()) as lease:
        assert lease.prefill is prefill
        assert lease.decode is decode
        assert [load.requests for _, load in made.loads()] == [1, 1]


def test_the_search_goes_on_to_a_prefill_that_has_a_partner():
    members = [
        instance("p0", peers=frozenset({"d9"})),
        instance("p1", peers=frozenset({"d1"})),
        instance("d0", peers=frozenset()),
        instance("d1", peers=frozenset({"p1"})),
    ]
    assert reachable(scheduler(*members)) == {("p1", "d1")}


# --- models


def test_models_are_kept_apart():
    members = [instance(f"{role}{model}", model=model) for role in "pd" for model in "ab"]
    made = scheduler(*members)
    assert reachable(made, request("a")) == {("pa", "da")}
    assert reachable(made, request("b")) == {("pb", "db")}
    assert made.can_serve("a")
    with pytest.raises(NoInstance):
        made.try_place(request("c"))
    assert not made.can_serve("c")


def test_instances_without_a_model_pass_any_name_through():
    made = scheduler(*fleet(1, 1))
    assert reachable(made, request("whatever")) == {("p0", "d0")}
    assert reachable(made, request(None)) == {("p0", "d0")}


def test_an_instance_without_a_model_partners_a_named_one():
    made = scheduler(instance("p0"), instance("d0", model="a"))
    assert reachable(made, request("a")) == {("p0", "d0")}
    with pytest.raises(NoInstance):
        made.try_place(request("b"))


def test_a_request_without_a_model_never_mixes_models():
    members = [
        instance("pa", model="a"),
        instance("da", model="a"),
        instance("pb", model="b"),
        instance("db", model="b"),
    ]
    assert reachable(scheduler(*members), request(None)) == {("pa", "da"), ("pb", "db")}
    assert scheduler(*members).can_serve()


def test_a_model_that_leaves_takes_its_pool_with_it():
    wild = fleet(1, 1)
    made = scheduler(*wild, instance("pa", model="a"), instance("da", model="a"))
    assert reachable(made, request("a"), count=8) == {(p, d) for p in ("p0", "pa") for d in ("d0", "da")}
    see(made, *wild)
    assert reachable(made, request("a")) == {("p0", "d0")}
    see(made)
    with pytest.raises(NoInstance):
        made.try_place(request("a"))


def test_models_that_come_and_go_leave_nothing_behind():
    wild = fleet(1, 1)
    made = scheduler(*wild)
    for name in "abc":
        see(made, *wild, instance("p" + name, model=name), instance("h" + name, model=name))
        assert reachable(made, request(name)) == {("p0", "d0"), ("p" + name, "d0")}
    see(made, *wild)
    assert made._roster.pools(None) == made._roster.pools("c")
    assert [len(load.seat.homes) for _, load in made.loads()] == [1, 1]


# --- condition


def test_ready_goes_before_suspect_per_role():
    p0, p1, d0, d1 = fleet(2, 2)
    assert reachable(scheduler(p0, d0, suspect=[p1, d1])) == {("p0", "d0")}
    assert reachable(scheduler(p0, suspect=[p1, d0, d1])) == {("p0", "d0"), ("p0", "d1")}
    assert reachable(scheduler(suspect=[p0, d0])) == {("p0", "d0")}


def test_a_group_with_a_suspect_stands_behind_a_sound_one():
    sound = [instance("p0", group="a"), instance("d0", group="a")]
    made = scheduler(*sound, instance("p1", group="b"), suspect=[instance("d1", group="b")])
    assert reachable(made) == {("p0", "d0")}


def test_a_sound_pair_goes_before_a_linked_suspect():
    members = [instance("p0", peers=frozenset({"d1"})), instance("p1", peers=frozenset({"d0"}))]
    made = scheduler(*members, instance("d0"), suspect=[instance("d1")])
    assert reachable(made) == {("p1", "d0")}


def test_a_full_ready_one_gives_way_to_a_suspect_one():
    p0, d0 = fleet(1, 1, max_requests=1)
    made = scheduler(p0, d0, suspect=[instance("d1")])
    with made.try_place(request()) as first:
        first.prefilled(0.0)
        with made.try_place(request()) as second:
            assert pair(second) == ("p0", "d1")


# --- earlier attempts


def test_the_same_instance_is_not_taken_again_while_another_is_there():
    made = scheduler(*fleet(2, 2))
    assert reachable(made, avoid=frozenset({"p0", "d1"})) == {("p1", "d0")}
    assert reachable(made, avoid=frozenset({"p0"})) == {("p1", "d0"), ("p1", "d1")}


def test_what_failed_is_taken_again_only_for_the_role_that_has_no_other():
    assert reachable(scheduler(*fleet(1, 2)), avoid=frozenset({"p0", "d0"})) == {("p0", "d1")}
    assert reachable(scheduler(*fleet(2, 1)), avoid=frozenset({"p0", "d0"})) == {("p1", "d0")}
    assert reachable(scheduler(*fleet(1, 1)), avoid=frozenset({"p0", "d0"})) == {("p0", "d0")}


def test_another_one_is_waited_for_even_if_it_is_full():
    d0, d1 = instance("d0"), instance("d1", max_requests=1)
    made = scheduler(instance("p0"), d0, d1)
    held = made.try_place(request(), frozenset({"d0"}))
    assert pair(held) == ("p0", "d1")
    assert made.try_place(request(), frozenset({"d0"})) is None
    held.end()
    assert pair(made.try_place(request(), frozenset({"d0"}))) == ("p0", "d1")


def test_a_suspect_goes_before_one_that_failed_this_request():
    p0, d0, d1 = fleet(1, 2)
    assert reachable(scheduler(p0, d0, suspect=[d1]), avoid=frozenset({"d0"})) == {("p0", "d1")}


def test_another_group_goes_before_a_decode_that_failed_this_request():
    members = [instance(f"{role}{n}", group=f"g{n}") for role in "pd" for n in range(3)]
    assert reachable(scheduler(*members), avoid=frozenset({"d0"})) == {("p1", "d1"), ("p2", "d2")}


# --- capacity


def test_full_by_requests():
    made = scheduler(instance("p0"), instance("d0", max_requests=2))
    leases = [made.try_place(request()) for _ in range(2)]
    assert made.try_place(request()) is None
    assert made.can_serve()
    leases[0].end()
    assert made.try_place(request()) is not None


def test_full_by_blocks_is_above_the_limit_rate():
    made = scheduler(instance("p0", total_blocks=10), instance("d0"), policy="load_balance")
    held = made.try_place(request(tokens=11 * 128))  # 11 blocks: not above 10 x 1.1
    more = made.try_place(request(tokens=1))
    assert held is not None
    assert more is not None
    assert made.try_place(request(tokens=1)) is None
    more.prefilled(1.0)
    assert made.try_place(request(tokens=1)) is not None


def test_a_prompt_above_all_blocks_still_runs_alone():
    made = scheduler(instance("p0", total_blocks=1), instance("d0", total_blocks=1), policy="load_balance")
    with made.try_place(request(tokens=100_000)) as lease:
        assert lease is not None
        assert made.try_place(request(tokens=1)) is None


def test_blocks_are_no_limit_if_capacity_is_not_respected():
    made = scheduler(
        instance("p0", total_blocks=1),
        instance("d0", total_blocks=1),
        policy="load_balance",
        options={"respect_capacity": False},
    )
    assert all(made.try_place(request(tokens=10_000)) for _ in range(5))


# --- hybrid instances


def test_hybrids_alone_serve():
    made = scheduler(instance("h0"), instance("h1"))
    lease = made.try_place(request())
    assert lease.prefill is lease.decode
    assert reachable(made) == {("h0", "h0"), ("h1", "h1")}


def test_pairs_go_before_hybrids():
    made = scheduler(*fleet(1, 1, max_requests=1), instance("h0"))
    assert set(series(made, 5)) == {("p0", "d0")}
    with made.try_place(request()):
        assert pair(made.try_place(request())) == ("h0", "h0")


def test_hybrids_serve_where_no_pair_is_complete():
    made = scheduler(instance("p0"), instance("h0"))
    assert reachable(made) == {("h0", "h0")}


def test_a_hybrid_goes_before_a_pair_that_failed_the_request():
    made = scheduler(*fleet(1, 1), instance("h0"))
    assert reachable(made, avoid=frozenset({"p0"})) == {("h0", "h0")}
    assert reachable(made, avoid=frozenset({"h0", "p0", "d0"})) == {("p0", "d0")}


def test_without_fallback_hybrids_are_not_mixed_in():
    p0, d0, h0 = *fleet(1, 1, max_requests=1), instance("h0")
    made = scheduler(p0, d0, h0, fallback="none")
    with made.try_place(request()):
        assert made.try_place(request()) is None
    see(made, p0, h0)
    with pytest.raises(NoInstance):
        made.try_place(request())
    assert not made.can_serve()
    see(made, h0)
    assert reachable(made) == {("h0", "h0")}


def test_no_view_is_no_instance():
    made = scheduler()
    with pytest.raises(NoInstance) as refusal:
        made.try_place(request("m"))
    assert refusal.value.status == 503
    assert refusal.value.retry_after_s == 1
