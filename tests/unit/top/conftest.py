import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from held_ports import HeldPorts
from live_world import BusySight

from coordinator.cluster import Cluster, HealthSettings
from coordinator.management import Listen, Management, live
from coordinator.management.live import LiveFeed


class Site:
    """A management port whose live feed shows a made-up cluster."""

    def __init__(self, sight, port):
        self.sight = sight
        self.keys = None
        self.port = port

    async def start(self):
        cluster = Cluster({}, HealthSettings(), in_flight=lambda _: 0, log=logging.getLogger("test"))
        self.feed = LiveFeed(self.sight, {"version": "1.2.3", "model": "qwen3-32b", "workers": 2})
        self._management = Management(
            Listen("127.0.0.1", self.port),
            cluster,
            make_instance=lambda _: None,
            metrics=lambda: "",
            extra=self.feed.routes(),
        )
        self._management.screen.take(self.keys)
        await self._management.start()
        return self

    async def stop(self):
        await self.feed.aclose()
        await self._management.aclose()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def site(monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    with HeldPorts() as ports:  # it may stop and start again
        made = await Site(BusySight(rate=5, failing=0), ports.take()).start()
        yield made
        await made.stop()
