"""Leaving at any moment: nothing stays pinned, no connection stays in use."""

import asyncio
import gc
import time

import pytest
from msgspec import Raw
from vllm_pair import COMPLETIONS, Placement, Sink

from coordinator.core.ids import WireIds
from coordinator.engines.http_leg import StreamLeg
from coordinator.engines.vllm.handoff import Handoff, Means
from coordinator.engines.vllm.legs import Farewells
from coordinator.engines.vllm.missing import MissingKv
from coordinator.transport.errors import TransportError
from coordinator.wire.json_edit import read_fields
from coordinator.wire.vllm_answers import Prefilled

pytestmark = pytest.mark.uncompiled  # a client of its own

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


async def leave_at_decode(world, *, stream, opened=None):
    """Leave while decode has the request; with `opened`, once that is set."""
    world.engine.attach(world.other, world.watcher)
    task = asyncio.create_task(world.serve(world.request(stream=stream)))
    await world.until(lambda: world.d.seen and world.client.open_connections - world.client.idle_connections == 1)
    if opened is not None:
        await opened.wait()
    await leave(task)
    await world.until(lambda: world.d.aborted)
    await world.settled()


async def test_leaving_a_stream_that_decode_has_opened_asks_nobody_else(world, monkeypatch):
    opened, head = asyncio.Event(), StreamLeg.head

    def noted(self, *given):
        head(self, *given)
        opened.set()

    monkeypatch.setattr(StreamLeg, "head", noted)
    world.d.gate.clear()
    await leave_at_decode(world, stream=True, opened=opened)
    assert not world.d1.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_a_decode_that_has_not_looked_at_the_request_releases_the_kv(world, stream):
    world.d.door.clear()
    await leave_at_decode(world, stream=stream)
    assert not world.pinned
    assert len(world.d1.seen) == 1
    assert world.count("aborts", "sent") == 1


async def test_leaving_a_whole_answer_that_is_on_its_way_asks_another_who_finds_nothing(world, caplog):
    """Nobody can tell it from a decode that has not looked at it: the refusal means that the KV is gone."""
    world.d.gate.clear()
    await leave_at_decode(world, stream=False)
    assert len(world.d1.seen) == 1
    assert world.count("aborts", "not_found") == 1
    assert world.count("handoffs_abandoned") == 0
    assert not caplog.records


async def test_a_decode_that_has_worked_for_long_is_trusted(world, monkeypatch):
    monkeypatch.setattr("coordinator.engines.vllm.handoff.UNSURE_S", 0.0)
    world.d.gate.clear()
    await leave_at_decode(world, stream=False)
    assert not world.d1.seen


async def test_while_decode_may_still_look_at_it_the_kv_counts_as_pinned(world):
    world.engine._farewells.linger_s = 5.0
    world.engine.attach(world.other, world.watcher)
    world.d.door.clear()
    task = asyncio.create_task(world.serve(world.request(stream=True)))
    await world.until(lambda: world.d.seen)
    await leave(task)
    assert world.engine.pinned() == {"p0": 1}
    assert not world.d1.seen
    assert not world.d.aborted
    world.d.door.set()


class ByHand:
    """A client whose connections and replies come when the test says so."""

    def __init__(self, wait=None):
        self.sinks = []
        self.wait = wait
        self.closed = 0

    @property
    def loop(self):
        return asyncio.get_running_loop()

    async def open_stream(self, address, method, target, headers, body, *, sink):
        if self.wait is not None and self.sinks:
            await self.wait
        self.sinks.append(sink)
        return self

    def close(self):
        self.closed += 1

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


async def test_prefill_answers_just_after_we_have_left(world):
    """Its answer was on its way: the connection is read on for a moment, for nobody else has the record."""
    client = ByHand()
    work, releases = handoff(world, client)
    task = asyncio.create_task(work.prefill())
    await asyncio.sleep(0)
    await leave(task)
    assert not client.closed
    answer(client.sinks[0])
    assert [o.doubtful for o in releases.orphans] == [False]
    await world.until(lambda: client.closed == 1)


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_that_comes_after_we_have_left_is_nothing_to_release(world, status):
    client = ByHand()
    work, releases = handoff(world, client)
    task = asyncio.create_task(work.prefill())
    await asyncio.sleep(0)
    await leave(task)
    client.sinks[0].head(status, ())
    client.sinks[0].end(1.0)
    assert not releases.orphans


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
    client.sinks[0].head(200, ())
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
    farewells.part(young, time.monotonic() + 60)
    assert closed == [old]
    farewells.close()
    assert closed == [old, young]
    farewells.linger_s = 0.0
    farewells.part(other, time.monotonic() + 0.001)
    gone = loop.create_future()
    loop.call_later(0.05, gone.set_result, None)
    await gone
    assert closed == [old, young, other]
