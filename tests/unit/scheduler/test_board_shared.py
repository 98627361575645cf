"""Schedulers of several processes, here in one, that share what they put on instances."""

import asyncio
import mmap
import random
from collections import Counter

import pytest
from scheduler_world import Clock, fleet, instance, request, see

from coordinator.core.errors import TooManyRequests
from coordinator.policies import Policies, load_policy
from coordinator.scheduler import LoadBoard, Scheduler, SharedLoads, size_bytes
from coordinator.scheduler.shared import READ_ALL_S

SLOTS = 64


class Several:
    """Schedulers over one board; `see` gives all of them the same view."""

    def __init__(self, count=2, *, policy="load_balance", max_queue=0):
        self.memory = mmap.mmap(-1, size_bytes(count, SLOTS))
        self.reader = LoadBoard(self.memory, count, SLOTS)
        self.clock = Clock()
        self.count = count
        self.policy = policy
        self.max_queue = max_queue
        self.schedulers = []
        self.shared = []
        for row in range(count):
            self.schedulers.append(None)
            self.shared.append(None)
            self.replace(row)

    def replace(self, row):
        """Another process takes the row."""
        made = Scheduler(
            Policies(load_policy(self.policy), load_policy(self.policy)), max_queue=self.max_queue, clock=self.clock
        )
        shared = SharedLoads(LoadBoard(self.memory, self.count, SLOTS, row))
        made.share(shared)
        self.schedulers[row], self.shared[row] = made, shared

    def see(self, *ready, slots=None):
        slots = {one.key: number for number, one in enumerate(ready)} if slots is None else slots
        for made, shared in zip(self.schedulers, self.shared, strict=True):
            shared.assign(slots)
            see(made, *ready)

    def totals(self, members):
        return [self.reader.total(number).requests for number, _ in enumerate(members)]


def in_flight(made, members):
    return [made.in_flight(one) for one in members]


def test_what_one_places_the_other_knows_at_its_next_choice():
    several = Several()
    members = fleet(1, 2)
    several.see(*members)
    first, second = several.schedulers
    held = first.try_place(request())
    other = second.try_place(request())
    assert held.decode.id != other.decode.id
    assert in_flight(second, members) == [2, 1, 1]
    assert several.totals(members) == [2, 1, 1]
    held.end()
    other.end()
    second.look_around()
    first.look_around()
    for made in several.schedulers:
        assert in_flight(made, members) == [0, 0, 0]
    assert several.totals(members) == [0, 0, 0]


@pytest.mark.parametrize("workers", [2, 4])
def test_load_stays_even_under_steady_load(workers):
    """Requests come to workers at random and stay for a while; no decode instance deviates by more than 10 %."""
    several = Several(workers)
    members = fleet(2, 4)
    several.see(*members)
    chance = random.Random(workers)
    live = []
    placed = Counter()
    for _ in range(2000):
        several.clock.now_s += 0.001
        lease = chance.choice(several.schedulers).try_place(request(prompt_bytes=chance.randrange(50, 500)))
        lease.prefilled(several.clock.now_s)
        lease.decoding(several.clock.now_s)
        placed[lease.decode.id] += 1
        live.append(lease)
        if len(live) > 80:
            live.pop(chance.randrange(len(live))).end()
            counts = Counter(lease.decode.id for lease in live)
            assert max(counts.values()) - min(counts.values()) <= 8, counts
    assert max(placed.values()) <= 1.1 * 500, placed
    assert min(placed.values()) >= 0.9 * 500, placed
    for lease in live:
        lease.end()
    assert several.totals(members) == [0] * 6


def test_a_full_instance_is_full_for_all():
    several = Several(2)
    members = [instance("p0"), instance("d0", max_requests=4)]
    several.see(*members)
    leases = [several.schedulers[number % 2].try_place(request()) for number in range(6)]
    assert [lease is not None for lease in leases] == [True] * 4 + [False] * 2
    leases[0].end()
    assert several.schedulers[1].try_place(request()) is not None
    assert several.schedulers[0].try_place(request()) is None


async def test_who_waits_here_gets_what_is_given_back_there():
    several = Several(2, max_queue=5)
    several.see(instance("p0"), instance("d0", max_requests=1))
    first, second = several.schedulers
    held = first.try_place(request())
    waiting = asyncio.create_task(second.place(request()), name="waiting")
    await asyncio.sleep(0)
    assert second.queued == 1
    second.look_around()
    await asyncio.sleep(0)
    assert not waiting.done()
    held.end()
    second.look_around()
    lease = await waiting
    assert lease.decode.id == "d0"
    assert several.reader.queued() == 0
    assert first.try_place(request()) is None


async def test_who_waits_comes_before_who_comes():
    several = Several(2, max_queue=5)
    several.see(instance("p0"), instance("d0", max_requests=1))
    first, second = several.schedulers
    held = first.try_place(request())
    waiting = asyncio.create_task(second.place(request(name="early")), name="waiting")
    await asyncio.sleep(0)
    held.end()
    assert second.try_place(request(name="late")) is None
    (await waiting).end()


