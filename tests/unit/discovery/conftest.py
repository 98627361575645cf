"""A cluster whose engine is always well, and sources that run."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from coordinator.cluster import Cluster, HealthSettings
from coordinator.config import instance_from_mapping, parse

from discovery_world import Engine, Notebook, validate  # isort: skip


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
    # asyncio does not close a TLS connection that was cancelled before its handshake began: let it fail by itself
    watched = asyncio.get_running_loop()._selector.get_map()
    async with asyncio.timeout(20):
        while len(watched) > 1:  # the loop's own  # noqa: ASYNC110
            await asyncio.sleep(0.001)
