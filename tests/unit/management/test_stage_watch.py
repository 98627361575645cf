"""Requests by stage, and the bottleneck drawn from them."""

import asyncio

import pytest

from coordinator.management.stages import SAMPLES, StageWatch


class Site:
    """Numbers of requests that a test sets."""

    def __init__(self):
        self.now = {"queue": 0, "prefill": 0, "handoff": 0, "decode": 0}
        self.asked = asyncio.Event()
        self.watch = StageWatch(self.count)

    def count(self):
        self.asked.set()
        return dict(self.now)

    def see(self, times=1, **counts):
        self.now |= counts
        for _ in range(times):
            self.watch.sample()


@pytest.fixture
def site():
    return Site()


def gauge(site):
    return {stage: value for (stage,), value in site.watch.read_bottleneck()}


def test_nothing_is_a_bottleneck_where_nothing_waits(site):
    assert site.watch.bottleneck() is None
    assert gauge(site) == {"queue": 0, "prefill": 0, "handoff": 0}
    site.see(5, decode=1000)
    assert site.watch.bottleneck() is None
    assert gauge(site) == {"queue": 0, "prefill": 0, "handoff": 0}


@pytest.mark.parametrize("stage", ["queue", "prefill", "handoff"])
def test_the_stage_with_most_waiting_time(site, stage):
    site.see(10, queue=3, prefill=3, handoff=3)
    site.see(1, **{stage: 4})
    assert site.watch.bottleneck() == stage
    assert gauge(site) == {"queue": 0, "prefill": 0, "handoff": 0} | {stage: 1}


def test_it_is_time_that_counts_and_not_the_number_at_this_moment(site):
    site.see(20, prefill=10)
    site.see(1, prefill=0, queue=150)
    assert site.watch.bottleneck() == "prefill"
    site.see(1)
    assert site.watch.bottleneck() == "queue"


def test_what_is_longer_ago_than_a_minute_is_forgotten(site):
    site.see(SAMPLES, handoff=1000)
    site.see(SAMPLES - 1, handoff=0, queue=1)
    assert site.watch.bottleneck() == "handoff"
    site.see(1)
    assert site.watch.bottleneck() == "queue"


def test_requests_by_stage_are_those_of_this_moment(site):
    site.see(3, decode=7, queue=2)
    site.now["queue"] = 1
    assert dict(site.watch.read_counts()) == {("queue",): 1, ("prefill",): 0, ("handoff",): 0, ("decode",): 7}


async def test_it_looks_by_itself_and_a_fault_does_not_end_that(site, caplog):
    site.now = None  # dict(None) fails
    site.watch.start()
    async with asyncio.timeout(10):
        await site.asked.wait()
        site.now = {"queue": 0, "prefill": 2, "handoff": 0, "decode": 0}
        site.asked.clear()
        await site.asked.wait()
    assert "counting requests by stage failed" in caplog.text
    await site.watch.aclose()
    assert site.watch.bottleneck() == "prefill"
    assert [task for task in asyncio.all_tasks() if task.get_name() == "watch stages"] == []


async def test_closing_what_was_never_started(site):
    await site.watch.aclose()
