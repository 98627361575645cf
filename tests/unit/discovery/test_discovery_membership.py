"""What sources name, and what of it the cluster takes."""

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster import Cluster, HealthSettings
from coordinator.core.instance import Address, Instance, Role
from coordinator.discovery.discovery import Discovery, Plan


def instance(ident, host=None, **more):
    role = {"p": Role.PREFILL, "d": Role.DECODE}[ident[0]]
    return Instance(ident, role, Address(host or f"{ident}.test", 8000), "vllm", **more)


class Scripted:
    """A source that says what the test wants."""

    def __init__(self):
        self.report = None
        self.ended = False

    async def run(self, report):
        self.report = report
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


class World:
    def __init__(self, cluster, *names):
        self.cluster = cluster
        self.sources = {name: Scripted() for name in names}
        self.discovery = Discovery(cluster)

    def plan(self, *names, version=1):
        return {name: Plan((name, version), lambda n=name: self.sources[n]) for name in names}

    async def __aenter__(self):
        self.discovery.apply(self.plan(*self.sources))
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_):
        await self.discovery.aclose()
        await self.cluster.aclose()

    def say(self, name, *instances, faults=None, trouble="", incomplete=False):
        self.sources[name].report.found(instances, faults or {}, trouble, incomplete=incomplete)

    def members(self):
        """Members that do not leave, with their sources."""
        return {row["id"]: row["source"] for row in self.cluster.describe() if row["state"] != "draining"}

    def row(self, name):
        return next(row for row in self.discovery.describe() if row["source"] == name)


@pytest.fixture
async def two(cluster):
    async with World(cluster, "a", "b") as world:
        yield world


async def test_each_source_has_its_own(two):
    two.say("a", instance("p0"), instance("d0"))
    two.say("b", instance("d1"))
    assert two.members() == {"p0": "a", "d0": "a", "d1": "b"}
    two.say("a", instance("d0"))
    assert two.members() == {"d0": "a", "d1": "b"}
    two.say("b")
    assert two.members() == {"d0": "a"}


async def test_one_that_has_requests_drains_before_it_goes(two):
    two.cluster.load["d0"] = 1
    two.say("a", instance("d0"))
    two.say("a")
    assert [(row["id"], row["state"]) for row in two.cluster.describe()] == [("d0", "draining")]
    two.cluster.load["d0"] = 0
    two.cluster.idle(instance("d0"))
    assert two.cluster.describe() == []


async def test_a_source_that_is_lost_keeps_its_instances_and_says_so_once(two, caplog):
    caplog.set_level(logging.INFO)
    two.say("a", instance("p0"))
    for _ in range(3):
        two.sources["a"].report.lost("no answer")
    assert two.members() == {"p0": "a"}
    row = two.row("a")
    assert (row["up"], row["reason"], row["instances"]) == (False, "no answer", 1)
    lines = [r.getMessage() for r in caplog.records if r.name == "pd_coordinator.discovery"]
    assert lines == [
        "discovery: a is up, 1 instances",
        "discovery: a has trouble, its 1 instances stay: no answer",
    ]
    two.sources["a"].report.lost("refused")
    two.say("a", instance("p0"))
    two.say("a", instance("p0"))
    lines = [r.getMessage() for r in caplog.records if r.name == "pd_coordinator.discovery"][2:]
    assert lines == [
        "discovery: a has trouble, its 1 instances stay: refused",
        "discovery: a is back, 1 instances",
    ]
    assert two.row("a")["up"]
    assert dict(two.discovery.read_up()) == {("a",): 1.0, ("b",): 0.0}
    assert dict(two.discovery.read_instances()) == {("a",): 1.0, ("b",): 0.0}


async def test_who_names_first_has_it_and_the_other_gets_it_when_it_is_let_go(two, caplog):
    two.say("a", instance("p0", "first"))
    two.say("b", instance("p0", "second"), instance("d0"))
    assert two.members() == {"p0": "a", "d0": "b"}
    assert two.row("b")["refused"] == {"p0": "a has named this id before"}
    two.say("b", instance("p0", "second"), instance("d0"))
    assert sum("p0 of b is not used: a has named this id before" in r.getMessage() for r in caplog.records) == 1
    two.say("a")
    assert two.members() == {"p0": "b", "d0": "b"}
    assert two.row("b")["refused"] == {}
    urls = [row["url"] for row in two.cluster.describe() if row["id"] == "p0" and row["state"] != "draining"]
    assert urls == ["http://second:8000"]


