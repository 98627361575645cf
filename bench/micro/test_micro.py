"""Times of the fixed pieces of work: `make bench ARGS="--parts micro"`, or `pytest bench/micro -n 0`."""

import asyncio
import contextlib

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.loops import LOOPS, build


@pytest.mark.parametrize("name", list(LOOPS))
def test_loop(name: str, benchmark: BenchmarkFixture) -> None:
    """One pass of a loop; `operations` is what its time is divided by."""
    with contextlib.closing(asyncio.new_event_loop()) as event_loop:
        loop = build(name, event_loop)
        benchmark.extra_info["operations"] = loop.operations
        benchmark(loop.run)
