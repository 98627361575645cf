"""Which instance of a pair takes the blame where either may be guilty, by what goes well and wrong elsewhere."""

import asyncio
import random

import pytest

from coordinator.core.errors import EngineFailed, Side


class Pairs:
    """Requests over pairs of a cluster; `works(prefill, decode)` says which of them can."""

    def __init__(self, rig, make, names):
        self.rig = rig(interval_s=10.0)
        self.by_name = {name: make(name) for name in names}
        for instance in self.by_name.values():
            self.rig.cluster.add(instance, source="file")
        self.ever_suspect = set()
        self.rig.cluster.subscribe(lambda view: self.ever_suspect.update(i.id for i in view.suspect))

    async def start(self):
        await self.rig.cluster.start()
        await asyncio.sleep(0.01)
        assert len(self.rig.ready()) == len(self.by_name)

    def fails(self, prefill, decode, *, doubted=True):
        error = EngineFailed(Side.DECODE, decode, "http_5xx")
        error.doubted = prefill if doubted else ""
        self.rig.cluster.charge(self.by_name[decode], error)

    def goes_well(self, prefill, decode):
        self.rig.cluster.credit(self.by_name[prefill])
        self.rig.cluster.credit(self.by_name[decode])

    def place(self, role, avoid):
        """As a scheduler would, drawn by lot: ready ones first."""
        tiers = (self.rig.ready(), self.rig.suspect(), self.by_name)
        able = [[name for name in tier if name[0] == role and name not in avoid] for tier in tiers]
        return random.choice(next(filter(None, able), [None]))

    def request(self, works):
        """One request with a second attempt; whether it took that."""
        pair = self.place("p", ()), self.place("d", ())
        if works(*pair):
            self.goes_well(*pair)
            return False
        self.fails(*pair)
        second = self.place("p", pair) or pair[0], self.place("d", pair) or pair[1]
        if works(*second):
            self.goes_well(*second)
        else:
            self.fails(*second)
        return True


FOUR = ("p1", "p2", "d1", "d2")


def scenario(run, rig, make, names, main):
    async def body():
        pairs = Pairs(rig, make, names)
        await pairs.start()
        result = main(pairs)
        await pairs.rig.cluster.aclose()
        return result

    return run(body)


@pytest.mark.parametrize("names", [FOUR, ("p1", "p2", "d1"), ("p1", "p2", "p3", "d1", "d2", "d3", "d4")])
@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_whose_kv_nobody_can_read_is_found(run, rig, make, names, seed):
    random.seed(seed)

    def main(pairs):
        again = sum(pairs.request(lambda prefill, _: prefill != "p1") for _ in range(300))
        assert pairs.rig.suspect() == ["p1"], "decodes are cleared by what goes well there"
        assert pairs.rig.row("p1")["reason"] == "requests failed: handoff failed"
        assert again < 24

    scenario(run, rig, make, names, main)


@pytest.mark.parametrize("seed", range(5))
def test_a_broken_decode_does_not_take_its_prefills_with_it(run, rig, make, seed):
    random.seed(seed)

    def main(pairs):
        again = sum(pairs.request(lambda _, decode: decode != "d1") for _ in range(300))
        assert pairs.ever_suspect == {"d1"}
        assert again < 24

    scenario(run, rig, make, FOUR, main)


def test_several_bad_prefills_are_found_one_after_the_other(run, rig, make):
    random.seed(1)

    def main(pairs):
        for _ in range(300):
            pairs.request(lambda prefill, _: prefill == "p3")
        assert pairs.rig.suspect() == ["p1", "p2"]

    scenario(run, rig, make, ("p1", "p2", "p3", "d1", "d2"), main)


def test_an_outage_of_the_only_decode_is_no_fault_of_those_that_have_failed_with_it(run, rig, make):
    def main(pairs):
        for prefill in ("p1", "p2") * 10:
            pairs.fails(prefill, "d1")
        pairs.goes_well("p2", "d1")
        assert pairs.rig.ready() == ["p1", "p2", "d1"]

    scenario(run, rig, make, ("p1", "p2", "d1"), main)


def test_what_goes_well_at_the_doubted_one_lays_the_whole_run_to_the_charged_one(run, rig, make):
    def main(pairs):
        for _ in range(5):
            pairs.fails("p1", "d1")
            pairs.fails("p2", "d1")
        pairs.goes_well("p2", "d2")
        assert pairs.rig.suspect() == ["d1"]
        pairs.goes_well("p2", "d1")
        assert pairs.rig.suspect() == []

    scenario(run, rig, make, FOUR, main)


def test_the_pair_itself_going_well_clears_both(run, rig, make):
    def main(pairs):
        for _ in range(5):
            pairs.fails("p1", "d1")
        pairs.goes_well("p1", "d1")
        assert pairs.rig.suspect() == []

    scenario(run, rig, make, FOUR, main)


def test_a_failure_without_a_doubt_is_the_charged_ones_alone(run, rig, make):
    def main(pairs):
        for _ in range(5):
            pairs.fails("p1", "d1", doubted=False)
        pairs.goes_well("p2", "d1")
        assert pairs.rig.suspect() == []

    scenario(run, rig, make, FOUR, main)


def test_old_failures_say_nothing(run, rig, make):
    async def main():
        pairs = Pairs(rig, make, FOUR)
        await pairs.start()
        for _ in range(5):
            pairs.fails("p1", "d1")
        await asyncio.sleep(61)
        pairs.goes_well("p2", "d1")
        assert pairs.rig.suspect() == []
        await pairs.rig.cluster.aclose()

    run(main)


def test_who_has_left_is_not_charged(run, rig, make):
    def main(pairs):
        for _ in range(5):
            pairs.fails("p1", "d1")
        pairs.rig.cluster.remove("p1")
        assert pairs.rig.state("p1") is None
        pairs.goes_well("p2", "d1")
        assert pairs.rig.ready() == ["p2", "d1", "d2"]

    scenario(run, rig, make, FOUR, main)