async def test_a_place_belongs_to_one_source_too(two):
    two.say("a", instance("p0", "same"))
    two.say("b", instance("p1", "same"))
    assert two.row("b")["refused"] == {"p1": "a has named its place, as p0, before"}
    two.say("a")
    assert two.members() == {"p1": "b"}


async def test_an_id_may_move_within_a_source(two):
    two.say("a", instance("p0", "same"))
    two.say("a", instance("p1", "same"))
    assert two.members() == {"p1": "a"}
    two.say("a", instance("p1", "other"))
    assert two.members() == {"p1": "a"}
    assert two.row("a")["refused"] == {}


async def test_doubles_within_a_source_are_told(two):
    two.say("a", instance("p0", "one"), instance("p0", "two"), instance("p1", "one"))
    assert two.members() == {"p0": "a"}
    assert two.row("a")["refused"] == {
        "p0 at http://two:8000": "this id stands for http://one:8000 already",
        "p1": "its place http://one:8000 is that of p0 already",
    }


async def test_the_file_takes_over_and_gives_back(two):
    two.say("a", instance("p0"), instance("p1"))
    two.cluster.replace("file", [instance("p0")])
    assert two.members() == {"p0": "file", "p1": "a"}
    assert two.row("a")["refused"] == {"p0": "file has named this id before"}
    held = two.cluster._roster.current["p0"]
    two.cluster.replace("file", [])
    assert two.members() == {"p0": "a", "p1": "a"}
    assert two.cluster._roster.current["p0"] is held  # its links and its state are what they were


async def test_what_was_removed_by_hand_stays_away_until_its_source_has_dropped_it(two):
    two.say("a", instance("p0"), instance("p1"))
    two.cluster.remove("p0")
    two.say("a", instance("p0"), instance("p1"), instance("d0"))
    two.cluster.replace("file", [instance("d9")])
    assert two.members() == {"p1": "a", "d0": "a", "d9": "file"}
    assert two.row("a")["refused"] == {"p0": "removed by hand"}
    two.say("a", instance("p1"))
    two.say("a", instance("p0"), instance("p1"))
    assert two.members() == {"p0": "a", "p1": "a", "d9": "file"}


async def test_a_new_start_of_what_was_removed_by_hand_counts(two):
    two.say("a", instance("p0", "old"))
    two.cluster.remove("p0")
    two.say("a", instance("p0", "new"))
    assert two.members() == {"p0": "a"}


async def test_drained_by_hand_stays_drained(two):
    two.say("a", instance("p0"))
    two.cluster.drain("p0")
    two.say("a", instance("p0"), instance("d0"))
    assert {row["id"]: row["state"] for row in two.cluster.describe()}["p0"] == "draining"


async def test_added_by_hand_before_is_left_to_who_added_it(two):
    two.cluster.add(instance("p0"), source="api")
    two.say("a", instance("p0"))
    assert two.members() == {"p0": "api"}
    two.cluster.remove("p0")
    assert two.members() == {"p0": "a"}


async def test_faults_are_listed_and_logged_once_each(two, caplog):
    for _ in range(2):
        two.say("a", instance("p0"), faults={f"x{number}": "it has no role" for number in range(25)})
    lines = [r.getMessage() for r in caplog.records if r.name == "pd_coordinator.discovery"]
    assert lines[0] == "discovery: x0 of a is not used: it has no role"
    assert lines[-1] == "discovery: 5 more of a are not used"
    assert len(lines) == 21
    assert two.row("a")["refused"]["x24"] == "it has no role"


async def test_an_engine_that_is_not_in_use_is_told(two):
    odd = Instance("p0", Role.PREFILL, Address("p0.test", 1), "odd")
    two.say("a", odd)
    assert "wants the engine 'odd'" in two.row("a")["refused"]["p0"]


