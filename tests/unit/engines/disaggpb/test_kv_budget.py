"""Memory for KV: nobody gets more than there is, everybody gets it back."""

import asyncio

import pytest
from engine_world import GUARD_S, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.errors import KvMemoryFull, KvTooLarge
from coordinator.engines.disaggpb.budget import SLACK_BYTES, KvBudget, KvLimits

MB = 1 << 20


def budget(request_mb=10, total_mb=30, per_token=None, queue=100, wait_s=GUARD_S):
    return KvBudget(KvLimits(request_mb * MB, total_mb * MB, queue, wait_s, per_token))


async def fill(made, tokens=1, size_bytes=MB, kind="m"):
    """Admit a request and let its whole KV come."""
    room = await made.admit(kind, tokens)
    await room.take(size_bytes)
    room.settle()
    return room


def waits(made, tokens=1, kind="m"):
    return asyncio.create_task(made.admit(kind, tokens), name="wait")


def assert_idle(made):
    assert (made.reserved_bytes, made.buffered_bytes, made.waiting) == (0, 0, 0)


# --- estimates


async def test_as_long_as_nothing_is_known_the_most_is_reserved():
    made = budget()
    with await made.admit("m", 5):
        assert made.reserved_bytes == 10 * MB


async def test_what_a_token_takes_is_learned_for_each_model():
    made = budget()
    with await fill(made, tokens=10, size_bytes=MB):
        assert made.reserved_bytes == made.buffered_bytes == MB
    assert MB * 2 < made.estimate_bytes("m", 20) < MB * 2.2 + SLACK_BYTES
    assert made.estimate_bytes("another", 20) == 10 * MB
    assert made.estimate_bytes("m", 10_000) == 10 * MB, "never more than one may have"
    assert_idle(made)


async def test_higher_figures_count_at_once_and_lower_ones_slowly():
    made = budget()
    for size in (1000, 4000):
        (await fill(made, tokens=10, size_bytes=size)).release()
    assert made.estimate_bytes("m", 10) > 4000 + SLACK_BYTES - 1
    for _ in range(40):
        (await fill(made, tokens=10, size_bytes=1000)).release()
    assert made.estimate_bytes("m", 10) < 1100 + SLACK_BYTES


async def test_a_configured_size_goes_before_what_is_learned():
    made = budget(per_token=1000)
    (await fill(made, tokens=1, size_bytes=MB)).release()
    assert made.estimate_bytes("m", 100) < 102_000 + SLACK_BYTES


async def test_by_the_configured_size_the_impossible_is_refused_before_prefill():
    made = budget(per_token=MB)
    with pytest.raises(KvTooLarge) as caught:
        await made.admit("m", 11)
    assert caught.value.status == 413
    assert_idle(made)


# --- limits


async def test_a_request_that_grows_above_its_limit():
    made = budget()
    with await made.admit("m", 1) as room:
        for _ in range(10):
            await room.take(MB)
        with pytest.raises(KvTooLarge):
            await room.take(1)
    assert_idle(made)


async def test_ten_at_once_are_admitted_by_bytes():
    made = budget(request_mb=10, total_mb=32)
    (await fill(made, tokens=1000, size_bytes=8 * MB)).release()
    tasks = [waits(made, 1000) for _ in range(10)]
    most = 0
    for _ in range(10):
        await turns()
        done = [task for task in tasks if task.done()]
        most = max(most, len(done))
        assert made.reserved_bytes <= 32 * MB
        task = done[0]
        with task.result() as room:
            await room.take(8 * MB)
            room.settle()
        tasks.remove(task)
    assert most == 3, "four and their slack do not fit"
    assert_idle(made)


async def test_nobody_overtakes():
    made = budget(request_mb=10, total_mb=10, per_token=MB)
    first = await made.admit("m", 5)
    large, small = waits(made, 9), waits(made, 1)
    await turns()
    assert not small.done(), "it would fit, but somebody is before it"
    first.release()
    await turns()
    assert large.done()
    assert not small.done()
    large.result().release()
    await turns()
    small.result().release()
    assert_idle(made)


async def test_what_was_reserved_in_vain_is_given_back_when_the_kv_is_whole():
    made = budget(request_mb=10, total_mb=10)
    first = await made.admit("m", 1)
    second = waits(made, 1)
    await turns()
    assert not second.done()
    await first.take(MB)
    first.settle()
    await turns()
    assert second.done(), "by what was learned there is room for more"
    second.result().release()
    first.release()
    assert_idle(made)


