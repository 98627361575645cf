"""The live page in a real browser; without one, these tests say so and are left out."""

import logging
import sys
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from browser import Browser, find_chromium
from held_ports import HeldPorts
from live_world import BusySight

from coordinator.cluster import Cluster, HealthSettings
from coordinator.management import Listen, Management, live
from coordinator.management.live import LiveFeed
from coordinator.management.page import LivePage

FAST_S = 0.1


class Site:
    """A management plane whose live feed shows a made-up cluster; it can be stopped, and come back at its port."""

    def __init__(self):
        self.sight = BusySight(rate=6, failing=0)
        self._ports = HeldPorts()
        self.port = self._ports.take()
        self.keys = None
        self._management = None

    async def start(self):
        cluster = Cluster({}, HealthSettings(), in_flight=lambda _: 0, log=logging.getLogger("test"))
        self._feed = LiveFeed(self.sight, {"version": "1.2.3", "model": "qwen3-32b", "workers": 2})
        self._management = Management(
            Listen("127.0.0.1", self.port),
            cluster,
            make_instance=lambda _: None,
            metrics=lambda: "",
            extra=[*LivePage().routes(), *self._feed.routes()],
        )
        self._management.screen.take(self.keys)
        await self._management.start()

    async def stop(self):
        if self._management is not None:
            await self._feed.aclose()
            await self._management.aclose()

    async def close(self):
        await self.stop()
        self._ports.close()

    @property
    def origin(self):
        return f"http://127.0.0.1:{self.port}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium: install Debian's package `chromium`")
    async with Browser(program) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def site(monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", FAST_S)
    made = Site()
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser, site):
    """The page, open and fed; whatever it complains about fails the test at its end."""
    async with browser.page() as made:
        await made.open(site.origin)
        await made.wait("document.body.dataset.feed === 'live' && history.length > 3")
        yield made
        assert not made.complaints
        assert {url.split("/v1")[0].rstrip("/") for url in made.requests if not url.startswith("data:")} == {
            site.origin
        }
