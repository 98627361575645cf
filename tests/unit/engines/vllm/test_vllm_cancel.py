"""Leaving at any moment: nothing stays pinned, no connection stays in use."""

import asyncio
import gc
import time

import pytest
from msgspec import Raw
from vllm_pair import COMPLETIONS, Placement, Sink

from coordinator.core.ids import WireIds
from coordinator.engines.vllm.handoff import Handoff, Means
from coordinator.engines.vllm.legs import Farewells
from coordinator.engines.vllm.missing import MissingKv
from coordinator.transport.errors import TransportError
from coordinator.wire.json_edit import read_fields
from coordinator.wire.vllm import Prefilled

ENDS_WITHIN = 400


async def leave(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize("kind", ["whole", "stream", "batch", "alone"])
async def test_leaving_at_every_step(world, kind):
    world.engine.attach(world.other, world.watcher)
    given = {"batch": {"prompt": ["a", "b", "c"]}, "alone": {"prompt": "a", "n": 2}}.get(kind, {"prompt": "a"})
    for turns in range(ENDS_WITHIN):
        request = world.request(COMPLETIONS, stream=kind == "stream", **given)
        task = asyncio.create_task(world.engine.serve(request, Placement(world.prefill, world.decode), Sink()))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            await task
            break
        await leave(task)
        await world.settled()
        await world.until(lambda: not world.orphans)
        await world.until(lambda: world.client.open_connections == world.client.idle_connections)
        world.pinned.clear()
    else:
        pytest.fail("the request never came to its end")
    assert turns > 5


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_prefill_works_ends_it_there(world, stream):
    world.p.gate.clear()
    task = asyncio.create_task(world.serve(world.request(stream=stream)))
    await world.until(lambda: world.p.seen)
    await leave(task)
    await world.until(lambda: world.p.aborted)
    assert not world.d.seen
    assert not world.engine.pinned()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_decode_works_ends_it_there_and_asks_nobody_else(world, stream):
    world.engine.attach(world.other, world.watcher)
    world.d.gate.clear()
    task = asyncio.create_task(world.serve(world.request(stream=stream)))
    await world.until(lambda: world.d.seen)
    await leave(task)
    await world.until(lambda: world.d.aborted)
    assert not world.engine.pinned()
    assert not world.d1.seen


class ByHand:
    """A client whose connections and replies come when the test says so."""

    def __init__(self, wait=None):
        self.sinks = []
        self.wait = wait

    @property
    def loop(self):
        return asyncio.get_running_loop()

    async def open_stream(self, address, method, target, headers, body, *, sink):
        if self.wait is not None and self.sinks:
            await self.wait
        self.sinks.append(sink)
        return self

    def close(self):
        pass

    def pause(self):
        pass

    def resume(self):
        pass


class Releases:
    def __init__(self):
        self.orphans = []

    def release(self, orphan):
        self.orphans.append(orphan)


def handoff(world, client, stream=False):
    releases = Releases()
    missing = MissingKv(world.log, lambda: None)
    fetchers = [world.other, world.decode]
    means = Means(client, WireIds(), releases, Farewells(), missing, lambda prefill, decode: fetchers)
    request = world.request(COMPLETIONS, prompt="a", stream=stream)
    placement = Placement(world.prefill, world.decode)
    return Handoff(means, request, placement, read_fields(request.body)), releases


def answer(sink, body=b'{"choices":[{}],"kv_transfer_params":{"s":1}}'):
    sink.head(200, ())
    sink.data(body, 1.0)
    sink.end(1.0)


async def test_prefill_answers_in_the_moment_of_leaving(world):
    client = ByHand()
    work, releases = handoff(world, client)
    task = asyncio.create_task(work.prefill())
    await asyncio.sleep(0)
    answer(client.sinks[0])
    await leave(task)
    [orphan] = releases.orphans
    assert b'"kv_transfer_params":{"s":1}' in orphan.body
    assert [d.id for d in orphan.decodes] == ["d0", "d1"]
    assert orphan.prefill is world.prefill


@pytest.mark.parametrize("body", [b'{"choices":[{}]}', b'{"error":{"message":"x"}}', b"{cut"])
async def test_an_answer_without_kv_in_that_moment(world, body):
    client = ByHand()
    work, releases = handoff(world, client)
    task = asyncio.create_task(work.prefill())
    await asyncio.sleep(0)
    answer(client.sinks[0], body)
    await leave(task)
    assert not releases.orphans


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_decode_is_being_connected(world, stream):
    client = ByHand(wait=asyncio.get_running_loop().create_future())
    work, releases = handoff(world, client, stream)

    async def both():
        prefilled = await work.prefill()
        await (work.stream(prefilled, Sink()) if stream else work.whole(prefilled))

    task = asyncio.create_task(both())
    await asyncio.sleep(0)
    answer(client.sinks[0])
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(client.sinks) == 1
    await leave(task)
    assert [o.decodes[0].id for o in releases.orphans] == ["d0"]


async def test_what_comes_after_leaving_is_seen_by_nobody(world, caplog):
    client = ByHand()
    work, releases = handoff(world, client)
    task = asyncio.create_task(work.whole(Prefilled(params=Raw(b"{}"))))
    await asyncio.sleep(0)
    await leave(task)
    client.sinks[0].lost(TransportError("reset"))
    del client.sinks[0], work, task
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records
    assert not releases.orphans


async def test_farewells_wait_until_decode_can_know_of_the_request():
    loop = asyncio.get_running_loop()
    closed = []

    class Stream:
        def close(self):
            closed.append(self)

    old, young, other = Stream(), Stream(), Stream()
    farewells = Farewells()
    farewells.part(old, time.monotonic() - 1)
    farewells.part(young, time.monotonic())
    assert closed == [old]
    farewells.close()
    assert closed == [old, young]
    farewells.linger_s = 0.0
    farewells.part(other, time.monotonic() + 0.001)
    gone = loop.create_future()
    loop.call_later(0.05, gone.set_result, None)
    await gone
    assert closed == [old, young, other]
