"""Checks, links and failures of members, over skipped time."""

import asyncio
import logging
from itertools import pairwise

import pytest

from coordinator.core.errors import EngineFailed, Side

DOWN = EngineFailed(Side.DECODE, "d1", "connection_refused", connecting=True)


def gaps(times):
    return [b - a for a, b in pairwise(times)]


def test_the_first_check_comes_at_once_and_then_one_in_each_interval(run, rig, make):
    async def main():
        r = rig()
        r.cluster.add(make("p1"), source="file")
        r.cluster.add(make("d1"), source="file")
        assert r.state("d1") == "joining"
        assert r.engine.calls == []
        await r.cluster.start()
        r.cluster.add(make("d2"), source="api")
        await asyncio.sleep(0.01)
        assert r.ready() == ["p1", "d1", "d2"]
        await asyncio.sleep(300)
        await r.cluster.aclose()
        for ident, times in r.engine.check_times.items():
            assert times[0] == pytest.approx(0)
            assert all(9 <= gap <= 11 for gap in gaps(times)), ident
            assert 27 <= len(times) <= 34
        spread = {round(gap, 6) for times in r.engine.check_times.values() for gap in gaps(times)}
        assert len(spread) > 40, "checks are spread"
        counts = {ident: len(times) for ident, times in r.engine.check_times.items()}
        await asyncio.sleep(60)
        assert counts == {ident: len(times) for ident, times in r.engine.check_times.items()}, "closed is closed"

    run(main)


def test_a_dead_instance_is_doubted_at_once_then_down_and_comes_back(run, rig, make, caplog):
    caplog.set_level(logging.INFO)

    async def main():
        r = rig()
        r.engine.replies["d1"] = [None, DOWN, DOWN, DOWN, DOWN, None]
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(11.1)
        assert r.state("d1") == "suspect"
        assert r.suspect() == ["d1"]
        await asyncio.sleep(5)
        assert r.state("d1") == "down", "a doubtful instance is checked faster"
        assert r.row("d1")["reason"] == "connection refused"
        assert r.cluster.view.ready == r.cluster.view.suspect == ()
        times = r.engine.check_times["d1"]
        assert gaps(times)[1:3] == pytest.approx([2, 2])
        await asyncio.sleep(40)
        assert r.ready() == ["d1"]
        assert all(gap >= 9 for gap in gaps(times)[3:])
        await r.cluster.aclose()

    run(main)
    lines = [r.getMessage() for r in caplog.records if "d1 is" in r.getMessage()]
    assert lines == [
        "instance d1 is joining: decode at http://d1.test:8000, from file",
        "instance d1 is ready",
        "instance d1 is suspect: connection refused",
        "instance d1 is down: connection refused",
        "instance d1 is ready",
    ]


def test_a_starting_instance_stays_joining_and_is_complained_about_once(run, rig, make, caplog):
    async def main():
        r = rig()
        r.engine.replies["d1"] = [*[DOWN] * 8, None]
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(60)
        assert r.state("d1") == "joining"
        assert r.views[-1].version == 0
        await asyncio.sleep(40)
        assert r.state("d1") == "ready", "one good check is enough"
        await r.cluster.aclose()

    run(main)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "instance d1 is not ready yet: connection refused"
    ]


def test_a_check_without_an_answer_fails_after_its_limit_and_keeps_the_pace(run, rig, make):
    async def main():
        r = rig(fail_after=1)
        r.engine.replies["d1"] = [None, "hang"]
        r.cluster.add(make("d1"), source="file")
        r.cluster.add(make("d2"), source="file")
        await r.cluster.start()
        await asyncio.sleep(100)
        assert r.row("d1")["reason"] == "no answer to the health check within 3 s"
        assert r.state("d2") == "ready", "nobody waits for another's check"
        assert all(9 <= gap <= 11 for gap in gaps(r.engine.check_times["d1"]))
        await r.cluster.aclose()

    run(main)


def test_an_odd_reply_is_a_failed_check_logged_once(run, rig, make, caplog):
    async def main():
        r = rig()
        r.engine.replies["d1"] = [None, *[ValueError("garbage")] * 6, None]
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(45)
        assert r.state("d1") == "down"
        await asyncio.sleep(60)
        assert r.state("d1") == "ready"
        await r.cluster.aclose()

    run(main)
    assert len([r for r in caplog.records if r.exc_info]) == 1


