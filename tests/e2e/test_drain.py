"""The coordinator is told to go."""

import signal
import time

import pytest
from dialects import CHAT, CHAT_STREAM, events
from processes import call
from raw_client import Client, eventually
from traffic import HELD, open_streams

pytestmark = pytest.mark.xdist_group("drain")
ENDLESS = "[[fault:stall@4]]"


async def test_streams_end_and_new_requests_are_sent_away(start):
    cluster = start.cluster(timeouts={"drain_s": 60})
    coordinator = cluster.coordinator
    prompts = [f"Story {number} {HELD}" for number in range(6)]
    async with await Client.connect(cluster.port) as waiting:  # an idle connection that was there before
        await waiting.ask("/health")
        await waiting.rest()
        streams = await open_streams(cluster.port, CHAT_STREAM, prompts)
        coordinator.signal(signal.SIGTERM)
        await eventually(lambda: not coordinator.ready(), "not ready at once")
        status, _, body = call(coordinator.management_port, "/v1/readiness")
        assert (status, b"shutting down" in body) == (503, True)
        assert call(coordinator.management_port, "/v1/health")[0] == 200
        await sent_away(cluster.port, waiting)
    cluster.go_on()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert CHAT_STREAM.text(await stream.rest(), prompt)
        assert stream.complete
        await stream.leave()
    assert coordinator.wait() == 0
    cluster.wait_kv_free()


async def sent_away(port: int, waiting: Client) -> None:
    """New requests get a 503 on a connection that ends, or no connection at all."""
    try:
        await waiting.ask(CHAT.path, CHAT.body("Hello"))
        await waiting.rest()
    except (ConnectionError, EOFError):
        return  # idle connections may be closed at once
    assert waiting.status == 503
    assert waiting.header("connection") == "close"
    assert int(waiting.header("retry-after")) >= 1
    try:
        async with await Client.connect(port) as late:
            await late.ask(CHAT.path, CHAT.body("Hello"))
            await late.rest()
    except (ConnectionError, EOFError):
        return
    assert late.status == 503


async def test_what_outlives_the_grace_time_is_ended_visibly(start):
    cluster = start.cluster(timeouts={"drain_s": 0.5})
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS])
    began_s = time.monotonic()
    cluster.coordinator.signal(signal.SIGTERM)
    body = await stream.rest()
    assert not stream.complete
    assert events(body)[-1]["error"]["code"] == "draining"
    assert cluster.coordinator.wait() == 0
    assert time.monotonic() - began_s >= 0.5
    cluster.wait_kv_free()  # the engines were told
    await stream.leave()


async def test_a_second_signal_cuts_it_short(start):
    cluster = start.cluster(timeouts={"drain_s": 60})
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS])
    cluster.coordinator.signal(signal.SIGTERM)
    await eventually(lambda: not cluster.coordinator.ready(), "the first signal has arrived")
    began_s = time.monotonic()
    cluster.coordinator.signal(signal.SIGTERM)
    assert cluster.coordinator.wait() == 1
    assert time.monotonic() - began_s < 40  # and not after the minute that it had
    await stream.rest()
    assert not stream.complete
    await stream.leave()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_aborts_that_are_due_are_sent_before_the_end(start, number: signal.Signals):
    cluster = start.cluster()
    streams = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS] * 8)
    cluster.wait_handed_over()
    assert any(cluster.kv_blocks())
    for stream in streams:
        await stream.reset()
    cluster.coordinator.signal(number)
    assert cluster.coordinator.wait() == 0
    cluster.wait_kv_free()
    assert cluster.decode.state()["stopped"] == 8
