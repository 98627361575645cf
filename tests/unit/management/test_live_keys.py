"""Keys of the management plane and the live page: the page is open, what it shows is not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from live_world import FixedSight, row

from coordinator.management.live import LiveFeed
from coordinator.management.page import LivePage
from coordinator.security.keys import Key, new_hash, split_hash

KEY = "the-key-of-ops-1"


@pytest.fixture
async def call(serve):
    feed = LiveFeed(FixedSight(row("p0")), {})
    management, client = await serve(extra=[*LivePage().routes(), *feed.routes()])
    management.screen.take([Key(0, "ops", split_hash(new_hash(KEY))[1])])
    yield client
    await feed.aclose()


async def test_the_page_needs_no_key(call):
    assert (await call("GET", "/"))[0] == 200


async def test_the_feed_does(call):
    status, body, headers = await call("GET", "/v1/live")
    assert status == 401
    assert "key" in body["error"]
    assert "Basic" in headers["WWW-Authenticate"]


async def test_the_page_is_not_offered_what_would_have_the_browser_ask_instead_of_it(call):
    status, _, headers = await call("GET", "/v1/live", headers={"Accept": "text/event-stream"})
    assert status == 401
    assert headers["WWW-Authenticate"] == 'Bearer realm="pd-coordinator"'
