import asyncio
import socket
import threading

import pytest
from scripted_engine import GUARD_S, turns

from coordinator.transport.resolve import KEEP_S, MAX_LOOKUPS, Resolver


class Names:
    """A resolver whose answers wait until they are let go."""

    def __init__(self, **table):
        self.table = table
        self.asked = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, host):
        self.asked.append(host)
        assert self.go.wait(GUARD_S)
        answer = self.table[host]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 0)) for text in answer]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("literal", ["127.0.0.1", "::1", "fd00::12"])
async def test_literals_are_not_looked_up(literal):
    assert await Resolver(Names()).resolve(literal) == [literal]


async def test_answer_is_kept_for_a_short_time_only():
    names, clock = Names(p0=["10.0.0.1", "10.0.0.1", "10.0.0.2"]), Clock()
    resolver = Resolver(names, clock)
    assert await resolver.resolve("p0") == ["10.0.0.1", "10.0.0.2"]
    clock.now += KEEP_S - 0.1
    names.table["p0"] = ["10.0.0.9"]
    assert await resolver.resolve("p0") == ["10.0.0.1", "10.0.0.2"]
    clock.now += 0.2
    assert await resolver.resolve("p0") == ["10.0.0.9"]
    assert len(names.asked) == 2


async def test_forgotten_answer_is_looked_up_anew():
    names = Names(p0=["10.0.0.1"])
    resolver = Resolver(names)
    await resolver.resolve("p0")
    resolver.forget("p0")
    names.table["p0"] = ["10.0.0.2"]
    assert await resolver.resolve("p0") == ["10.0.0.2"]


async def test_many_callers_share_one_look_up_and_one_may_leave():
    names = Names(p0=["10.0.0.1"])
    names.go.clear()
    resolver = Resolver(names)
    tasks = [asyncio.create_task(resolver.resolve("p0")) for _ in range(20)]
    await turns(3)
    tasks[0].cancel()
    await turns(3)
    names.go.set()
    assert await asyncio.gather(*tasks[1:]) == [["10.0.0.1"]] * 19
    assert tasks[0].cancelled()
    assert names.asked == ["p0"]


async def test_a_name_that_hangs_holds_up_no_other():
    slow = threading.Event()

    def lookup(host):
        if host.startswith("slow"):
            assert slow.wait(GUARD_S)
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    resolver = Resolver(lookup)
    hanging = [asyncio.create_task(resolver.resolve(f"slow{at}")) for at in range(20)]
    await turns(3)
    assert await resolver.resolve("quick") == ["10.0.0.1"]
    slow.set()
    await asyncio.gather(*hanging)


@pytest.mark.parametrize(
    "failure", [socket.gaierror(socket.EAI_NONAME, "no such name"), UnicodeError("label too long"), []]
)
async def test_failures_are_os_errors_and_are_not_kept(failure):
    names = Names(p0=failure)
    resolver = Resolver(names)
    with pytest.raises(socket.gaierror):
        await resolver.resolve("p0")
    names.table["p0"] = ["10.0.0.1"]
    assert await resolver.resolve("p0") == ["10.0.0.1"]


async def test_failure_with_nobody_left_to_tell_is_silent():
    names = Names(p0=socket.gaierror(socket.EAI_NONAME, "no such name"))
    names.go.clear()
    resolver = Resolver(names)
    task = asyncio.create_task(resolver.resolve("p0"))
    await turns(3)
    task.cancel()
    await turns(3)
    names.go.set()
    with pytest.raises(socket.gaierror):  # joins the same look-up, or runs another
        await resolver.resolve("p0")


async def test_number_of_look_ups_is_bounded():
    names = Names(**{f"p{at}": ["10.0.0.1"] for at in range(MAX_LOOKUPS + 1)})
    names.go.clear()
    resolver = Resolver(names)
    tasks = [asyncio.create_task(resolver.resolve(f"p{at}")) for at in range(MAX_LOOKUPS)]
    await turns(3)
    with pytest.raises(socket.gaierror):
        await resolver.resolve(f"p{MAX_LOOKUPS}")
    names.go.set()
    await asyncio.gather(*tasks)
    assert await resolver.resolve(f"p{MAX_LOOKUPS}") == ["10.0.0.1"]


async def test_system_look_up_knows_localhost():
    assert set(await Resolver().resolve("localhost")) <= {"127.0.0.1", "::1"}
