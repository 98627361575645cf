"""A second coordinator comes to the same instances: it takes the result streams over, and the first does not fight."""

import time

import pytest
from clusters import cluster_config
from dialects import CHAT, CHAT_STREAM
from raw_client import ask, eventually
from traffic import open_streams

pytestmark = pytest.mark.xdist_group("two coordinators")
WATCHED_S = 1.5  # a fight would open the stream again within a tenth of a second, and again, and again


async def test_the_last_one_keeps_the_result_stream(start):
    cluster = start.cluster()
    first = cluster.coordinator
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, ["Hello [[fault:stall@4]]"])
    second = start.coordinator(cluster_config(cluster.instances, {}))
    second.wait_ready()

    body = await stream.rest()  # what ran over the first one's stream is lost, and says so at once
    assert not stream.complete
    assert b'"code":"engine_failed"' in body
    await stream.leave()
    await eventually(lambda: not first.ready(), "the first one is not ready")
    first.said("another coordinator has opened the result stream")

    until_s = time.monotonic() + WATCHED_S
    while time.monotonic() < until_s:
        reply = await ask(second.port, CHAT.path, CHAT.body("Hello"))
        assert reply.status == 200
        assert cluster.decode.state()["dresult"]["opened"] == 2
    turned_away = await ask(first.port, CHAT.path, CHAT.body("Hello"))
    assert turned_away.status == 503
    assert int(turned_away.header("retry-after")) >= 1
    cluster.wait_idle()
