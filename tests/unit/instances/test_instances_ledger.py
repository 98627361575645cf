import asyncio

import pytest

from instances.ledger import KvLedger, OutOfBlocks
from instances.prefix import PrefixCache
from instances.timing import Clockwork, Timing


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


async def test_blocks_are_counted_from_allocation_over_pinning_to_release():
    clock = Clock()
    ledger = KvLedger(10, 16, clock)
    ledger.allocate("a", 33, "prefill")
    assert (ledger.count("allocated"), ledger.count("pinned"), ledger.free_blocks) == (3, 0, 7)
    ledger.pin("a", "waits")
    clock.now += 2
    shown = ledger.snapshot()
    assert (shown["allocated"], shown["pinned"]) == (0, 3)
    assert shown["held"] == [{"id": "a", "blocks": 3, "state": "pinned", "for_s": 2, "why": "waits"}]
    assert ledger.release("a", "pulled")
    assert ledger.snapshot()["released"] == [{"id": "a", "blocks": 3, "why": "pulled", "held_s": 2}]
    assert ledger.free_blocks == 10


async def test_a_second_release_does_nothing():
    ledger = KvLedger(10, 16)
    ledger.allocate("a", 1, "x")
    assert ledger.release("a", "y")
    assert not ledger.release("a", "z")
    assert (ledger.used_blocks, ledger.released_count) == (0, 1)


async def test_too_few_blocks_change_nothing():
    ledger = KvLedger(3, 16)
    ledger.allocate("a", 32, "x")
    with pytest.raises(OutOfBlocks):
        ledger.allocate("b", 32, "x")
    with pytest.raises(OutOfBlocks):
        ledger.grow("a", 64)
    assert ledger.used_blocks == 2
    ledger.grow("a", 48)
    assert ledger.used_blocks == 3


async def test_the_same_request_is_not_allocated_twice():
    ledger = KvLedger(3, 16)
    ledger.allocate("a", 1, "x")
    with pytest.raises(ValueError, match="holds KV already"):
        ledger.allocate("a", 1, "x")


async def test_waiting_for_an_empty_ledger():
    ledger = KvLedger(3, 16)
    assert await ledger.wait_empty(0)
    ledger.allocate("a", 1, "x")
    assert not await ledger.wait_empty(0)
    asyncio.get_running_loop().call_soon(ledger.clear, "over")
    assert await ledger.wait_empty(1)


def test_times_add_up_and_scale_with_the_speed():
    timing = Timing(
        prefill_ms=10, prefill_token_ms=2, decode_ms=20, decode_load=0.5, transfer_ms=1, transfer_token_ms=1
    )
    clockwork = Clockwork(timing, 0)
    assert clockwork.prefill_s(5) == pytest.approx(0.020)
    assert clockwork.step_s(1) == pytest.approx(0.020)
    assert clockwork.step_s(3) == pytest.approx(0.040)
    assert clockwork.transfer_s(9) == pytest.approx(0.010)
    assert Clockwork(Timing(decode_ms=20, speed=4), 0).step_s(1) == pytest.approx(0.005)
    assert Clockwork(Timing(decode_ms=20, speed=0), 0).step_s(1) == 0


def test_prefills_wait_for_a_free_lane():
    clockwork = Clockwork(Timing(prefill_ms=100, prefill_lanes=2), 0)
    waits = [clockwork.prefill_wait_s(1, now_s=50.0) for _ in range(4)]
    assert waits == pytest.approx([0.1, 0.1, 0.2, 0.2])
    assert clockwork.prefill_wait_s(1, now_s=60.0) == pytest.approx(0.1)


def test_jitter_comes_from_the_seed():
    def drawn(seed):
        clockwork = Clockwork(Timing(decode_ms=10, jitter=0.5), seed)
        return [clockwork.step_s(1) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(0.005 <= step_s <= 0.015 for step_s in drawn(1))
    assert len(set(drawn(1))) > 10


def test_the_prefix_cache_knows_whole_blocks_but_never_the_whole_prompt():
    cache = PrefixCache(100, 4)
    prompt = tuple(range(12))
    assert cache.lookup(prompt) == 0
    assert cache.lookup(prompt) == 11
    assert cache.lookup((*prompt[:8], 99, 98, 97, 96)) == 8
    assert cache.lookup((5, *prompt[1:])) == 0


def test_the_prefix_cache_forgets_the_oldest_and_may_be_off():
    cache = PrefixCache(1, 4)
    cache.lookup((1, 2, 3, 4, 5))
    cache.lookup((6, 7, 8, 9, 5))
    assert cache.lookup((1, 2, 3, 4, 5)) == 0
    off = PrefixCache(0, 4)
    off.lookup((1, 2, 3, 4, 5))
    assert off.lookup((1, 2, 3, 4, 5)) == 0


async def test_blocks_are_waited_for_in_order_of_arrival():
    ledger = KvLedger(4, 1)
    ledger.allocate("a", 4, "work")
    large = asyncio.create_task(ledger.wait_allocate("b", 3, "work"))
    small = asyncio.create_task(ledger.wait_allocate("c", 1, "work"))
    left = asyncio.create_task(ledger.wait_allocate("d", 4, "work"))
    await asyncio.sleep(0)
    assert ledger.waiting == 3
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    ledger.release("a", "done")
    await asyncio.gather(large, small)
    assert (ledger.used_blocks, ledger.waiting) == (4, 0)
    # one that fits does not overtake the line
    first = asyncio.create_task(ledger.wait_allocate("e", 4, "work"))
    await asyncio.sleep(0)
    ledger.release("c", "done")
    second = asyncio.create_task(ledger.wait_allocate("f", 1, "work"))
    await asyncio.sleep(0)
    assert (first.done(), second.done()) == (False, False)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert {holding["id"] for holding in ledger.snapshot()["held"]} == {"b", "f"}
    with pytest.raises(OutOfBlocks):
        await ledger.wait_allocate("g", 5, "work")


async def test_a_place_that_was_given_and_not_taken_is_given_back():
    ledger = KvLedger(1, 1)
    ledger.allocate("a", 1, "work")
    waiter = asyncio.create_task(ledger.wait_allocate("b", 1, "work"))
    await asyncio.sleep(0)
    ledger.release("a", "done")
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert ledger.used_blocks == 0
