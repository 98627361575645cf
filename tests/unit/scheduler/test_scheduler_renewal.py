"""Other policies and limits while requests run and wait."""

import asyncio
import random

import pytest
from scheduler_world import fleet, instance, numbers, pair, request, scheduler, series, shares
from test_scheduler_waiting import Line, settle

from coordinator.core.errors import NoInstance, TooManyRequests
from coordinator.policies import Policies, load_policy


def policies(name, **options):
    return Policies(load_policy(name, options or None), load_policy(name, options or None))


def renew(made, *, to=None, max_queue=0, fallback="hybrid"):
    made.renew(to, max_queue=max_queue, fallback=fallback)


def test_loads_survive_and_the_new_policy_counts_them():
    made = scheduler(*fleet(2, 2), policy="round_robin")
    kept = [made.try_place(request(prompt_bytes=5000)) for _ in range(3)]
    before = numbers(made)
    heavy = {lease.prefill.id for lease in kept}
    assert heavy == {"p0", "p1"}
    renew(made, to=policies("load_balance"))
    assert numbers(made) == before
    lighter = min(("p0", "p1"), key=lambda name: before[name][1])
    with made.try_place(request()) as lease:
        assert lease.prefill.id == lighter
    for lease in kept:
        lease.end()
    assert numbers(made) == {}


def test_requests_that_were_placed_before_give_back_what_they_took():
    made = scheduler(*fleet(1, 1), policy="load_balance")
    lease = made.try_place(request(prompt_bytes=10_000))
    renew(made, to=policies("load_balance", bytes_to_tokens=1.0))
    later = made.try_place(request(prompt_bytes=10_000))
    blocks = {name: figures[1] for name, figures in numbers(made).items()}
    assert blocks["p0"] > 2 * 18  # the later one is counted by the new rule
    lease.end()
    later.end()
    assert numbers(made) == {}


def test_every_change_keeps_the_order_right():
    names = ("round_robin", "load_balance")
    chance = random.Random(7)
    made = scheduler(*fleet(3, 4, max_requests=2), policy="round_robin", max_queue=0)
    held = []
    for step in range(300):
        if step % 7 == 0:
            renew(made, to=policies(chance.choice(names)))
        lease = made.try_place(request(prompt_bytes=chance.randrange(10, 9000)))
        if lease is not None:
            held.append(lease)
        if lease is None or chance.random() < 0.4:
            held.pop(chance.randrange(len(held))).end()
    for lease in held:
        lease.end()
    assert numbers(made) == {}
    renew(made, to=policies("round_robin"))
    pairs = series(made, 24)
    assert set(shares(pairs, 0).values()) == {8}
    assert set(shares(pairs, 1).values()) == {6}


def test_the_fallback():
    made = scheduler(instance("h0"), instance("p0"), fallback="none")
    with pytest.raises(NoInstance):
        made.try_place(request())
    renew(made)
    with made.try_place(request()) as lease:
        assert pair(lease) == ("h0", "h0")
    renew(made, fallback="none")
    with pytest.raises(NoInstance):
        made.try_place(request())


class TestWaiting:
    @pytest.fixture
    async def line(self):
        made = scheduler(*fleet(1, 1, max_requests=1), max_queue=3, policy="load_balance")
        found = Line(made)
        yield found
        for task in found.tasks.values():
            task.cancel()
        await asyncio.gather(*found.tasks.values(), return_exceptions=True)
        for lease in found.leases.values():
            lease.end()
        assert made.queued == 0
        assert numbers(made) == {}

    async def test_a_shorter_line_keeps_who_stands_in_it(self, line):
        for name in "abcd":
            await line.add(name)
        assert line.made.queued == 3
        renew(line.made, max_queue=1)
        assert line.made.queued == 3
        await line.add("e")
        assert isinstance(await line.error("e"), TooManyRequests)
        for name in "abcd":
            line.leases[name].end()
            await settle()
        assert set(line.leases) == set("abcd")

    async def test_another_order_holds_for_those_who_wait(self, line):
        await line.add("a")
        for name, size in (("long", 9000), ("short", 10), ("middle", 500)):
            await line.add(name, request(prompt_bytes=size))
        renew(line.made, to=policies("load_balance", order="shortest"), max_queue=3)
        order = []
        for _ in range(4):
            name = next(one for one in line.leases if one not in order)
            order.append(name)
            line.leases[name].end()
            await settle()
        assert order == ["a", "short", "middle", "long"]

    async def test_who_waits_is_served_where_the_new_policy_has_room(self):
        made = scheduler(
            *fleet(1, 1, total_blocks=4), max_queue=3, policy="load_balance", options={"block_limit_rate": 0.5}
        )
        line = Line(made)
        await line.add("a", request(prompt_bytes=4000))
        await line.add("b", request(prompt_bytes=4000))
        assert set(line.leases) == {"a"}
        renew(made, to=policies("load_balance", respect_capacity=False), max_queue=3)
        await settle()
        assert set(line.leases) == {"a", "b"}
        for lease in line.leases.values():
            lease.end()
        assert numbers(made) == {}
