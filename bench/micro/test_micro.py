"""Times of the fixed pieces of work: `make bench ARGS="--parts micro"`, or `pytest bench/micro -n 0`."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.loops import LOOPS


@pytest.mark.parametrize("name", list(LOOPS))
async def test_loop(name: str, benchmark: BenchmarkFixture) -> None:
    """One pass of a loop; `operations` is what its time is divided by."""
    loop = LOOPS[name]()
    benchmark.extra_info["operations"] = loop.operations
    benchmark(loop.run)