async def test_the_line_is_one_for_all():
    several = Several(2, max_queue=3)
    several.see(instance("p0"), instance("d0", max_requests=1))
    held = several.schedulers[0].try_place(request())
    waiting = [
        asyncio.create_task(several.schedulers[number % 2].place(request()), name="waiting") for number in range(3)
    ]
    await asyncio.sleep(0)
    assert several.reader.queued() == 3
    for made in several.schedulers:
        with pytest.raises(TooManyRequests):
            await made.place(request())
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert several.reader.queued() == 2
    more = asyncio.create_task(several.schedulers[1].place(request()), name="more")
    await asyncio.sleep(0)
    assert several.reader.queued() == 3
    for task in (*waiting[1:], more):
        task.cancel()
    await asyncio.wait([*waiting, more])
    assert several.reader.queued() == 0
    held.end()


def test_a_process_that_dies_takes_its_load_along():
    several = Several()
    members = fleet(1, 2)
    several.see(*members)
    first, second = several.schedulers
    kept = second.try_place(request())
    for _ in range(10):
        first.try_place(request())
    assert sum(several.totals(members)[1:]) == 11
    several.reader.clear_row(0)
    assert sum(several.totals(members)[1:]) == 1
    second.look_around()
    assert sum(in_flight(second, members)[1:]) == 1
    several.replace(0)
    several.see(*members)
    fresh = several.schedulers[0].try_place(request())
    assert fresh.decode.id != kept.decode.id


class TestViews:
    def test_who_leaves_keeps_its_slot_until_it_is_idle(self):
        several = Several()
        p0, d0, d1 = fleet(1, 2)
        slots = {p0.key: 0, d0.key: 1, d1.key: 2}
        several.see(p0, d0, d1, slots=slots)
        first, second = several.schedulers
        leases = [first.try_place(request()) for _ in range(2)]
        several.see(p0, d1, slots=slots)
        assert several.reader.total(1).requests == 1
        for lease in leases:
            lease.end()
        assert several.reader.total(1).requests == 0
        assert second.try_place(request()).decode.id == "d1"

    def test_a_slot_serves_another_instance(self):
        several = Several()
        p0, d0, d1 = fleet(1, 2)
        several.see(p0, d0, slots={p0.key: 0, d0.key: 1})
        first, second = several.schedulers
        late = first.try_place(request())
        several.see(p0, d1, slots={p0.key: 0, d1.key: 1})
        assert several.reader.total(1).requests == 0, "what still runs on the old one is nobody's here"
        held = second.try_place(request())
        assert several.reader.total(1).requests == 1
        late.end()
        assert several.reader.total(1).requests == 1
        held.end()
        assert several.reader.total(1).requests == 0

    def test_who_comes_back_has_what_others_still_have_there(self):
        several = Several()
        p0, d0, d1 = fleet(1, 2)
        slots = {p0.key: 0, d0.key: 1, d1.key: 2}
        several.see(p0, d0, d1, slots=slots)
        first, second = several.schedulers
        for _ in range(6):
            first.try_place(request())
        several.see(p0, d1, slots=slots)
        several.see(p0, d0, d1, slots=slots)
        assert in_flight(second, [d0, d1]) == [3, 3]

    def test_without_a_slot_an_instance_is_used_and_not_shared(self):
        several = Several()
        p0, d0 = fleet(1, 1)
        several.see(p0, d0, slots={p0.key: 0})
        lease = several.schedulers[0].try_place(request())
        assert lease.decode.id == "d0"
        assert in_flight(several.schedulers[1], [d0]) == [0]
        lease.end()


def test_everything_is_read_now_and_then_whatever_the_journals_say():
    """What a processor shows in another order than it was written must not be missed for good."""
    several = Several()
    members = fleet(1, 2)
    several.see(*members)
    first, second = several.schedulers
    second.look_around()
    lease = first.try_place(request())
    board = several.shared[1]._board
    assert board.changes(), "the journal is read, and nothing made of it"
    second.look_around()
    assert in_flight(second, [lease.decode]) == [0]
    several.clock.now_s += READ_ALL_S
    second.look_around()
    assert in_flight(second, [lease.decode]) == [1]


def do_something(several, chance, members, live):
    """One step of random traffic."""
    several.clock.now_s += 0.01
    action = chance.random()
    if action < 0.5:
        lease = chance.choice(several.schedulers).try_place(request(prompt_bytes=chance.randrange(1000)))
        if lease is not None:
            live.append(lease)
    elif action >= 0.98:
        several.see(*members)
    elif live and action < 0.7:
        chance.choice(live).prefilled(several.clock.now_s)
    elif live and action < 0.8:
        chance.choice(live).decoding(several.clock.now_s)
    elif live:
        live.pop(chance.randrange(len(live))).end()


def test_random_traffic_leaves_nothing_behind():
    several = Several(3, policy="load_balance")
    members = fleet(2, 3)
    chance = random.Random(7)
    live = []
    several.see(*members)
    for _ in range(3000):
        do_something(several, chance, members, live)
        assert min(min(several.reader.total(number)) for number in range(len(members))) >= 0
    for lease in live:
        lease.end()
    for made in several.schedulers:
        made.look_around()
        assert in_flight(made, members) == [0] * 5
    assert {several.reader.total(number) for number in range(len(members))} == {(0, 0, 0, 0)}
