"""What a placement holds, and when it gives it back."""

from itertools import permutations

import pytest
from scheduler_world import fleet, instance, numbers, pair, request, scheduler, see

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Role

STEPS = {
    "skipped": lambda lease: lease.skip_prefill(),
    "prefilled": lambda lease: lease.prefilled(1.0),
    "decoding": lambda lease: lease.decoding(2.0),
    "end": lambda lease: lease.end(),
}


def placed(*members):
    made = scheduler(*(members or fleet(1, 1)), policy="load_balance")
    return made, made.try_place(request(tokens=300))  # 3 blocks of 128


def test_the_stages_of_a_request():
    made, lease = placed()
    prefill, decode = lease.prefill, lease.decode
    assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
    lease.prefilled(1.0)
    assert numbers(made) == {"p0": (0, 0, 1), "d0": (1, 3, 0)}
    assert made.in_flight(prefill) == made.in_flight(decode) == 1
    lease.decoding(2.0)
    assert numbers(made) == {"d0": (1, 3, 0)}
    assert made.in_flight(prefill) == 0
    lease.end()
    assert numbers(made) == {}


def test_decode_may_speak_before_prefill_answers():
    made, lease = placed()
    lease.decoding(2.0)
    assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
    lease.prefilled(3.0)
    assert numbers(made) == {"d0": (1, 3, 0)}
    lease.end()
    assert numbers(made) == {}


def test_kv_that_has_left_prefill_is_not_pinned_there():
    made, lease = placed()
    lease.prefilled(1.0, pinned=False)
    assert lease.prefilled_s == 1.0
    assert numbers(made) == {"d0": (1, 3, 0)}
    assert made.in_flight(lease.prefill) == 0
    lease.decoding(2.0)
    lease.end()
    assert numbers(made) == {}


def test_a_request_that_needs_no_prefill():
    made, lease = placed()
    lease.prefill_sent("7")
    lease.skip_prefill()
    assert numbers(made) == {"d0": (1, 3, 0)}
    assert made.in_flight(lease.prefill) == 0
    lease.prefilled(1.0)
    assert lease.prefilled_s is None
    assert numbers(made) == {"d0": (1, 3, 0)}
    lease.decoding(2.0)
    lease.end()
    assert (lease.wire_ids, lease.decoding_s) == (["7"], 2.0)
    assert numbers(made) == {}


def test_a_prefill_that_is_over_cannot_be_skipped():
    made, lease = placed()
    lease.prefilled(1.0)
    lease.skip_prefill()
    assert lease.prefilled_s == 1.0
    assert numbers(made) == {"p0": (0, 0, 1), "d0": (1, 3, 0)}
    lease.end()


@pytest.mark.parametrize("names", [order for size in (1, 2, 3, 4) for order in permutations(STEPS, size)])
def test_everything_is_given_back_once_in_any_order(names):
    made, lease = placed()
    with made.try_place(request(tokens=300)) as other:
        with lease:
            for name in (*names, *names):
                STEPS[name](lease)
        for step in STEPS.values():
            step(lease)
        assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
        other.prefilled(1.0)
        assert numbers(made) == {"p0": (0, 0, 1), "d0": (1, 3, 0)}
    assert numbers(made) == {}


def test_the_scope_gives_back_when_it_is_left_by_an_error():
    made, lease = placed()
    with pytest.raises(KeyError), lease:
        raise KeyError
    assert numbers(made) == {}


@pytest.mark.parametrize("names", [(), ("prefilled",), ("decoding", "prefilled"), ("prefilled", "decoding")])
def test_a_hybrid_has_one_share_to_the_end(names):
    made, lease = placed(instance("h0"))
    for name in names:
        STEPS[name](lease)
    assert numbers(made) == {"h0": (1, 3, 0)}
    assert made.in_flight(lease.prefill) == 1
    lease.end()
    assert numbers(made) == {}


def test_times_and_wire_ids_are_kept_for_whoever_accounts():
    made, lease = placed()
    assert lease.placed_s == 100.0
    assert (lease.sent_s, lease.prefilled_s, lease.decoding_s, lease.ended_s) == (None,) * 4
    made._clock.now_s = 101.0
    lease.prefill_sent("1")
    made._clock.now_s = 102.0
    lease.prefill_sent("2")
    lease.prefilled(103.0)
    lease.prefilled(104.0)
    lease.decoding(105.0)
    lease.decoding(106.0)
    made._clock.now_s = 107.0
    lease.end()
    made._clock.now_s = 108.0
    lease.end()
    lease.prefill_sent("3")
    assert lease.wire_ids == ["1", "2"]
    assert (lease.sent_s, lease.prefilled_s, lease.decoding_s, lease.ended_s) == (101.0, 103.0, 105.0, 107.0)


def test_what_comes_after_the_end_leaves_no_time():
    _, lease = placed()
    lease.end()
    lease.prefilled(1.0)
    lease.decoding(1.0)
    assert lease.prefilled_s is None
    assert lease.decoding_s is None


