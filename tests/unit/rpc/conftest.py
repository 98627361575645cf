import asyncio
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))


def pytest_asyncio_loop_factories(config, item):
    """Each test runs on both loops: their transports differ in when they tell what."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
