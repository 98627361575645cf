"""The chart in the hands of Helm's engine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_process import Helm, engine

sys.path.insert(0, str(Path(__file__).parents[1] / "repo"))


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """One process of Helm for all tests."""
    yield from engine()
