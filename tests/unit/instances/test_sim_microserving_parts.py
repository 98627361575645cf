"""Metadata, slots, pages, the radix cache, ranks and resumed answers, each alone."""

import asyncio
import socket

import pytest
from mindie_client import until

from instances import tokens
from instances.answers import Wish, plan
from instances.ledger import OutOfBlocks
from instances.microserving import metadata
from instances.microserving.memory import Pages, Radix
from instances.microserving.resumed import rest_of
from instances.microserving.world import World
from instances.tasks import Tasks

BOUNDS = (8, 48)


@pytest.mark.parametrize(
    ("models", "text"), [(((),), "WzBd"), ((((0, 9),),), "WzEsMCw5XQ=="), ((((0, 4), (32, 9)), ((64, 13),)), None)]
)
def test_metadata_there_and_back(models, text):
    encoded = metadata.encode(models)
    assert text in (None, encoded)
    assert metadata.decode(encoded) == models


@pytest.mark.parametrize("text", ["", "W", "eyJhIjoxfQ==", "WzEsMF0=", "Wy0xXQ==", "W3RydWVd", "Wzk5OV0="])
def test_metadata_that_is_none(text):
    with pytest.raises(ValueError, match=r"."):
        metadata.decode(text)


def test_slots_are_pages_with_gaps_between_pieces():
    slots = metadata.Slots(16)
    assert slots.take(9, 1) == ((0, 9),)
    assert slots.take(0, 3) == ()
    pieces = slots.take(100, 3)
    assert pieces == ((16, 48), (80, 48), (144, 4))
    assert metadata.length_of(pieces) == 100
    assert slots.take(16, 5) == ((160, 16),)


@pytest.mark.parametrize(("index", "resolved"), [(3, 3), (0, 0), (-1, 9), (-10, 0), (-11, -1)])
def test_windows(index, resolved):
    assert metadata.resolve(index, 10) == resolved


async def test_the_line_for_pages_keeps_its_order():
    pages = Pages(10)
    await pages.wait_room("a", 16 * 4, "x", 6)
    order = []

    async def wait(name, page_count, reserve=0):
        await pages.wait_room(name, 16 * page_count, "x", reserve)
        order.append(name)

    large = asyncio.create_task(wait("b", 7))
    small = asyncio.create_task(wait("c", 1))
    gone = asyncio.create_task(wait("d", 1))
    await until(lambda: pages.waiting == 3)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert (order, pages.waiting) == ([], 2)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await small
    assert (order, pages.waiting) == (["c"], 0)
    pages.release("a", "y")
    await wait("b", 8, 1)
    assert pages.free_blocks == 1
    with pytest.raises(OutOfBlocks):
        pages.grow("c", 16 * 3)


async def test_pages_that_come_as_their_request_leaves_go_back():
    pages = Pages(1)
    await pages.wait_room("a", 16, "x")
    waiting = asyncio.create_task(pages.wait_room("b", 16, "x"))
    await until(lambda: pages.waiting == 1)
    pages.release("a", "y")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (pages.used_blocks, pages.released[-1]["id"]) == (0, "b")


def test_the_radix_cache():
    radix = Radix(2)
    radix.insert(range(20))
    radix.insert([0, 1, 2, 9, 9])
    assert [radix.match(p) for p in ([5], [0], [0, 1, 2, 3, 9], [0, 1, 2, 9, 9, 9], list(range(30)))] == [
        0,
        1,
        4,
        5,
        20,
    ]
    radix.insert([7] * 10)  # too much: what was not asked for longest goes
    assert [radix.match(p) for p in ([0, 1, 2, 9, 9], list(range(20)), [7])] == [3, 20, 1]
    radix.clear()
    assert radix.match([7]) == 0
    assert Radix(0).match([1]) == 0


async def test_ranks_of_a_world():
    tasks, got = Tasks(), []
    worlds = [World("unit", lambda rank, write: got.append((rank, write)) is None, tasks) for _ in range(3)]
    try:
        assert await worlds[0].join(-1, 2) == 0
        assert await worlds[1].join(-1, 3) == 2
        with pytest.raises(ValueError, match="ranks 4 to 5 of world 'unit' are not all free"):
            await worlds[2].join(4, 2)
        assert await worlds[2].join(5, 1) == 5
        assert await worlds[0].write(3, {"kv": "x" * 200_000}) == "arrived"
        assert await worlds[0].write(6, {}) == "nobody"
        assert got == [(3, {"kv": "x" * 200_000})]
        await worlds[1].aclose()
        assert await worlds[0].write(3, {}) == "nobody"
        with socket.socket(socket.AF_UNIX) as other:  # something that is no write
            other.setblocking(False)
            other.connect("\0pd-coordinator-instance/unit/0")
            other.send(b"not json\n")
            assert await asyncio.get_running_loop().sock_recv(other, 100) == b""
        assert len(got) == 1
    finally:
        for world in worlds:
            await world.aclose()
        await tasks.aclose()


@pytest.mark.parametrize("prompt", ["a plain story", "user: go on [[length:30]]\nassistant:", "ends with a number 7"])
@pytest.mark.parametrize("from_ids", [False, True])
def test_every_beginning_of_an_answer_is_continued(prompt, from_ids):
    ids = tokens.encode(prompt)
    whole = rest_of(Wish(ids, 40), prompt, 0, BOUNDS, from_ids=from_ids)
    assert whole.carried == 0
    for count in range(1, len(whole.plan)):
        if from_ids:
            more = ids + whole.plan.tokens[:count]
            text = tokens.decode(more)
        else:
            begun = "".join(whole.plan.texts[:count])
            text = prompt + begun
            more = tokens.encode(text)
        rest = rest_of(Wish(more, 40 - count), text, 0, BOUNDS, from_ids=from_ids)
        if whole.plan.texts[count - 1]:
            assert rest.carried == count
            assert (rest.plan.tokens, rest.plan.finish) == (whole.plan.tokens[count:], whole.plan.finish)


def test_what_only_looks_like_a_beginning_is_a_prompt():
    text = "Hello\nThe quiet river.\nWater"
    ids = tokens.encode(text)
    rest = rest_of(Wish(ids, 40), text, 0, BOUNDS, from_ids=False)
    assert (rest.carried, rest.plan) == (0, plan(Wish(ids, 40), 0, BOUNDS))
