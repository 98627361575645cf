"""How the time to first token is divided among stages and instances."""

import asyncio

import pytest
from dispatch_world import LAST, A, World, ended

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.ports import COMPLETED, Resume
from coordinator.observability.trace import Trace

BODY = b'{"model":"m","messages":"2,1,2,3","stream":true}'


def split(world):
    """Seconds by stage and instance, of those that were observed."""
    cells = world.metrics.ttft_stage.snapshot()
    return {labels: cell[-1] for labels, cell in cells.items() if sum(cell[:-1])}


async def stream(attempt, *, prefilled_s=1001.0, first_s=1003.0):
    attempt.placement.prefilled(prefilled_s)
    attempt.placement.decoding(first_s)
    attempt.out.piece(A, first_s)
    attempt.out.finish(LAST, first_s + 5)
    return COMPLETED


async def test_parts_of_a_pair_make_up_the_whole():
    world = World(stream)
    run = await world.run(arrived_s=999.5)
    assert run.error is None
    pair = world.pairs[0]
    assert split(world) == {("queue", ""): 0.5, ("prefill", pair[0]): 1.0, ("handoff", pair[1]): 2.0}
    assert sum(split(world).values()) == run.record.ttft_s == 3.5


async def test_the_first_token_may_be_of_prefill():
    async def early(attempt):
        return await stream(attempt, prefilled_s=1002.0, first_s=1001.5)

    world = World(early)
    run = await world.run()
    pair = world.pairs[0]
    assert split(world) == {("queue", ""): 0.0, ("prefill", pair[0]): 1.5, ("handoff", pair[1]): 0.0}
    assert run.record.ttft_s == 1.5


async def test_a_hybrid_instance_has_it_all():
    world = World(stream, prefills=0, decodes=0, hybrids=1)
    await world.run()
    assert split(world) == {("queue", ""): 0.0, ("prefill", "h0"): 3.0}


async def test_a_decode_that_serves_alone_has_it_all():
    async def alone(attempt):
        attempt.placement.skip_prefill()
        return await stream(attempt)

    world = World(alone)
    await world.run()
    assert split(world) == {("queue", ""): 0.0, ("prefill", world.pairs[0][1]): 3.0}


async def test_attempts_that_failed_before_are_told_apart():
    async def fails(attempt):
        world.clock.now_s += 4
        raise EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "connect_refused", connecting=True)

    async def late(attempt):
        return await stream(attempt, prefilled_s=1005.0, first_s=1006.0)

    world = World(fails, late)
    run = await world.run(arrived_s=999.0)
    pair = world.pairs[1]
    assert split(world) == {
        ("queue", ""): 1.0,
        ("retries", ""): 4.0,
        ("prefill", pair[0]): 1.0,
        ("handoff", pair[1]): 1.0,
    }
    assert sum(split(world).values()) == run.record.ttft_s


async def test_a_request_that_decode_gives_back_is_divided_once():
    async def gives_back(attempt):
        attempt.placement.prefilled(1001.0)
        attempt.placement.decoding(1001.0)
        attempt.out.piece(A, 1001.0)
        return Resume(BODY)

    world = World(gives_back, stream)
    await world.run()
    counts = {labels[0]: sum(cell[:-1]) for labels, cell in world.metrics.ttft_stage.snapshot().items()}
    assert len(world.pairs) == 2
    assert counts == {"queue": 1, "retries": 0, "prefill": 1, "handoff": 1}


@pytest.mark.parametrize("streams", [True, False])
async def test_only_streams_have_a_first_token_of_their_own(streams):
    async def whole(attempt):
        if streams:
            return await stream(attempt)
        attempt.placement.prefilled(1001.0)
        attempt.placement.decoding(1002.0)
        attempt.out.whole(b"{}", 1002.0)
        return COMPLETED

    world = World(whole)

    await world.run(stream=streams)
    assert bool(split(world)) is streams


async def test_series_of_an_instance_that_is_gone_disappear():
    world = World(stream)
    await world.run()
    prefill, decode = world.pairs[0]
    world.metrics.forget_instance(prefill)
    assert {labels[1] for labels in split(world)} == {"", decode}


# --- what a trace keeps


def traced(world, **given):
    """A request that is traced, started."""
    run = world.start(**given)
    run.record.trace = Trace(1, 2, 0, True, b"", world.clock.now_s, 0.0, "POST")
    return run


async def test_a_trace_has_each_attempt_with_its_failure():
    async def fails(attempt):
        world.clock.now_s += 4
        raise EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "reset")

    async def late(attempt):
        return await stream(attempt, prefilled_s=1005.0, first_s=1006.0)

    world = World(fails, late)
    run = traced(world)
    assert await ended(run.task) is None
    first, second = run.record.trace.attempts
    assert (first.prefill, first.decode) == world.pairs[0]
    assert (first.placed_s, first.prefilled_s, first.ended_s) == (1000.0, None, 1004.0)
    assert (first.guilty, first.reason) == (world.pairs[0][0], "reset")
    assert (second.prefilled_s, second.decoding_s, second.reason) == (1005.0, 1006.0, "")
    assert (first.wire_ids, second.wire_ids) == (("1",), ("2",))
    assert {first.engine, second.engine} == {"mindie"}


async def test_a_trace_has_decode_instances_that_were_replaced():
    async def replaced(attempt):
        attempt.placement.prefilled(1001.0)
        failure = EngineFailed(Side.DECODE, attempt.placement.decode.id, "reset")
        assert attempt.placement.another_decode(failure)
        return await stream(attempt)

    world = World(replaced)
    run = traced(world)
    assert await ended(run.task) is None
    (move,) = run.record.trace.moves
    (kept,) = run.record.trace.attempts
    assert (move.at_s, move.instance, move.reason) == (1000.0, world.pairs[0][1], "reset")
    assert kept.decode != move.instance


async def test_a_client_that_leaves_ends_its_attempt():
    async def hangs(attempt):
        attempt.placement.prefilled(1001.0)
        await asyncio.Event().wait()

    world = World(hangs)
    run = traced(world)
    async with asyncio.timeout(10):
        while not world.pairs:  # noqa: ASYNC110
            await asyncio.sleep(0)
    run.task.cancel()
    assert await ended(run.task) == "cancelled"
    (kept,) = run.record.trace.attempts
    assert (kept.prefilled_s, kept.decoding_s, kept.reason) == (1001.0, None, "")