# --- the ledger over changes of view


def test_load_outlives_refreshed_records():
    made, lease = placed()
    see(made, *fleet(1, 1, used=7))
    assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
    assert [found.capacity.reported_used_blocks for found, _ in made.loads()] == [7, 7]
    lease.end()
    assert numbers(made) == {}


def test_an_instance_that_comes_back_has_its_live_load_still():
    made, lease = placed()
    see(made)
    assert made.in_flight(lease.decode) == 1
    see(made, *fleet(1, 1))
    assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
    lease.end()
    assert numbers(made) == {}
    assert len(list(made.loads())) == 2


def test_loads_of_those_that_left_idle_are_forgotten():
    made, lease = placed()
    lease.end()
    see(made)
    assert list(made.loads()) == []


def test_on_idle_tells_when_a_draining_prefill_is_needed_no_more():
    made, lease = placed()
    idle = []
    made.on_idle = idle.append
    other = made.try_place(request())
    see(made, lease.decode)
    for step in (lease.prefilled, other.prefilled, lease.decoding):
        step(1.0)
        assert idle == []
    assert made.in_flight(lease.prefill) == 1
    other.decoding(1.0)
    assert idle == [lease.prefill]
    lease.end()
    other.end()
    assert idle == [lease.prefill]
    assert [found.id for found, _ in made.loads()] == ["d0"]


def test_on_idle_is_not_called_for_one_in_the_view_or_one_that_leaves_idle():
    made, lease = placed()
    idle = []
    made.on_idle = idle.append
    lease.end()
    see(made)
    see(made, *fleet(1, 1))
    made.try_place(request()).end()
    assert idle == []


def test_on_idle_may_publish_a_view():
    made, lease = placed()
    made.on_idle = lambda _: see(made, *fleet(2, 2))
    see(made)
    lease.end()
    assert {found.id for found, _ in made.loads()} == {"p0", "p1", "d0", "d1"}
    assert numbers(made) == {}


def test_an_old_lease_does_not_touch_a_newcomer_of_the_same_key():
    made, lease = placed()
    idle = []
    made.on_idle = idle.append
    lease.decoding(1.0)
    see(made, lease.decode)
    lease.prefilled(2.0)  # p0 is idle and forgotten
    see(made, *fleet(1, 1))
    newer = made.try_place(request(tokens=300))
    lease.end()
    assert numbers(made) == {"p0": (1, 3, 0), "d0": (1, 3, 0)}
    assert [found.id for found in idle] == ["p0"]
    newer.end()
    assert numbers(made) == {}


def test_an_error_of_on_idle_loses_no_load():
    made, lease = placed()
    see(made)

    def fail(found):
        raise RuntimeError(found.id)

    made.on_idle = fail
    with pytest.raises(RuntimeError):
        lease.end()
    assert list(made.loads()) == []


def test_requests_that_two_instances_have_in_common():
    made = scheduler(*fleet(1, 2))
    leases = [made.try_place(request()) for _ in range(3)]
    assert (made.in_common("p0", "d0"), made.in_common("p0", "d1"), made.in_common("p1", "d0")) == (2, 1, 0)
    for lease in leases:
        lease.end()
    assert made.in_common("p0", "d0") == 0


# --- another decode instance


def test_decode_is_exchanged_and_its_share_with_it():
    made, lease = placed(*fleet(1, 3))
    lease.prefilled(1.0, pinned=False)
    first = lease.decode
    assert made.move_decode(lease, request(tokens=300), frozenset({first.id}))
    second = lease.decode
    assert second.id != first.id
    assert numbers(made) == {second.id: (1, 3, 0)}
    assert made.move_decode(lease, request(tokens=300), frozenset({first.id, second.id}))
    assert len({first.id, second.id, lease.decode.id}) == 3
    lease.end()
    assert numbers(made) == {}


@pytest.mark.parametrize(
    "others",
    [
        [],
        [instance("d1", group="other")],
        [instance("d1", engine="vllm")],
        [instance("d1", model="other")],
        [instance("d1", max_requests=1)],
        [instance("h1")],
    ],
    ids=["nobody", "another group", "another engine", "another model", "a full one", "a hybrid one"],
)
def test_decode_stays_where_there_is_no_other(others):
    made = scheduler(*fleet(1, 1), *others)
    asked = request()
    taken = [made.try_place(asked) for _ in range(2)] if any(each.capacity.max_requests for each in others) else []
    lease = next((each for each in taken if each.decode.id == "d0"), None) or made.try_place(asked)
    before = numbers(made)
    assert not made.move_decode(lease, asked, frozenset({"d0"}))
    assert lease.decode.id == "d0"
    assert numbers(made) == before