async def test_sources_come_go_and_are_exchanged(two):
    two.say("a", instance("p0"))
    two.say("b", instance("d0"))
    old = two.sources["a"]
    two.sources["a"] = Scripted()
    two.discovery.apply(two.plan("a", version=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert two.members() == {"p0": "a"}  # those of the source that is gone are too, the other's stay
    assert old.ended
    old.report.found([instance("p9")], {})
    assert two.members() == {"p0": "a"}  # the old one is not heard any more
    two.say("a", instance("p1"))
    assert two.members() == {"p1": "a"}
    assert [row["source"] for row in two.discovery.describe()] == ["a"]


async def test_a_successor_that_could_not_read_a_part_yet_takes_nothing_away(two):
    two.say("a", instance("p0"), instance("p1", "one"), instance("d0"))
    two.sources["a"] = Scripted()
    two.discovery.apply(two.plan("a", "b", version=2))
    await asyncio.sleep(0)
    two.say("a", instance("p1", "two"), instance("p2", "one"), trouble="a file is broken", incomplete=True)
    assert two.members() == {"p0": "a", "p1": "a", "p2": "a", "d0": "a"}
    urls = {row["id"]: row["url"] for row in two.cluster.describe() if row["state"] != "draining"}
    assert urls["p1"] == "http://two:8000"
    two.say("a", instance("p1", "two"))
    assert two.members() == {"p1": "a"}


async def test_an_equal_plan_leaves_a_source_alone(two):
    two.say("a", instance("p0"))
    two.discovery.apply(two.plan("a", "b"))
    await asyncio.sleep(0)
    assert not two.sources["a"].ended
    assert two.members() == {"p0": "a"}


async def test_a_source_that_breaks_is_told_and_started_again(cluster, monkeypatch, caplog):
    monkeypatch.setattr("coordinator.discovery.discovery.REVIVE_S", 0.0)
    starts = []
    again = asyncio.Event()

    class Broken:
        async def run(self, report):
            starts.append(1)
            if len(starts) < 2:
                raise RuntimeError("odd")
            again.set()
            await asyncio.Event().wait()

    discovery = Discovery(cluster)
    discovery.apply({"x": Plan(1, Broken)})
    async with asyncio.timeout(5):
        await again.wait()
    (row,) = discovery.describe()
    assert (row["up"], row["reason"]) == (False, "it broke, the log says where")
    assert "discovery: x broke" in caplog.text
    await discovery.aclose()
    await discovery.aclose()


# --- whatever the order of events, the members are what was said last

IDS = ("p0", "p1", "d0", "d1")
SETS = st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(["x", "y"])), unique_by=lambda pair: pair[0])
STEPS = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(["a", "b", "c"]), SETS),
    st.tuples(st.just("lost"), st.sampled_from(["a", "b", "c"]), st.none()),
    st.tuples(st.just("file"), st.none(), SETS),
    st.tuples(st.just("idle"), st.none(), st.none()),
    st.tuples(st.just("busy"), st.sampled_from(IDS), st.none()),
)


@given(st.lists(STEPS, max_size=30))
def test_members_are_what_was_said_last(steps):
    asyncio.run(follow(steps))


async def follow(steps):
    load = {}
    cluster = Cluster(
        {"vllm": object()}, HealthSettings(), in_flight=lambda one: load.get(one.id, 0), log=logging.getLogger("quiet")
    )
    async with World(cluster, "a", "b", "c") as world:
        truth = {}
        for what, who, named in steps:
            instances = [instance(ident, f"{ident}-{host}") for ident, host in named or ()]
            if what == "say":
                world.say(who, *instances)
                truth[who] = instances
            elif what == "lost":
                world.sources[who].report.lost("away")
            elif what == "file":
                cluster.replace("file", instances)
                truth["file"] = [one for one in instances if world.members().get(one.id) == "file"]
            elif what == "busy":
                load[who] = 1
            else:
                load.clear()
                for one in cluster.known():
                    cluster.idle(one)
            check(world, truth)


def check(world, truth):
    said = {source: {one.id: one for one in instances} for source, instances in truth.items()}
    members = {row["id"]: row for row in world.cluster.describe() if row["state"] != "draining"}
    assert members.keys() == {ident for named in said.values() for ident in named}
    for ident, row in members.items():
        assert said[row["source"]][ident].url == row["url"]  # by one that names it, and just as it does
    for source in ("a", "b", "c"):
        held = {ident for ident, row in members.items() if row["source"] == source}
        row = world.row(source)
        assert row["instances"] == len(held)
        assert set(row["refused"]) == said.get(source, {}).keys() - held  # what it does not hold, it says
