"""`GET /v1/live` on a real port: who gets what, and when nothing is done at all."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from engine_world import until
from live_world import FixedSight, row

from coordinator.management import live
from coordinator.management.live import MOST_LISTENERS, LiveFeed

WITHIN_S = 20


@pytest.fixture
def sight():
    return FixedSight(row("p0"), row("d0"))


@pytest.fixture
async def feed(sight):
    made = LiveFeed(sight, {"version": "1"})
    yield made
    await made.aclose()


@pytest.fixture
async def url(serve, feed):
    management, _ = await serve(extra=feed.routes())
    host, port = management.addresses["management"]
    return f"http://{host}:{port}/v1/live"


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as made:
        yield made


async def events(reply, count):
    """So many events, comments left out."""
    found = []
    while len(found) < count:
        block = (await reply.content.readuntil(b"\n\n")).decode()
        lines = dict(line.split(": ", 1) for line in block.strip().split("\n") if not line.startswith(":"))
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def test_a_picture_then_what_changes(session, url, sight):
    async with session.get(url) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        assert reply.headers["Cache-Control"] == "no-store"
        ((kind, first),) = await events(reply, 1)
        assert (kind, first["about"]) == ("snapshot", {"version": "1"})
        sight.rows[1] = row("d0", requests=5)
        number, second = first["n"], {}
        while "rows" not in second:  # one that was made before the change has none
            ((kind, second),) = await events(reply, 1)
            number += 1
            assert (kind, second["n"]) == ("tick", number)
        assert [changed[0] for changed in second["rows"]] == [1]


async def test_nothing_is_looked_at_unless_somebody_listens(session, url, sight, feed):
    assert sight.looks == 0
    async with session.get(url) as reply:
        await events(reply, 1)
    await until(lambda: feed.listeners == 0)
    assert feed._task is None
    seen = sight.looks
    await asyncio.sleep(0)
    assert sight.looks == seen


async def test_listeners_share_a_look(session, url, sight, feed, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    async with contextlib.AsyncExitStack() as stack:
        replies = [await stack.enter_async_context(session.get(url)) for _ in range(5)]
        seen = [await events(reply, 3) for reply in replies]
        assert feed.listeners == 5
        numbers = {event["n"] for each in seen for _, event in each}
    assert max(numbers) <= sight.looks
    assert all(each[0][0] == "snapshot" and each[1][0] == "tick" for each in seen)


async def test_who_comes_later_need_not_wait_for_the_next_second(session, url, monkeypatch):
    async with session.get(url) as first:
        await events(first, 1)
        monkeypatch.setattr(live, "EVERY_S", 1000.0)
        await events(first, 1)  # the next one is far away
        async with session.get(url) as second:
            ((kind, _),) = await events(second, 1)
            assert kind == "snapshot"


async def test_there_is_a_bound(session, url, feed):
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MOST_LISTENERS):
            await stack.enter_async_context(session.get(url))
        async with session.get(url) as reply:
            assert reply.status == 503
            assert "listen" in (await reply.json())["error"]
    await until(lambda: feed.listeners == 0)
    async with session.get(url) as reply:
        assert reply.status == 200


async def test_a_fault_is_logged_once_and_the_feed_goes_on(session, url, sight, monkeypatch, caplog):
    monkeypatch.setattr(live, "EVERY_S", 0.01)
    async with session.get(url) as reply:
        await events(reply, 1)
        sight.error = RuntimeError("odd")
        looks = sight.looks
        await until(lambda: sight.looks >= looks + 3)
        sight.error = None
        ((kind, _),) = await events(reply, 1)
        assert kind == "tick"
    assert [record.message for record in caplog.records if record.exc_info] == ["the live feed could not be made"]


async def test_whoever_looks_late_looks_again_after_a_pause(feed, sight, monkeypatch):
    """Looks that take long must not take the whole process."""
    now_s, pauses = 0.0, []
    real = sight.look

    async def slow():
        nonlocal now_s
        now_s += 3 * live.EVERY_S
        return await real()

    async def sleep(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    sight.look, feed._clock = slow, lambda: now_s
    monkeypatch.setattr(live.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await feed._run()
    monkeypatch.undo()
    assert pauses == [live.EVERY_S] * 3


async def test_silence_is_filled(session, url, sight, monkeypatch):
    monkeypatch.setattr(live, "QUIET_S", 0.02)
    sight.error = RuntimeError("odd")
    async with session.get(url) as reply:
        assert await reply.content.readuntil(b"\n\n") == live.OPENING
        assert await reply.content.readuntil(b"\n\n") == live.STILL_THERE


async def test_who_was_too_slow_gets_a_whole_picture(feed, sight):
    feed._album.add(await sight.look(), 0.0, 0.0)
    second = feed._album.add(await sight.look(), 1.0, 1.0)
    assert live._for_one_who_has(second, 1) == second.change
    assert live._for_one_who_has(second, 0) == second.whole
    third = feed._album.add(await sight.look(), 2.0, 2.0)
    assert live._for_one_who_has(third, 1) == third.whole


async def test_who_reads_nothing_is_let_go(url, feed, sight, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0.005)
    monkeypatch.setattr(live, "WRITE_S", 0.1)
    long = "x" * 2_000_000  # so that all buffers are soon full
    real = sight.look

    async def ever_new():
        sight.rows = [row("d0", reason=f"{sight.looks} {long}")]
        return await real()

    sight.look = ever_new
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET /v1/live HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: feed.listeners == 1)
    writer.transport.pause_reading()
    await until(lambda: feed.listeners == 0)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    del reader


async def test_stopping_lets_listeners_go_at_once(session, url, feed):
    async with session.get(url) as reply:
        await events(reply, 1)
        await feed.aclose()
        assert await reply.content.read() == b""
        async with session.get(url) as late:
            assert late.status == 503
    await feed.aclose()
    assert feed._task is None


async def test_head_is_not_for_streams(session, url):
    async with session.head(url) as reply:
        assert reply.status == 405