def test_decode_is_exchanged_within_a_model_where_none_is_named():
    made = scheduler(instance("p0"), instance("d0", model="a"), instance("d1", model="b"), instance("d2", model="a"))
    lease = made.try_place(request(model=None))
    while lease.decode.model != "a":
        lease = made.try_place(request(model=None))
    first = lease.decode.id
    assert made.move_decode(lease, request(model=None), frozenset({first}))
    assert {first, lease.decode.id} == {"d0", "d2"}


def test_decode_is_exchanged_although_prefill_has_left():
    made, lease = placed(*fleet(1, 2))
    lease.prefilled(1.0, pinned=False)
    first = lease.decode.id
    see(made, *fleet(0, 2))
    assert made.move_decode(lease, request(), frozenset({first}))
    assert lease.decode.id != first


def test_a_hybrid_cannot_give_its_decode_away():
    made, lease = placed(instance("h0"), instance("h1"))
    assert not made.move_decode(lease, request(), frozenset({lease.decode.id}))


def test_whoever_waits_gets_the_place_that_was_left():
    made = scheduler(*fleet(1, 1, max_requests=9), instance("d1", max_requests=1), max_queue=5)
    lease = made.try_place(request())
    while lease.decode.id != "d1":
        lease = made.try_place(request())
    assert made.move_decode(lease, request(), frozenset({"d1"}))
    assert any(pair(made.try_place(request())) == ("p0", "d1") for _ in range(2))


def test_nobody_moves_a_lease_that_nobody_accounts_for():
    _, lease = placed(*fleet(1, 2))
    failure = EngineFailed(Side.DECODE, "d0", "reset")
    assert not lease.another_decode(failure)
    asked = []
    lease.mover = lambda error: asked.append(error) or True
    assert lease.another_decode(failure)
    lease.end()
    assert not lease.another_decode(failure)
    assert asked == [failure]


# --- an engine that chooses by itself


def test_candidates_are_those_that_could_have_been_placed_best_first():
    members = [
        *fleet(3, 2),
        instance("p9", engine="vllm"),
        instance("p8", group="other"),
        instance("p7", model="another"),
        instance("h0"),
    ]
    made = scheduler(*members, policy="load_balance")
    lease = made.try_place(request(tokens=300))
    assert pair(lease) == ("p0", "d0")
    prefills = lease.candidates(Role.PREFILL)
    assert [(one.id, requests) for one, requests in prefills] == [("p1", 0), ("p2", 0), ("p0", 1)]
    assert [one.id for one, _ in lease.candidates(Role.DECODE)] == ["d1", "d0"]
    assert lease.candidates(Role.HYBRID) == []


def test_candidates_are_linked_with_the_other_half():
    made = scheduler(*fleet(1, 1), instance("p1", peers=frozenset({"d9"})), instance("d2", peers=frozenset({"p0"})))
    lease = made.try_place(request())
    assert pair(lease) == ("p0", "d0")
    assert [one.id for one, _ in lease.candidates(Role.PREFILL)] == ["p0"]
    assert {one.id for one, _ in lease.candidates(Role.DECODE)} == {"d0", "d2"}


def test_the_load_of_a_role_goes_to_another():
    made, lease = placed(*fleet(2, 2))
    prefill, decode = (
        next(one for one, _ in lease.candidates(role) if one not in (lease.prefill, lease.decode))
        for role in (Role.PREFILL, Role.DECODE)
    )
    assert lease.hand_to(prefill)
    assert lease.hand_to(decode)
    assert pair(lease) == (prefill.id, decode.id)
    assert numbers(made) == {prefill.id: (1, 3, 0), decode.id: (1, 3, 0)}
    assert lease.hand_to(prefill), "to its holder: nothing changes"
    lease.prefilled(1.0)
    assert numbers(made) == {prefill.id: (0, 0, 1), decode.id: (1, 3, 0)}
    lease.end()
    assert numbers(made) == {}


def test_a_load_that_is_given_back_goes_nowhere():
    made, lease = placed(*fleet(2, 1))
    other = next(one for one, _ in lease.candidates(Role.PREFILL) if one is not lease.prefill)
    lease.prefilled(1.0, pinned=False)
    assert not lease.hand_to(other)
    assert not lease.hand_to(instance("h0"))
    lease.end()
    assert not lease.hand_to(lease.decode)
    assert numbers(made) == {}


def test_no_load_goes_to_who_has_left():
    made, lease = placed(*fleet(2, 1))
    other = next(one for one, _ in lease.candidates(Role.PREFILL) if one is not lease.prefill)
    see(made, *fleet(1, 1))
    assert not lease.hand_to(other)
    assert pair(lease) == ("p0", "d0")
    lease.end()


def test_who_was_chosen_is_the_last_to_be_chosen_next():
    made = scheduler(*fleet(3, 1))
    lease = made.try_place(request())
    assert lease.hand_to(instance("p1"))
    lease.end()
    assert [pair(made.try_place(request()))[0] for _ in range(3)] == ["p2", "p0", "p1"]
