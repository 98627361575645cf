"""What a request's record keeps of its way: time in each stage, and who has failed it."""

import pytest
from dispatch_world import LAST, A, World, good

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.ports import COMPLETED


def spent(record):
    return record.prefill_s, record.handoff_s, record.decode_s


async def test_each_stage_has_its_time():
    async def whole(attempt):
        attempt.placement.prefilled(1001.0)
        attempt.placement.decoding(1003.0)
        attempt.out.piece(A, 1003.0)
        attempt.out.finish(LAST, 1006.0)
        world.clock.now_s = 1006.5
        return COMPLETED

    world = World(whole)
    run = await world.run()
    assert spent(run.record) == (1.0, 2.0, 3.5)
    assert run.record.failed_legs == ()


@pytest.mark.parametrize(
    ("prefilled_s", "decoding_s", "expected"),
    [(None, None, (4.0, None, None)), (1001.0, None, (1.0, 3.0, None)), (1001.0, 1002.0, (1.0, 1.0, 2.0))],
)
async def test_the_stage_in_which_it_ends_counts_until_the_end(prefilled_s, decoding_s, expected):
    async def cut_short(attempt):
        if prefilled_s is not None:
            attempt.placement.prefilled(prefilled_s)
        if decoding_s is not None:
            attempt.placement.decoding(decoding_s)
        world.clock.now_s = 1004.0
        raise EngineFailed(Side.DECODE, attempt.placement.decode.id, "reset")

    world = World(cut_short, max_attempts=1)
    run = await world.run()
    assert isinstance(run.error, EngineFailed)
    assert spent(run.record) == expected


async def test_a_hybrid_instance_hands_nothing_over():
    async def alone(attempt):
        world.clock.now_s = 1002.0
        attempt.placement.decoding(1002.0)
        attempt.out.finish(LAST, 1002.0)
        return COMPLETED

    world = World(alone, prefills=0, decodes=0, hybrids=1)
    run = await world.run()
    assert spent(run.record) == (2.0, None, 0.0)


async def test_failed_attempts_are_kept_and_the_times_are_those_of_the_last_one():
    async def broken(attempt):
        attempt.placement.prefilled(1000.5)
        world.clock.now_s = 1001.0
        raise EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "reset")

    world = World(broken, good, prefills=2)
    run = await world.run()
    assert run.error is None
    first = world.pairs[0][0]
    assert run.record.failed_legs == (("prefill", "reset", first),)
    assert run.record.prefill != first
    assert run.record.prefill_s == 0.0


async def test_a_decode_that_was_exchanged_is_kept_too():
    async def moves(attempt):
        failed = attempt.placement.decode.id
        assert attempt.placement.another_decode(EngineFailed(Side.DECODE, failed, "closed"))
        return await good(attempt)

    world = World(moves, decodes=2)
    run = await world.run()
    assert run.error is None
    ((side, reason, failed),) = run.record.failed_legs
    assert (side, reason) == ("decode", "closed")
    assert failed != run.record.decode
