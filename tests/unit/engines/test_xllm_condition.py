"""Conditions of registered instances, and the roles of MIX ones."""

import math

import pytest

from coordinator.core.instance import Role
from coordinator.engines.xllm.condition import Condition, State
from coordinator.engines.xllm.mix import Figures, Targets, first_role, relabelled

P, D = Role.PREFILL, Role.DECODE
TARGETS = Targets(ttft_ms=1000, tpot_ms=50)


@pytest.fixture
def it():
    return Condition("one", 0.0, silence_s=3, suspect_s=15)


def tick(condition, now_s, expects=True):
    condition.tick(now_s, expects_beats=expects)
    return condition.state


def test_a_beating_instance_stays_active(it):
    for now_s in range(1, 100):
        it.beat(now_s)
        assert tick(it, now_s + 0.5) is State.ACTIVE
    assert it.usable
    assert not it.trouble


def test_silence_makes_a_leased_instance_suspect_and_a_beat_brings_it_back(it):
    it.beat(1)
    assert tick(it, 4) is State.ACTIVE
    assert tick(it, 4.1) is State.SUSPECT
    assert not it.usable
    assert "heartbeats" in it.trouble
    it.beat(5)
    assert it.state is State.ACTIVE


def test_an_instance_that_was_never_heard_has_more_time(it):
    assert tick(it, 11) is State.ACTIVE
    assert tick(it, 12.1) is State.SUSPECT


def test_silence_means_nothing_while_heartbeats_go_elsewhere(it):
    it.beat(1)
    for now_s in range(2, 100):
        assert tick(it, now_s, expects=False) is State.ACTIVE
    assert tick(it, 105) is State.ACTIVE, "it has to find us first"
    assert tick(it, 112) is State.SUSPECT


def test_a_lost_lease_with_a_live_instance_is_usable_while_it_beats(it):
    it.beat(1)
    it.lease_lost(2, alive=True)
    assert it.state is State.LEASE_LOST
    assert it.usable
    it.beat(4)
    assert tick(it, 6.9) is State.LEASE_LOST
    assert tick(it, 7.1) is State.SUSPECT
    it.beat(8)
    assert it.state is State.LEASE_LOST


def test_a_lost_lease_counts_although_heartbeats_go_elsewhere(it):
    it.lease_lost(2, alive=True)
    assert tick(it, 5.1, expects=False) is State.SUSPECT


def test_a_lost_lease_with_a_dead_instance_is_suspect_then_gone(it):
    it.lease_lost(2, alive=False)
    assert it.state is State.SUSPECT
    tick(it, 16.9)
    assert not it.given_up
    tick(it, 17)
    assert it.given_up
    assert it.gone


def test_registering_again_makes_it_active(it):
    it.lease_lost(2, alive=False)
    tick(it, 10)
    it.registered(11)
    assert it.state is State.ACTIVE
    assert it.leased
    assert tick(it, 12) is State.ACTIVE


def test_a_silent_instance_with_a_lease_loses_its_requests_and_is_not_forgotten(it):
    it.beat(1)
    tick(it, 5)
    tick(it, 20)
    assert it.given_up
    assert not it.gone
    it.beat(21)
    assert it.usable
    assert not it.given_up


def test_a_suspect_instance_whose_lease_ends_too_stays_suspect(it):
    it.beat(1)
    tick(it, 5)
    it.lease_lost(6, alive=True)
    assert it.state is State.SUSPECT
    assert not it.leased


# --- MIX


def one(name, role, load_ms=0.0, *, requests=1, mix=True):
    return Figures(name, role, mix, requests, load_ms)


def test_the_first_one_decodes_and_the_next_ones_prefill():
    assert first_role({}) is D
    assert first_role({"a": D}) is P
    assert first_role({"a": P}) is D


def test_prefill_helps_out_where_decode_is_late():
    figures = [one("a", P, 10, requests=5), one("b", P, 10, requests=2), one("c", D, 80)]
    assert relabelled(figures, TARGETS) == ("b", D)


def test_nobody_moves_while_one_decode_keeps_its_time():
    assert relabelled([one("a", P), one("b", P), one("c", D, 80), one("d", D, 40)], TARGETS) is None


def test_busy_prefill_is_spared_where_it_is_no_majority():
    figures = [one("a", P, 900), one("b", P, 900), one("c", D, 80), one("d", D, 80)]
    assert relabelled(figures, TARGETS) is None
    spare = [one("a", P, 100), one("b", P, 100), one("c", D, 80), one("d", D, 80)]
    assert relabelled(spare, TARGETS) == ("a", D)


def test_the_last_prefill_never_leaves():
    assert relabelled([one("a", P, 0, requests=0), one("c", D, 500)], TARGETS) is None
    assert relabelled([one("a", P, mix=False), one("b", P, mix=False), one("c", D, 500)], TARGETS) is None


def test_an_idle_decode_goes_back_but_never_the_last_one():
    assert relabelled([one("a", P), one("c", D, requests=0), one("d", D, requests=3)], TARGETS) == ("c", P)
    assert relabelled([one("a", P), one("c", D, requests=0)], TARGETS) is None
    assert relabelled([one("a", P), one("c", D, requests=0, mix=False), one("d", D)], TARGETS) is None


def test_instances_without_profiles_move_on_numbers_alone():
    assert relabelled([one("a", P, math.nan), one("b", P, math.nan), one("c", D, 80)], TARGETS) == ("a", D)
    assert relabelled([one("a", P, math.nan), one("b", P, math.nan), one("c", D, math.nan)], TARGETS) is None


def test_nobody_at_all():
    assert relabelled([], TARGETS) is None
