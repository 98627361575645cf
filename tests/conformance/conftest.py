import asyncio
import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """What a loop's own objects keep alive differs from one to the other; uvloop is what runs in production."""
    if "failures_leave_no_cycles" in item.nodeid:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
