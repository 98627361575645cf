"""A cluster whose engine is always well, and a notebook for what sources tell."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from coordinator.cluster import Cluster, HealthSettings
from coordinator.config import instance_from_mapping, parse


class Engine:
    """An engine protocol that takes any keys and whose instances are always well."""

    def options(self, given):
        return dict(given)

    def attach(self, instance, watcher):
        watcher.linked()

    async def detach(self, instance):
        pass

    async def probe(self, instance):
        return None


def validate(engine, given):
    """Keys of an engine, as they are; `bad` is none."""
    if "bad" in given:
        raise ValueError("bad: this engine has no such key")
    return given


class Notebook:
    """Takes what a source tells (source.Report), and waits for it."""

    def __init__(self):
        self.instances = None
        self.faults = {}
        self.trouble = "not looked yet"
        self.told = 0
        self._changed = asyncio.Event()

    def found(self, instances, faults, trouble=""):
        self.instances, self.faults, self.trouble = list(instances), dict(faults), trouble
        self._note()

    def lost(self, reason):
        self.trouble = reason
        self._note()

    def _note(self):
        self.told += 1
        self._changed.set()

    @property
    def urls(self):
        return sorted(one.url for one in self.instances or ())

    @property
    def ids(self):
        return sorted(one.id for one in self.instances or ())

    async def until(self, check, within_s=20.0):
        """Wait until what is known fits."""
        async with asyncio.timeout(within_s):
            while not check(self):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def settings():
    return parse("cluster:\n  engine: vllm\n  model: m\n")


@pytest.fixture
def make(settings):
    return lambda keys: instance_from_mapping(keys, settings, validate)


@pytest.fixture
def cluster():
    """A cluster; `cluster.load[id]` are requests that need an instance."""
    load = {}
    made = Cluster(
        {"vllm": Engine()},
        HealthSettings(),
        in_flight=lambda instance: load.get(instance.id, 0),
        log=logging.getLogger("pd_coordinator.cluster"),
    )
    made.load = load
    return made


@pytest.fixture
async def running():
    """Runs sources until the test ends: `notebook = running(source)`."""
    tasks = []

    def run(source):
        notebook = Notebook()
        tasks.append(asyncio.create_task(source.run(notebook)))
        return notebook

    yield run
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
