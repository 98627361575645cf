import asyncio

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Real sockets are tried under both loops: uvloop is what runs in production, asyncio what is left without it."""
    if "listener" in item.nodeid:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
