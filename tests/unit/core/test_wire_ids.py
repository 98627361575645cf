"""Ids on the engines' wires."""

import asyncio

from coordinator.core.ids import RANDOM_BITS, WORKER_BITS, WireIds


def test_decimal_and_short_enough_for_every_engine():
    """MindIE protocol page §3.3: digits only, at most 20; §7: stopInfer takes up to 256 characters."""
    last = (1 << RANDOM_BITS - 1) - 1
    for ids in (WireIds(), WireIds(start=0), WireIds((1 << WORKER_BITS) - 1, start=last)):
        for _ in range(3):
            ident = ids.next()
            assert ident.isdecimal()
            assert ident.isascii()
            assert 0 < int(ident) < 1 << 64
            assert len(ident) <= 20


def test_no_id_twice():
    ids = WireIds()
    assert len({ids.next() for _ in range(10_000)}) == 10_000


def test_one_after_the_other_from_the_start():
    ids = WireIds(start=41)
    assert [ids.next(), ids.next()] == ["42", "43"]


def test_processes_never_share_an_id():
    """The process number stands in the upper bits, whatever the counters do."""
    seen = [{WireIds(worker, start=7).next() for _ in range(2)} for worker in range(1 << WORKER_BITS)]
    assert len(set().union(*seen)) == 1 << WORKER_BITS
    top = WireIds(1, start=(1 << RANDOM_BITS) - 2).next()
    assert int(top) >> RANDOM_BITS == 1


def test_two_runs_start_apart():
    assert len({WireIds().next() for _ in range(50)}) == 50


async def test_many_tasks_at_once():
    ids = WireIds()

    async def take():
        taken = []
        for _ in range(100):
            taken.append(ids.next())
            await asyncio.sleep(0)
        return taken

    taken = [ident for each in await asyncio.gather(*(take() for _ in range(20))) for ident in each]
    assert len(set(taken)) == len(taken) == 2000
