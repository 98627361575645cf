"""What a placement holds, and when it gives it back."""

from itertools import permutations

import pytest
from scheduler_world import fleet, instance, numbers, request, scheduler, see

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
