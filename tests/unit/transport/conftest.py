import asyncio
import contextlib
import math
import socket
import time

import pytest
import uvloop
from scripted_engine import GUARD_S, Engine

from coordinator.core.instance import Address
from coordinator.transport import HttpClient


def pytest_asyncio_loop_factories(config, item):
    """Each test runs on both loops: their transports differ in when they tell what."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def engine():
    engine = await Engine().listen()
    yield engine
    await engine.aclose()


@pytest.fixture
async def client():
    """Its clock stands still: what a slow machine makes late is neither stale nor overdue to it."""
    began_s = time.monotonic()
    client = HttpClient(connect_s=5.0, clock=lambda: began_s)
    yield client
    await client.aclose()
    assert client.open_connections == 0


@pytest.fixture
def get(client, engine):
    """Fetch from the engine with little to say."""

    async def fetch(method=b"GET", target="/", headers=(), body=b"", **options):
        options.setdefault("deadline_s", math.inf)
        async with asyncio.timeout(GUARD_S):
            return await client.fetch(options.pop("address", engine.address), method, target, headers, body, **options)

    return fetch


@pytest.fixture
def black_hole():
    """Address of a listener whose queue is full: a connect to it neither succeeds nor fails."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield Address("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def dead_address():
    """An address that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        yield Address("127.0.0.1", taken.getsockname()[1])
