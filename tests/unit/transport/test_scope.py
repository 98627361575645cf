"""Ending a block from outside: against waits, ends, nested blocks and cancellations that come at the same time."""

import asyncio
import contextlib

import pytest
from scripted_engine import GUARD_S, turns

from coordinator.transport.scope import Scope


class Over(Exception):
    pass


class Other(Exception):
    pass


async def run(body):
    """Run a body that is given a scope in a task; returns task and scope once the task waits."""
    scope = Scope()
    task = asyncio.get_running_loop().create_task(body(scope), name="scoped")
    await turns(2)
    return task, scope


async def outcome(task):
    """What became of a task: its result, its error or `cancelled`."""
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    return task.exception() or task.result()


async def waiting(scope):
    async with scope:
        await asyncio.Event().wait()
    return "went on"


async def test_an_interrupt_from_outside_ends_the_wait_with_its_error():
    task, scope = await run(waiting)
    error = Over()
    scope.interrupt(error)
    assert await outcome(task) is error
    assert error.__cause__ is None
    assert error.__suppress_context__


async def test_the_first_interrupt_counts():
    task, scope = await run(waiting)
    first = Over("first")
    scope.interrupt(first)
    scope.interrupt(Over("second"))
    assert await outcome(task) is first


async def test_the_task_is_clean_afterwards():
    async def body(scope):
        with contextlib.suppress(Over):
            async with scope:
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)
        return "clean"

    task, scope = await run(body)
    scope.interrupt(Over())
    assert await outcome(task) == "clean"


async def test_before_and_after_the_block_nothing_happens():
    scope = Scope()
    scope.interrupt(Over("before"))
    async with scope:
        await asyncio.sleep(0)
    scope.interrupt(Over("after"))
    await turns(3)
    assert asyncio.current_task().cancelling() == 0


async def test_from_inside_at_the_end_of_the_block():
    """The error comes out where the block ends, and no cancellation is left for the next wait."""
    scope = Scope()
    with pytest.raises(Over):
        async with scope:
            scope.interrupt(Over())
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_from_inside_before_a_wait():
    scope = Scope()
    reached = []

    async def body():
        async with scope:
            scope.interrupt(Over())
            await asyncio.sleep(0)
            reached.append("past the wait")

    with pytest.raises(Over):
        await body()
    assert reached == []


async def test_an_error_of_the_block_itself_goes_first():
    scope = Scope()

    async def body():
        async with scope:
            scope.interrupt(Over())
            raise Other

    with pytest.raises(Other):
        await body()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_cancellation_from_elsewhere_wins(cancel_first):
    task, scope = await run(waiting)
    if cancel_first:
        task.cancel()
    scope.interrupt(Over())
    if not cancel_first:
        task.cancel()
    assert await outcome(task) == "cancelled"


async def test_a_cancellation_from_elsewhere_wins_over_an_interrupt_from_inside():
    scope = Scope()

    async def body():
        async with scope:
            scope.interrupt(Over())
            asyncio.current_task().cancel()

    assert await outcome(asyncio.get_running_loop().create_task(body(), name="scoped")) == "cancelled"


async def test_a_cancellation_without_an_interrupt_passes():
    task, _ = await run(waiting)
    task.cancel()
    assert await outcome(task) == "cancelled"


async def test_an_earlier_cancellation_that_was_taken_back_does_not_count():
    async def body(scope):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        # still `cancelling`, as in a cleanup that goes on working
        with pytest.raises(Over):
            async with scope:
                await asyncio.Event().wait()
        return asyncio.current_task().cancelling()

    task, scope = await run(body)
    task.cancel()
    await turns(2)
    scope.interrupt(Over())
    assert await outcome(task) == 1


async def test_while_a_finally_waits():
    """What cleans up after an interrupt runs to its end."""
    cleaned = []
    gate = asyncio.Event()

    async def body(scope):
        async with scope:
            try:
                await asyncio.Event().wait()
            finally:
                await gate.wait()
                cleaned.append("whole")

    task, scope = await run(body)
    scope.interrupt(Over())
    await turns(3)
    assert not task.done()
    scope.interrupt(Over("again"))
    gate.set()
    assert isinstance(await outcome(task), Over)
    assert cleaned == ["whole"]


async def test_a_first_interrupt_during_a_finally_cuts_the_finally():
    cleaned = []
    gate = asyncio.Event()

    async def body(scope):
        async with scope:
            try:
                raise Other
            finally:
                try:
                    await gate.wait()
                    cleaned.append("whole")
                finally:
                    cleaned.append("cut")

    task, scope = await run(body)
    scope.interrupt(Over())
    assert isinstance(await outcome(task), Over)
    assert cleaned == ["cut"]


async def test_a_block_that_swallows_the_cancellation_still_ends_with_the_error():
    async def body(scope):
        async with scope:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return "went on"

    task, scope = await run(body)
    scope.interrupt(Over())
    assert isinstance(await outcome(task), Over)


class TestNested:
    async def start(self):
        inner, outer = Scope(), Scope()
        seen = []

        async def body():
            async with outer:
                try:
                    async with inner:
                        await asyncio.Event().wait()
                except Over as error:
                    seen.append(error)
                    await asyncio.Event().wait()

        task = asyncio.get_running_loop().create_task(body(), name="nested")
        await turns(2)
        return task, inner, outer, seen

    async def test_the_inner_one_alone(self):
        task, inner, outer, seen = await self.start()
        inner.interrupt(Over("inner"))
        await turns(3)
        assert [str(error) for error in seen] == ["inner"]
        assert not task.done()
        last = Other()
        outer.interrupt(last)
        assert await outcome(task) is last

    async def test_the_outer_one_passes_the_inner(self):
        task, _, outer, seen = await self.start()
        last = Other()
        outer.interrupt(last)
        assert await outcome(task) is last
        assert seen == []

    @pytest.mark.parametrize("inner_first", [True, False])
    async def test_both_at_once_end_the_outer(self, inner_first):
        task, inner, outer, seen = await self.start()
        last = Other()
        calls = [lambda: inner.interrupt(Over()), lambda: outer.interrupt(last)]
        for call in calls if inner_first else reversed(calls):
            call()
        assert await outcome(task) is last
        assert seen == []

    async def test_a_cancellation_passes_both(self):
        task, inner, outer, seen = await self.start()
        inner.interrupt(Over())
        outer.interrupt(Other())
        task.cancel()
        assert await outcome(task) == "cancelled"
        assert seen == []


@pytest.mark.parametrize("scope_first", [True, False])
async def test_inside_a_timeout_that_fires_at_the_same_time(scope_first):
    """Both cancel the task; each takes back its own, and the one further out has the last word."""
    scope = Scope()
    limits = []

    async def body():
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            async with scope:
                await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    task = loop.create_task(body(), name="scoped")
    await turns(2)
    if scope_first:
        loop.call_soon(scope.interrupt, Over())
    limits[0].reschedule(loop.time() - 1)  # fires in the same turn of the loop
    if not scope_first:
        loop.call_soon(scope.interrupt, Over())
    assert isinstance(await outcome(task), TimeoutError)


async def test_a_cancellation_that_meets_the_end_of_an_interrupted_block():
    """It arrives while the block takes in its own cancellation: it must not get lost."""
    scope = Scope()

    async def body():
        async with scope:
            asyncio.get_running_loop().call_soon(task.cancel)
            scope.interrupt(Over())

    task = asyncio.get_running_loop().create_task(body(), name="scoped")
    assert await outcome(task) == "cancelled"
