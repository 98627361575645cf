"""Who comes, stays and goes: add, replace, drain, remove."""

import asyncio
import logging
from dataclasses import replace

import pytest

from coordinator.core.instance import Capacity


def in_started(run, r_main, rig, **settings):
    async def main():
        r = rig(**settings)
        await r.cluster.start()
        await r_main(r)
        await r.cluster.aclose()

    run(main)


def test_a_view_is_new_only_on_real_changes(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(0.1)
        assert [v.version for v in r.views] == [0, 1, 2]
        for _ in range(5):
            assert not r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(100)
        assert len(r.views) == 3
        r.cluster.replace("file", [make("p1"), make("d1", capacity=Capacity(max_requests=7))])
        assert r.views[-1].version == 3
        assert r.views[-1].ready[1].capacity.max_requests == 7
        r.cluster.drain("d1")
        r.cluster.drain("d1")
        assert r.views[-1].version == 4

    in_started(run, main, rig)


def test_the_same_list_again_and_again_changes_nothing(run, rig, make, failed, caplog):
    caplog.set_level(logging.INFO)

    async def main(r):
        full = [make("p1"), make("d1"), make("d2")]
        assert r.cluster.replace("controller", full).added == ("p1", "d1", "d2")
        await asyncio.sleep(0.5)
        r.load["d1"] = 5
        [_, _, d2] = r.cluster.view.ready
        for _ in range(3):
            r.cluster.charge(d2, failed())
        await asyncio.sleep(0.3)
        lines = len(caplog.records)
        for second in range(60):
            used = Capacity(reported_used_blocks=second)
            changes = r.cluster.replace("controller", [make("p1"), make("d1", capacity=used), make("d2")])
            assert not changes.added
            assert not changes.removed
            await asyncio.sleep(1)
            assert r.state("d2") == ("suspect" if second < 9 else "ready")
            assert r.row("d1")["in_flight"] == 5
        assert [c for c in r.engine.calls if c[0] == "attach"] == [("attach", i) for i in ("p1", "d1", "d2")]
        assert {i: len(t) for i, t in r.engine.check_times.items()} == pytest.approx({"p1": 7, "d1": 7, "d2": 7}, abs=1)
        assert len(caplog.records) == lines + 1, "only the end of the cool-down is told"

    in_started(run, main, rig)


def test_an_idle_member_goes_at_once_and_leaves_nothing(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(0.1)
        r.cluster.remove("d1")
        assert r.state("d1") is None
        assert [i.id for i, _ in r.cluster.states()] == ["p1"]
        assert r.ready() == ["p1"]
        await asyncio.sleep(100)
        assert r.engine.calls[-1] == ("detach", "d1")
        assert len(r.engine.check_times["d1"]) == 1
        with pytest.raises(KeyError):
            r.cluster.remove("d1")

    in_started(run, main, rig)


def test_a_busy_member_drains_first(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(0.1)
        [p1, d1] = r.cluster.view.ready
        r.load["d1"] = 2
        r.cluster.remove("d1")
        r.cluster.remove("d1")
        assert r.state("d1") == "draining"
        assert r.ready() == ["p1"]
        r.load["d1"] = 1
        r.cluster.idle(p1)
        r.cluster.idle(d1)
        await asyncio.sleep(50)
        assert r.state("d1") == "draining"
        assert len(r.engine.check_times["d1"]) > 4, "it is still checked"
        assert ("detach", "d1") not in r.engine.calls
        r.load["d1"] = 0
        r.cluster.idle(d1)
        assert r.state("d1") is None
        await asyncio.sleep(0.1)
        assert r.engine.calls[-1] == ("detach", "d1")

    in_started(run, main, rig)


def test_a_missed_idle_is_made_good_by_the_next_check(run, rig, make):
    async def main(r):
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.load["d1"] = 1
        r.cluster.remove("d1")
        r.load["d1"] = 0
        await asyncio.sleep(12)
        assert r.state("d1") is None

    in_started(run, main, rig)


def test_drain_and_resume_do_not_remove(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(0.1)
        r.cluster.drain("d1")
        assert r.state("d1") == "draining"
        r.cluster.replace("file", [make("p1"), make("d1")])
        await asyncio.sleep(30)
        assert r.state("d1") == "draining"
        r.cluster.resume("d1")
        assert r.ready() == ["p1", "d1"]
        r.cluster.set_offline(["d1", "nobody"])
        assert r.ready() == ["p1"]
        r.cluster.set_offline(["d1"], offline=False)
        assert r.ready() == ["p1", "d1"]
        r.load["d1"] = 1
        r.cluster.remove("d1")
        r.cluster.resume("d1")
        r.load["d1"] = 0
        await asyncio.sleep(30)
        assert r.ready() == ["p1", "d1"]
        for call in (r.cluster.drain, r.cluster.resume):
            with pytest.raises(KeyError):
                call("nobody")

    in_started(run, main, rig)


@pytest.mark.parametrize("how", ["add", "replace"])
def test_a_draining_member_that_comes_back_is_used_again(run, rig, make, how):
    async def main(r):
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.load["d1"] = 1
        r.cluster.remove("d1")
        again = make("d1", capacity=Capacity(max_requests=3))
        if how == "add":
            r.cluster.add(again, source="api")
        else:
            assert r.cluster.replace("file", [again]).changed == ("d1",)
        assert r.cluster.view.ready == (again,)
        r.load["d1"] = 0
        r.cluster.idle(again)
        await asyncio.sleep(30)
        assert r.ready() == ["d1"]
        assert r.engine.calls == [("attach", "d1")]

    in_started(run, main, rig)


def test_a_moved_id_is_accepted_while_the_old_one_drains(run, rig, make):
    async def main(r):
        old, new = make("d1", host="old"), make("d1", host="new")
        r.cluster.replace("file", [old])
        await asyncio.sleep(0.1)
        r.load["d1"] = 1
        changes = r.cluster.replace("file", [new])
        assert (changes.added, changes.removed) == (("d1",), ("d1",))
        await asyncio.sleep(0.1)
        assert r.cluster.view.ready == (new,)
        assert [(x["url"], x["state"]) for x in r.cluster.describe()] == [
            ("http://new:8000", "ready"),
            ("http://old:8000", "draining"),
        ]
        r.load["d1"] = 0
        r.cluster.idle(old)
        assert [x["url"] for x in r.cluster.describe()] == ["http://new:8000"]
        await asyncio.sleep(0.1)
        assert r.engine.calls == [("attach", "d1"), ("attach", "d1"), ("detach", "d1")]

    in_started(run, main, rig)


def test_a_changed_engine_is_another_member(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("d1")])
        await asyncio.sleep(0.1)
        r.load["d1"] = 1
        r.cluster.replace("file", [make("d1", engine="other")])
        await asyncio.sleep(0.1)
        assert [x["engine"] for x in r.cluster.describe()] == ["other", "vllm"]
        r.load["d1"] = 0
        r.cluster.idle(make("d1"))
        assert [x["engine"] for x in r.cluster.describe()] == ["other"]

    in_started(run, main, rig)


def test_links_at_one_place_never_overlap(run, rig, make):
    async def main(r):
        r.engine.links = False
        r.engine.detaching = asyncio.Event()
        r.cluster.replace("controller", [make("d1", host="one")])
        await asyncio.sleep(0.1)
        r.engine.watchers["d1"].linked()
        r.load["d1"] = 1
        r.cluster.replace("controller", [make("d2", host="one")])
        await asyncio.sleep(30)
        assert r.state("d2") == "joining"
        assert "before" in r.row("d2")["reason"]
        r.load["d1"] = 0
        r.cluster.idle(make("d1", host="one"))
        await asyncio.sleep(5)
        assert r.engine.calls == [("attach", "d1")], "its links are not closed yet"
        r.engine.detaching.set()
        await asyncio.sleep(0.1)
        assert r.engine.calls == [("attach", "d1"), ("detach", "d1"), ("attach", "d2")]

    in_started(run, main, rig)


def test_a_successor_of_one_that_still_waited_waits_too(run, rig, make):
    async def main(r):
        r.engine.detaching = asyncio.Event()
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.cluster.remove("d1")
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.cluster.remove("d1")
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(1)
        assert r.engine.calls == [("attach", "d1")]
        r.engine.detaching.set()
        await asyncio.sleep(0.1)
        assert r.engine.calls == [("attach", "d1"), ("detach", "d1"), ("attach", "d1")]

    in_started(run, main, rig)


def test_without_links_a_renamed_instance_is_used_at_once(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("d1", host="one")])
        await asyncio.sleep(0.1)
        r.load["d1"] = 1
        r.cluster.replace("file", [make("d2", host="one")])
        await asyncio.sleep(0.1)
        assert r.ready() == ["d2"]

    in_started(run, main, rig)


def test_addresses_may_be_swapped(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("d1", host="one"), make("d2", host="two")])
        await asyncio.sleep(0.1)
        changes = r.cluster.replace("file", [make("d1", host="two"), make("d2", host="one")])
        assert not changes.refused
        await asyncio.sleep(0.1)
        assert {i.id: i.address.host for i in r.cluster.view.ready} == {"d1": "two", "d2": "one"}

    in_started(run, main, rig)


def test_a_removed_member_that_comes_back_at_once_waits_for_its_detach(run, rig, make):
    async def main(r):
        r.engine.detaching = asyncio.Event()
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.cluster.remove("d1")
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(1)
        assert r.state("d1") == "joining"
        r.engine.detaching.set()
        await asyncio.sleep(0.1)
        assert r.engine.calls == [("attach", "d1"), ("detach", "d1"), ("attach", "d1")]
        assert r.ready() == ["d1"]

    in_started(run, main, rig)


def test_a_detach_that_hangs_is_given_up(run, rig, make, caplog):
    async def main(r):
        r.engine.detaching = asyncio.Event()
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(0.1)
        r.cluster.remove("d1")
        r.cluster.add(make("d1"), source="api")
        await asyncio.sleep(11)
        assert r.ready() == ["d1"]

    in_started(run, main, rig)
    assert "instance d1 could not be detached" in caplog.text


def test_a_member_that_goes_before_it_was_attached_is_not_detached(run, rig, make):
    async def main(r):
        r.cluster.add(make("d1"), source="api")
        r.cluster.remove("d1")
        await asyncio.sleep(1)
        assert r.engine.calls == []

    in_started(run, main, rig)


def test_conflicts_are_refused(run, rig, make):
    async def main(r):
        r.cluster.add(make("d1"), source="api")
        with pytest.raises(ValueError, match="id 'd1' is there already"):
            r.cluster.add(make("d1"), source="api")
        with pytest.raises(ValueError, match="id 'd1' is there already"):
            r.cluster.add(make("d1", host="elsewhere"), source="api")
        with pytest.raises(ValueError, match=r"decode instance at http://d1\.test:8000 is there already, as 'd1'"):
            r.cluster.add(make("d9", host="d1.test"), source="api")
        with pytest.raises(ValueError, match="engine 'nope', which is not in use"):
            r.cluster.add(make("d2", engine="nope"), source="api")
        changes = r.cluster.replace("file", [make("d1", host="elsewhere"), make("p1")])
        assert changes.added == ("p1",)
        assert list(changes.refused) == ["d1"]
        assert r.row("d1")["url"] == "http://d1.test:8000"

    in_started(run, main, rig)


def test_sources_do_not_touch_each_other(run, rig, make):
    async def main(r):
        r.cluster.replace("file", [make("p1"), make("d1")])
        r.cluster.add(make("d2"), source="api")
        r.cluster.replace("controller", [make("d3")])
        assert r.cluster.replace("file", [make("p1")]).removed == ("d1",)
        assert {row["id"]: row["source"] for row in r.cluster.describe()} == {
            "p1": "file",
            "d2": "api",
            "d3": "controller",
        }
        r.cluster.replace("file", [make("p1"), make("d2")])
        assert list(r.cluster.instances("file")) == ["p1", "d2"], "the file takes over what it names"
        r.cluster.replace("file", [make("p1")])
        assert r.state("d2") is None

    in_started(run, main, rig)


def test_models(run, rig, make):
    async def main(r):
        assert r.cluster.accepts("any"), "nobody is known who could judge"
        r.engine.replies["d1"] = ["told"]
        r.cluster.replace("file", [make("p1", model="m"), make("d1", model="m"), make("p2", model="n")])
        assert r.cluster.models() == ("m", "n")
        assert [r.cluster.accepts(name) for name in ("m", "n", "x", None)] == [True, True, False, True]
        r.cluster.replace("file", [make("p1", model="m"), make("d1")])
        assert r.cluster.accepts("x")
        await asyncio.sleep(0.1)
        assert r.cluster.models() == ("m", "told")
        assert r.row("d1")["model"] == "told"

    in_started(run, main, rig)


def test_ready_pair_says_why_not(run, rig, make):
    async def main(r):
        assert r.cluster.ready_pair() == (False, "no instance is known")
        r.cluster.replace("file", [make("p1", model="m"), make("d1", model="m")])
        found, sentence = r.cluster.ready_pair()
        assert not found
        assert "p1 is joining (not checked yet)" in sentence
        await asyncio.sleep(0.1)
        assert r.cluster.ready_pair() == (True, "prefill instance p1 and decode instance d1 take requests")
        assert r.cluster.ready_pair("m")[0]
        assert not r.cluster.ready_pair("n")[0]
        r.cluster.drain("d1")
        found, sentence = r.cluster.ready_pair()
        assert not found
        assert sentence == "no decode instance takes requests: d1 is draining (taken out by hand)"

    in_started(run, main, rig)


def test_before_the_start_members_come_and_go_without_tasks(run, rig, make):
    async def main():
        r = rig()
        r.cluster.add(make("d1"), source="file")
        r.cluster.remove("d1")
        r.cluster.add(make("d2", host="d1.test"), source="file")
        assert len(asyncio.all_tasks()) == 1
        await r.cluster.start()
        await asyncio.sleep(0.1)
        assert r.ready() == ["d2"]
        await r.cluster.aclose()
        assert len(asyncio.all_tasks()) == 1

    run(main)


def test_closing_ends_every_task_wherever_it_waits(run, rig, make):
    async def main():
        r = rig()
        await r.cluster.start()
        r.engine.detaching = asyncio.Event()
        r.engine.replies["d2"] = ["hang"]
        r.cluster.replace("file", [make("d1"), make("d2"), make("d3")])
        await asyncio.sleep(0.1)
        r.cluster.remove("d3")
        r.cluster.add(make("d3"), source="api")
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == 5
        assert {t.get_name() for t in asyncio.all_tasks()} > {f"instance:d{i}" for i in (1, 2, 3)} | {"leave:d3"}
        await r.cluster.aclose()
        assert len(asyncio.all_tasks()) == 1

    run(main)


def test_facts_about_strangers_are_ignored(run, rig, make, failed):
    async def main(r):
        stranger = replace(make("d1"), id="x")
        r.cluster.charge(stranger, failed())
        r.cluster.credit(stranger)
        r.cluster.idle(stranger)
        assert r.cluster.describe() == []

    in_started(run, main, rig)
