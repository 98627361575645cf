"""Instances are asked for their metrics, and nobody waits for one that does not answer."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from fake_instances import FakeInstance

from coordinator.core.instance import Address, Instance, Role
from coordinator.management import EngineMetrics, EngineMetricsSettings
from coordinator.observability.metrics import Metrics
from coordinator.transport.client import HttpClient

GUARD_S = 10.0
LOAD = b"# TYPE load gauge\nload %d\n"


class Engine(FakeInstance):
    """An instance whose `/metrics` is what a test says; None: it does not answer."""

    text: bytes | None = LOAD % 1
    status = 200

    async def infer(self, call):
        if self.text is not None:
            call.reply(self.text, self.status)


class Site:
    """Instances, and who asks them."""

    def __init__(self, engines, **settings):
        self.engines = engines
        self.instances = [
            Instance(name, Role.DECODE if name[0] == "d" else Role.PREFILL, engine.address, "vllm")
            for name, engine in engines.items()
        ]
        self.now_s = 1000.0
        self.metrics = Metrics(["openai"])
        self.client = HttpClient(connect_s=5)
        given = {"scrape": True, "interval_s": 0.05, "timeout_s": 5.0} | settings
        self.scraper = EngineMetrics(
            EngineMetricsSettings(**given), self.client, lambda: self.instances, self.metrics, lambda: self.now_s
        )

    def results(self):
        cells = self.metrics.engine_scrapes.snapshot()
        return {labels[0]: cell[0] for labels, cell in cells.items() if cell[0]}

    async def until(self, check):
        async with asyncio.timeout(GUARD_S):
            while not check():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def loads(self):
        """The value of `load` by instance."""
        lines = [line for line in self.scraper.page().decode().splitlines() if line.startswith("load{")]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
async def site():
    made = []

    async def start(*names, **settings):
        engines = {name: await Engine().listen() for name in names}
        one = Site(engines, **settings)
        made.append(one)
        one.scraper.start()
        return one

    yield start
    for one in made:
        await one.scraper.aclose()
        await one.client.aclose()
        for engine in one.engines.values():
            await engine.aclose()
    leaked = [task.get_name() for task in asyncio.all_tasks() if "metrics" in task.get_name()]
    assert leaked == []


async def test_all_are_asked_again_and_again(site):
    one = await site("p0", "d0")
    await one.until(lambda: one.loads() == {"p0": 1, "d0": 1})
    one.engines["d0"].text = LOAD % 7
    await one.until(lambda: one.loads()["d0"] == 7)
    assert one.results().keys() <= {"ok", "skipped"}
    call = one.engines["p0"].calls[0]
    assert (call.method, call.target) == ("GET", "/metrics")


async def test_one_that_does_not_answer_holds_up_nobody(site):
    one = await site("p0", "d0", timeout_s=60.0)
    await one.until(lambda: one.loads() == {"p0": 1, "d0": 1})
    one.engines["p0"].text = None
    asked = len(one.engines["p0"].calls)
    await one.until(lambda: len(one.engines["p0"].calls) > asked)
    one.engines["d0"].text = LOAD % 2
    await one.until(lambda: one.loads() == {"p0": 1, "d0": 2})  # and what it said last is still there
    await one.until(lambda: one.results().get("skipped"))
    assert "failed" not in one.results()


async def test_an_instance_gets_so_much_time_and_no_more(site):
    one = await site("p0", timeout_s=0.1)
    one.engines["p0"].text = None
    await one.until(lambda: one.results().get("failed"))
    one.engines["p0"].text = LOAD % 3
    await one.until(lambda: one.loads() == {"p0": 3})


@pytest.mark.parametrize(
    ("text", "status", "result"),
    [
        (b"<html>", 200, "unreadable"),
        (LOAD % 5, 404, "failed"),
        ((LOAD % 5) * 1000, 200, "failed"),
        (b"\xff\xfe\n", 200, "unreadable"),
    ],
)
async def test_a_bad_answer_changes_nothing(site, text, status, result):
    one = await site("p0", max_bytes=2000)
    await one.until(lambda: one.loads() == {"p0": 1})
    one.engines["p0"].text, one.engines["p0"].status = text, status
    await one.until(lambda: one.results().get(result))
    assert one.loads() == {"p0": 1}


async def test_what_is_old_is_shown_with_its_age_and_then_left_out(site):
    one = await site("p0")
    await one.until(lambda: one.loads() == {"p0": 1})
    one.engines["p0"].status = 500
    await one.until(lambda: one.results().get("failed"))
    one.now_s += 299
    assert dict(one.scraper.read_ages()) == {("p0", "prefill"): 299}
    assert one.loads() == {"p0": 1}
    one.now_s += 2
    assert dict(one.scraper.read_ages()) == {}
    assert one.scraper.page() == b""


async def test_an_instance_that_is_gone_is_not_shown(site):
    one = await site("p0", "d0")
    await one.until(lambda: one.loads() == {"p0": 1, "d0": 1})
    one.instances = one.instances[1:]
    assert one.loads() == {"d0": 1}
    await one.until(lambda: len(one.scraper._good) == 1)


async def test_a_fault_of_ours_does_not_end_it(site, monkeypatch, caplog):
    one = await site("p0")
    await one.until(lambda: one.loads() == {"p0": 1})
    monkeypatch.setattr("coordinator.management.engine_metrics.relabelled", lambda *_: 1 / 0)
    await one.until(lambda: one.results().get("unreadable"))
    assert "the metrics of instance p0 could not be read" in caplog.text
    monkeypatch.undo()
    one.engines["p0"].text = LOAD % 4
    await one.until(lambda: one.loads() == {"p0": 4})


async def test_not_more_than_so_many_are_asked_at_once(site, monkeypatch):
    monkeypatch.setattr("coordinator.management.engine_metrics.AT_ONCE", 2)
    one = await site("p0", "p1", "p2", timeout_s=60.0)
    for engine in one.engines.values():
        engine.text = None
    await one.until(lambda: one.results().get("skipped", 0) > 4)
    assert len(one.scraper._asking) == 2


async def test_nobody_is_asked_unless_the_settings_say_so():
    client = HttpClient(connect_s=1)
    nobody = Instance("p0", Role.PREFILL, Address("127.0.0.1", 9), "vllm")
    off = EngineMetrics(EngineMetricsSettings(), client, lambda: [nobody], Metrics(["openai"]))
    off.start()
    assert off.page() is None
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "engine metrics"]
    await off.aclose()
    await client.aclose()


async def test_instances_may_come_later(site):
    one = await site()
    await asyncio.sleep(0)
    late = await Engine().listen()
    one.engines["d9"] = late
    one.instances = [Instance("d9", Role.DECODE, late.address, "vllm")]
    await one.until(lambda: one.loads() == {"d9": 1})