async def test_a_full_line():
    made = budget(request_mb=10, total_mb=10, queue=1)
    first = await made.admit("m", 1)
    second = waits(made)
    await turns()
    with pytest.raises(KvMemoryFull) as caught:
        await made.admit("m", 1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    first.release()
    (await second).release()
    assert_idle(made)


async def test_a_wait_that_takes_too_long():
    made = budget(request_mb=10, total_mb=10, wait_s=0.01)
    first = await made.admit("m", 1)
    with pytest.raises(KvMemoryFull):
        await made.admit("m", 1)
    assert made.waiting == 0
    first.release()
    assert_idle(made)


# --- growing


async def crowd(made, size_bytes):
    """Three that hold all there is, each with less than it needs."""
    (await fill(made, tokens=1000, size_bytes=size_bytes)).release()
    rooms = [await made.admit("m", 1000) for _ in range(3)]
    for room in rooms:
        await room.take(room.reserved_bytes)
    return rooms


async def test_whoever_needs_more_goes_before_those_who_have_nothing():
    made = budget(request_mb=12, total_mb=30)
    rooms = await crowd(made, 9 * MB)
    late = waits(made, 1000)
    growing = asyncio.create_task(rooms[0].take(2 * MB))
    await turns()
    assert made.reserved_bytes <= 30 * MB
    assert growing.done(), "there is as much left"
    more = asyncio.create_task(rooms[1].take(2 * MB))
    await turns()
    assert not more.done()
    assert made.waiting == 2
    rooms[2].release()
    await turns()
    assert more.done()
    rooms[0].release()
    rooms[1].release()
    (await late).release()
    assert_idle(made)


async def test_where_all_wait_for_each_other_the_youngest_gives_up():
    made = budget(request_mb=12, total_mb=29)
    rooms = await crowd(made, 9 * MB)
    growing = [asyncio.create_task(room.take(2 * MB)) for room in rooms]
    await turns()
    assert [task.done() for task in growing] == [False, False, True]
    assert isinstance(growing[2].exception(), KvMemoryFull)
    rooms[2].release()
    await turns()
    assert all(task.done() for task in growing)
    for room in rooms:
        room.release()
    assert_idle(made)


async def test_a_cancelled_wait_leaves_nothing():
    made = budget(request_mb=10, total_mb=10)
    first = await made.admit("m", 1)
    gone, stays = waits(made), waits(made)
    await turns()
    gone.cancel()
    await turns()
    first.release()
    await turns()
    stays.result().release()
    assert_idle(made)


async def test_cancelled_in_the_moment_in_which_memory_comes():
    made = budget(request_mb=10, total_mb=10)
    first = await made.admit("m", 1)
    gone, stays = waits(made), waits(made)
    await turns()
    first.release()  # gone has it
    gone.cancel()
    await turns()
    stays.result().release()
    assert_idle(made)


async def test_giving_back_twice_is_giving_back_once():
    made = budget()
    with await fill(made) as one, await fill(made):
        one.release()
        one.release()
        assert made.buffered_bytes == MB
    assert_idle(made)


# --- everything at once

STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(("go", "take", "settle", "end", "cancel")), st.integers(1, 6)),
    max_size=80,
)


class Story:
    """One request that does what it is told, and ends as requests do, by an error or a cancellation too."""

    def __init__(self, made, tokens):
        self.steps = asyncio.Queue()
        self.task = asyncio.create_task(self._live(made, tokens), name="story")

    async def _live(self, made, tokens):
        try:
            with await made.admit("m", tokens) as room:
                settled = False
                while (step := await self.steps.get())[0] != "end":
                    if step[0] == "take" and not settled:
                        await room.take(step[1] * MB)
                    elif step[0] == "settle":
                        room.settle()
                        settled = True
        except (KvTooLarge, KvMemoryFull):
            pass


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, total_mb=st.integers(10, 25), per_token=st.sampled_from((None, MB, MB // 4)))
def test_the_sum_never_exceeds_the_total_and_everything_comes_back(steps, total_mb, per_token):
    asyncio.run(run_story(steps, total_mb, per_token))


async def run_story(steps, total_mb, per_token):
    made = budget(request_mb=10, total_mb=total_mb, per_token=per_token, queue=6)
    stories = {}
    for number, what, size in steps:
        story = stories.get(number)
        if story is None or story.task.done():
            story = stories[number] = Story(made, size)
        if what == "cancel":
            story.task.cancel()
        elif what != "go":
            story.steps.put_nowait((what, size))
        await turns(2)
        assert 0 <= made.reserved_bytes <= total_mb * MB
        assert made.buffered_bytes >= 0
    for story in stories.values():
        story.steps.put_nowait(("end", 0))
    async with asyncio.timeout(GUARD_S):
        await asyncio.gather(*(story.task for story in stories.values()), return_exceptions=True)
    assert_idle(made)
    (await made.admit("m", 1)).release()
    assert_idle(made)
