"""What the live feed looks at, in a whole process: instances, work, counters, paths."""

import asyncio
import json
import logging
import time

import pytest
from app_world import Process, document, entry
from engine_world import until
from fake_instances import FakeInstance

from coordinator.cluster import Cluster, HealthSettings
from coordinator.core.instance import Address, Instance, Role
from coordinator.management import StageWatch, server
from coordinator.management.live_picture import COLUMNS, Album
from coordinator.observability.metrics import Metrics
from coordinator.observability.recent import Recent
from coordinator.sight import ClusterSight, OwnCounts
from coordinator.work import InstanceLoad

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"tell nobody"}]}'


@pytest.fixture
async def fake():
    made = await FakeInstance().listen()
    yield made
    await made.aclose()


async def first_event(process):
    """What a new listener gets."""
    port = process.app.management.addresses["management"][1]
    async with process.session.get(f"http://127.0.0.1:{port}/v1/live") as reply:
        async with asyncio.timeout(10):
            await reply.content.readuntil(b"\n\n")
            event = await reply.content.readuntil(b"\n\n")
    kind, _, data = event.decode().strip().split("\n")
    assert kind == "event: snapshot"
    assert "tell nobody" not in data
    return json.loads(data.removeprefix("data: "))


async def event_with(process, check):
    """The same, once there is one for which this is true: what a listener gets at first may be a second old."""
    for _ in range(40):
        if check(picture := await first_event(process)):
            return picture
        await asyncio.sleep(0.1)
    raise AssertionError(picture)


def rows(picture):
    return {one[0]: dict(zip(COLUMNS, one, strict=True)) for one in picture["rows"]}


async def test_an_idle_cluster(fake):
    async with Process(document(entry("h0", fake), entry("d1", role="decode"))) as process:
        await process.ready()
        picture = await first_event(process)
        assert picture["about"]["model"] == "m"
        assert picture["about"]["workers"] == 1
        found = rows(picture)
        assert found.keys() == {"h0", "d1"}
        assert (found["h0"]["role"], found["h0"]["engine"], found["h0"]["state"]) == ("hybrid", "hybrid", "ready")
        assert found["h0"]["url"] == fake.address.netloc.join(["http://", ""])
        assert found["d1"]["state"] != "ready"
        assert found["d1"]["reason"]
        figures = picture["figures"]
        assert figures["ready"] is True
        assert (figures["in_flight"], figures["queued"], figures["bottleneck"]) == (0, 0, None)
        assert figures["stages"] == {"queue": 0, "prefill": 0, "handoff": 0, "decode": 0}


async def test_a_request_on_its_way_and_at_its_end(fake):
    gate = asyncio.Event()

    async def slow(call):
        await gate.wait()
        call.reply()

    fake.infer = slow
    async with Process(document(entry("h0", fake))) as process:
        await process.ready()
        call = asyncio.create_task(process.call(CHAT, BODY))
        await until(process.app.control.work.live)
        await until(lambda: rows_of(process)["h0"].requests)
        picture = await first_event(process)
        assert picture["figures"]["in_flight"] == 1
        assert rows(picture)["h0"]["requests"] == 1
        assert rows(picture)["h0"]["blocks"] >= 1
        assert picture["paths"] == []
        gate.set()
        assert (await call)[0] == 200
        picture = await event_with(process, lambda found: found["paths"])
        assert rows(picture)["h0"]["requests"] == 0
        (path,) = picture["paths"]
        assert (path["prefill"], path["decode"], path["outcome"], path["attempts"]) == ("h0", "h0", "ok", 1)
        assert path["id"] == process.lines.records[0].id
        assert 0 <= path["queue_s"] <= path["duration_s"]
        assert path["prefill_s"] <= path["duration_s"]


def rows_of(process):
    return {row.id: row for row in process.app.control.live._sight._rows()}


async def test_a_failure_is_told_with_its_reason(fake):
    async with Process(document(entry("h0", fake))) as process:
        await process.ready()

        async def broken(call):
            call.reply(b'{"error":"tell nobody"}', 500)

        fake.infer = broken
        assert (await process.call(CHAT, BODY))[0] == 502
        picture = await first_event(process)
        (failure,) = picture["failures"]
        assert (failure["code"], failure["instance"], failure["side"]) == ("engine_failed", "h0", "decode")
        assert failure["reason"] == process.lines.records[0].error_reason
        assert (failure["count"], failure["survived"]) == (process.lines.records[0].attempts, 0)
        assert picture["figures"]["moving"]["failures_s"] is None


async def test_time_of_a_state_stands_still(fake):
    async with Process(document(entry("h0", fake))) as process:
        await process.ready()
        sight = process.app.control.live._sight
        now_s, since_start_s = 1000.0, time.monotonic()
        sight._wall, process.app.cluster._clock = lambda: now_s, lambda: since_start_s
        first = sight._rows()[0].since_s
        now_s += 1.4  # two clocks that do not go alike
        assert sight._rows()[0].since_s == first
        now_s += 100
        assert sight._rows()[0].since_s > first


async def test_instances_that_come_and_go(fake):
    async with Process(document(entry("h0", fake))) as process:
        await process.ready()
        assert rows_of(process).keys() == {"h0"}
        status, _, _ = await process.call(
            "/v1/instances", json.dumps(entry("d9", role="decode")).encode(), management=True
        )
        assert status == 201
        assert rows_of(process).keys() == {"h0", "d9"}
        process.app.cluster.remove("d9")
        assert rows_of(process).keys() == {"h0"}


async def test_stopping_while_somebody_listens(fake, monkeypatch):
    monkeypatch.setattr(server, "SHUTDOWN_S", 60.0)  # that calls under way are given
    async with Process(document(entry("h0", fake))) as process:
        port = process.app.management.addresses["management"][1]
        async with process.session.get(f"http://127.0.0.1:{port}/v1/live") as reply:
            await reply.content.readuntil(b"\n\n")
            async with asyncio.timeout(20):
                await process.app.control.aclose()


async def test_the_page_is_there(fake):
    async with Process(document(entry("h0", fake))) as process:
        status, headers, body = await process.call("/", management=True)
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert body.startswith(b"<!doctype html>")


def test_a_thousand_instances_are_cheap():
    """A guard against a wrong turn, not a measurement: a look takes about 6 ms of a processor of today."""
    cluster = Cluster(
        {"e": Engine()}, HealthSettings(), in_flight=lambda instance: 3, log=logging.getLogger("test.cluster")
    )
    roles = [Role.PREFILL] * 400 + [Role.DECODE] * 600
    cluster.replace("file", [Instance(f"i{n}", role, Address("10.0.0.1", n), "e") for n, role in enumerate(roles)])
    work = Work(cluster)
    sight = ClusterSight(cluster, work, StageWatch(dict), OwnCounts(Metrics(["openai"]), Recent()))
    album, took = Album({}), []
    for second in range(9):
        work.moment = second
        began_s = time.process_time()
        picture = album.add(asyncio.run(sight.look()), 0.0, float(second))
        assert len(picture.change or picture.whole) > 10_000
        took.append(time.process_time() - began_s)
    assert sorted(took)[4] < 0.1


class Engine:
    """Of an instance that nobody starts."""


class Work:
    """Loads that are others at each look."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.moment = 0

    def loads(self):
        for number, instance in enumerate(self.cluster.known()):
            yield InstanceLoad(instance, (number + self.moment) % 7, number, 0)

    def live(self):
        return 0

    queued = live
