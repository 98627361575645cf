"""The chart in the hands of Helm's engine."""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from helm_process import Helm

CHART = Path(__file__).parents[2] / "deploy/helm/pd-coordinator"


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    if platform.machine() != "x86_64":
        pytest.skip("Helm's engine comes as a wheel for x86-64")
    engine = Helm(CHART)
    yield engine
    engine.close()