def test_a_failed_connection_is_checked_at_once_but_not_again_and_again(run, rig, make, failed):
    async def main():
        r = rig()
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(5)
        [d1] = r.cluster.view.ready
        for _ in range(50):
            r.cluster.charge(d1, failed("connection_refused", connecting=True))
        assert r.suspect() == ["d1"]
        await asyncio.sleep(0.1)
        assert gaps(r.engine.check_times["d1"]) == pytest.approx([5], abs=0.01)
        for _ in range(10):
            r.cluster.charge(d1, failed("connection_refused", connecting=True))
            await asyncio.sleep(0.05)
        assert len(r.engine.check_times["d1"]) == 2
        await asyncio.sleep(1.6)
        assert gaps(r.engine.check_times["d1"])[1:] == pytest.approx([2], abs=0.01)
        await asyncio.sleep(20)
        assert r.ready() == ["d1"], "good checks bring it back"
        await r.cluster.aclose()

    run(main)


def test_failing_requests_make_it_suspect_for_a_while_never_down(run, rig, make, failed):
    async def main():
        r = rig()
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(1)
        [d1] = r.cluster.view.ready
        seen = []
        r.cluster.subscribe(lambda view: seen.append((asyncio.get_running_loop().time(), bool(view.ready))))
        seen.clear()
        for _ in range(3):
            r.cluster.charge(d1, failed())
        assert r.row("d1")["reason"] == "requests failed: reset"
        await asyncio.sleep(30)
        assert seen == [(pytest.approx(1, abs=0.01), False), (pytest.approx(11, abs=0.01), True)]
        r.cluster.charge(d1, failed())
        assert r.suspect() == ["d1"], "one more is enough then"
        r.cluster.credit(d1)
        assert r.ready() == ["d1"]
        for _ in range(200):
            r.cluster.charge(d1, failed())
        assert r.state("d1") == "suspect"
        await r.cluster.aclose()

    run(main)


def test_without_a_link_it_takes_nothing(run, rig, make, caplog):
    async def main():
        r = rig()
        r.engine.links = False
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(25)
        assert r.state("d1") == "joining"
        assert r.row("d1")["reason"] == "unlinked: link is not open yet"
        watcher = r.engine.watchers["d1"]
        watcher.linked()
        assert r.ready() == ["d1"]
        watcher.unlinked("reset")
        assert r.state("d1") == "down"
        for _ in range(5):
            watcher.unlinked("refused")
        await asyncio.sleep(0.1)
        checks = len(r.engine.check_times["d1"])
        await asyncio.sleep(3)
        watcher.linked()
        watcher.linked()
        assert r.ready() == ["d1"]
        await asyncio.sleep(0.1)
        assert len(r.engine.check_times["d1"]) == checks + 1, "a new link is checked at once"
        await r.cluster.aclose()

    run(main)
    assert [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING] == [
        "instance d1 is down: unlinked: reset"
    ]


def test_a_restarted_instance_is_back_with_its_link_and_one_good_check(run, rig, make):
    async def main():
        r = rig()
        r.engine.replies["d1"] = [None, DOWN, DOWN, DOWN, None]
        r.engine.links = False
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        watcher = r.engine.watchers.get("d1") or await asyncio.sleep(0.01) or r.engine.watchers["d1"]
        watcher.linked()
        await asyncio.sleep(5)
        watcher.unlinked("reset")
        await asyncio.sleep(15)
        assert r.row("d1")["reason"] == "unlinked: reset"
        watcher.linked()
        assert r.state("d1") == "down"
        await asyncio.sleep(2.1)
        assert r.state("d1") == "ready"
        await r.cluster.aclose()

    run(main)


def test_an_engine_that_cannot_attach_costs_only_that_member(run, rig, make, caplog):
    async def main():
        r = rig()
        r.cluster.add(make("p1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(0.1)
        r.engine.links = RuntimeError("no")
        r.cluster.add(make("d1"), source="file")
        await asyncio.sleep(30)
        assert r.state("d1") == "joining"
        assert "could not be attached" in r.row("d1")["reason"]
        assert r.ready() == ["p1"]
        await r.cluster.aclose()

    run(main)
    assert "instance d1 could not be attached" in caplog.text


def test_a_listener_that_fails_stops_nothing(run, rig, make, caplog):
    async def main():
        r = rig()
        calls = []

        def bad(view):
            calls.append(view)
            if view.version:
                raise RuntimeError("no")

        r.cluster.subscribe(bad)
        later = []
        r.cluster.subscribe(later.append)
        r.cluster.add(make("d1"), source="file")
        await r.cluster.start()
        await asyncio.sleep(30)
        assert [v.version for v in later] == [0, 1]
        assert len(r.engine.check_times["d1"]) >= 3
        await r.cluster.aclose()

    run(main)
    assert "a listener failed" in caplog.text
