"""The live feed, the page and `top` of a real coordinator, with one process and with several."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import aiohttp
import pytest
from clusters import Starter
from dialects import CHAT_STREAM
from processes import HOST, until
from traffic import Traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from browser import Browser, find_chromium

pytestmark = pytest.mark.xdist_group("live")


def one_and_two(start, workers):
    """A cluster of one prefill and two decode instances."""
    return start.cluster(1, 2, server={"workers": workers, "port": 0, "management_port": 0, "route_headers": True})


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def shared(request, tmp_path_factory):
    with contextlib.closing(Starter(tmp_path_factory.mktemp("cluster"))) as start:
        yield one_and_two(start, request.param)


@pytest.fixture
def loaded(shared):
    """A cluster that is idle before and after each test."""
    yield shared
    shared.prefill.fault()
    shared.wait_idle()


async def pictures(coordinator, check, within_s=60):
    """Events until one holds; all that came, put together."""
    seen, columns = {}, []
    url = f"http://{HOST}:{coordinator.management_port}/v1/live"
    async with aiohttp.ClientSession() as session, session.get(url) as reply, asyncio.timeout(within_s):
        while True:
            block = (await reply.content.readuntil(b"\n\n")).decode()
            if "data: " not in block:
                continue
            data = json.loads(block.partition("data: ")[2])
            columns = data.get("columns", columns)
            if "about" in data:
                seen = data
            else:
                for position, *values in data.get("rows", []):
                    seen["rows"][position][-len(values) :] = values
                paths = [*data.get("paths", []), *seen["paths"]]
                seen |= {key: value for key, value in data.items() if key != "rows"} | {"paths": paths}
            if check(seen):
                return seen, [dict(zip(columns, row, strict=True)) for row in seen["rows"]]


async def test_load_shows(loaded):
    coordinator = loaded.coordinator
    async with Traffic(loaded.port, [CHAT_STREAM], clients=6) as traffic:
        await traffic.more(20)
        picture, rows = await pictures(
            coordinator,
            lambda seen: (
                (seen["figures"]["moving"]["requests_s"] or 0) > 1
                # in a short time more may end than begin
                and seen["figures"]["moving"]["tokens_s"] > seen["figures"]["moving"]["requests_s"] * 10
                and seen["figures"]["moving"]["itl_s"]["p50"] is not None
                and seen["figures"]["in_flight"] > 0
                and len({path["decode"] for path in seen["paths"]}) == 2
            ),
        )
    figures = picture["figures"]
    assert figures["ready"] is True
    assert 0 < figures["moving"]["ttft_s"]["p50"] < 30
    assert figures["moving"]["failures_s"] == 0
    assert {row["id"]: row["role"] for row in rows} == {"p0": "prefill", "d0": "decode", "d1": "decode"}
    assert all(row["state"] == "ready" for row in rows)
    for path in picture["paths"]:
        assert path["prefill"] == "p0"
        spent = sum(path.get(f"{stage}_s") or 0 for stage in ("queue", "prefill", "handoff", "decode"))
        assert 0 < spent <= path["duration_s"] + 0.001
    assert traffic.counts["whole"] == traffic.counts.total()


async def test_failures_of_all_processes_are_counted(loaded):
    async with Traffic(loaded.port, [CHAT_STREAM], clients=4) as traffic:
        loaded.prefill.fault("status=500")
        picture, _ = await pictures(
            loaded.coordinator, lambda seen: sum(failure["count"] for failure in seen["failures"]) >= 20
        )
        loaded.prefill.fault()
        picture, _ = await pictures(
            loaded.coordinator, lambda seen: any(path["outcome"] == "ok" for path in seen["paths"])
        )
    kinds = {(one["code"], one["reason"], one["instance"]) for one in picture["failures"]}
    assert ("engine_failed", "http_5xx", "p0") in kinds
    assert traffic.counts["wrong"] == 0


async def top(coordinator):
    """What `pd-coordinator top` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator", "top", "--once", "--json",
        "--url", f"http://{HOST}:{coordinator.management_port}", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


async def test_top(loaded):
    async with Traffic(loaded.port, [CHAT_STREAM], clients=4) as traffic:
        await traffic.more(10)
        async with asyncio.timeout(120):
            told = await top(loaded.coordinator)
            while not told["figures"]["moving"]["requests_s"]:  # the second that it looks at may be one of silence
                told = await top(loaded.coordinator)
    assert {one["id"] for one in told["instances"]} == {"p0", "d0", "d1"}
    assert told["figures"]["moving"]["requests_s"] > 0
    assert told["paths"]


async def test_the_page(loaded):
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium: install Debian's package `chromium`")
    origin = f"http://{HOST}:{loaded.coordinator.management_port}"
    async with (
        Traffic(loaded.port, [CHAT_STREAM], clients=4),
        Browser(program) as browser,
        browser.page() as page,
    ):
        await page.open(f"{origin}/")
        await page.wait("document.body.dataset.feed === 'live' && paths.length > 3")
        await page.wait("Number(document.querySelector('#n-requests').textContent) > 0")
        await page.run("light(paths.find(path => path.outcome === 'ok'))")
        notes = await page.run("[...document.querySelectorAll('#way .note')].map(note => note.textContent)")
        assert notes[1].endswith(" on p0")
        assert notes[4].startswith("ok after")
        names = await page.run("[...document.querySelectorAll('#list tbody tr:not(.group)')].map(r => r.dataset.id)")
        assert names == ["p0", "d0", "d1"]
        assert page.complaints == []
        assert all(url.startswith((origin, "data:")) for url in page.requests)


@pytest.mark.parametrize("workers", [1, 2])
def test_listeners_do_not_hold_up_the_end(start, workers):
    loaded = one_and_two(start, workers)

    async def listen_and_stop():
        url = f"http://{HOST}:{loaded.coordinator.management_port}/v1/live"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            await reply.content.readuntil(b"\n\n")
            loaded.coordinator.signal(15)
            async with asyncio.timeout(20):
                await reply.content.read()

    asyncio.run(listen_and_stop())
    until(lambda: not loaded.coordinator.running, "the coordinator has ended")
