"""A pair of real vLLM instances behind a coordinator.

`make test-real` runs these tests and says where setup.sh has put vLLM; without that, nothing here is collected.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pair import Pair

PAIR = pytest.StashKey["Pair"]()
HOME = os.environ.get("PD_REAL_VLLM")
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
if HOME is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where the logs are."""
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def whole_pair(request, folder) -> Iterator["Pair"]:
    """The instances and the coordinator, once for all tests."""
    import raw_client  # found only with the path above
    from pair import Pair

    raw_client.WAIT_S = 60.0  # two cores for two engines
    pair = Pair(Path(HOME), folder)
    request.config.stash[PAIR] = pair
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def pair(whole_pair) -> Iterator["Pair"]:
    """The pair with everything alive and idle, before and after."""
    whole_pair.wait_idle()
    yield whole_pair
    whole_pair.wait_idle()


def pytest_terminal_summary(terminalreporter, config) -> None:
    """What has moved in all."""
    pair = config.stash.get(PAIR, None)
    if pair is not None and pair.moves:
        moves = pair.moves
        terminalreporter.write_line(
            f"KV transfers into decode: {sum(one.transfers for one in moves)}, "
            f"{sum(one.transferred_bytes for one in moves)} bytes, "
            f"{sum(one.transferred_tokens for one in moves)} prompt tokens; "
            f"failed: {sum(one.failed for one in moves)}"
        )
