import asyncio

import pytest

from coordinator.steps import STEP_S, in_steps


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def work(clock, paces, seen):
    for pace_s in paces:
        clock.now_s += pace_s
        seen.append(pace_s)
        yield
    return "found"


async def beside(task):
    """How many turns the loop makes until a task has ended."""
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_what_takes_a_while_lets_the_loop_turn():
    clock, seen = Clock(), []
    task = asyncio.create_task(in_steps(work(clock, [STEP_S / 4] * 40, seen), clock))
    assert 10 <= await beside(task) <= 12
    assert (task.result(), len(seen)) == ("found", 40)


async def test_what_is_done_at_once_does_not_wait():
    coroutine = in_steps(work(Clock(), [], []))
    with pytest.raises(StopIteration, match="found"):
        coroutine.send(None)


async def test_an_error_is_raised():
    def failing():
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_steps(failing())


async def test_cancelled_it_goes_no_further():
    clock, seen = Clock(), []
    task = asyncio.create_task(in_steps(work(clock, [STEP_S] * 40, seen), clock))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(seen) < 5
