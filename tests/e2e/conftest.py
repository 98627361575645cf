"""Clusters for one test and for many."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from clusters import Cluster, Starter, cluster_config
from processes import Coordinator


def _starter(folder: Path) -> Iterator[Starter]:
    starter = Starter(folder)
    try:
        yield starter
    finally:
        starter.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Processes of one test."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="session")
def _session_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    yield from _starter(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def _shared(_session_start: Starter) -> Cluster:
    return _session_start.cluster(2, 2)


@pytest.fixture
def cluster(_shared: Cluster) -> Iterator[Cluster]:
    """The default cluster, 2 prefill and 2 decode instances: idle before and after each test, without faults."""
    yield _shared
    for instance in _shared.instances:
        instance.fault()
    _shared.wait_idle()
    _shared.coordinator.check_log()


@pytest.fixture(scope="session")
def lonely(_session_start: Starter) -> Coordinator:
    """A coordinator without a single instance: every request is a 503."""
    return _session_start.coordinator(cluster_config([], {}))
