"""Waiting for an instance that is not full."""

import asyncio

import pytest
from cycles import left_to_the_collector
from scheduler_world import fleet, instance, numbers, pair, request, scheduler, see

from coordinator.core.errors import DeadlineExceeded, NoInstance, TooManyRequests


async def settle():
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Requests placed by tasks of their own, by name."""

    def __init__(self, made):
        self.made = made
        self.tasks = {}
        self.leases = {}

    def start(self, name, asked=None, avoid=frozenset()):
        async def run():
            self.leases[name] = await self.made.place(asked or request(), avoid)

        self.tasks[name] = asyncio.create_task(run(), name=name)

    async def add(self, name, asked=None, avoid=frozenset()):
        self.start(name, asked, avoid)
        await settle()

    async def error(self, name):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (told apart by the caller)
            await self.tasks[name]
        return caught.value


@pytest.fixture
async def line():
    made = scheduler(*fleet(1, 1, max_requests=1), max_queue=3)
    found = Line(made)
    yield found
    for task in found.tasks.values():
        task.cancel()
    await asyncio.gather(*found.tasks.values(), return_exceptions=True)
    for lease in found.leases.values():
        lease.end()
    assert made.queued == 0
    assert numbers(made) == {}


async def test_a_free_instance_needs_no_wait(line):
    coroutine = line.made.place(request())
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    line.leases["a"] = done.value.value


async def test_first_come_first_served(line):
    for name in "abcd":
        await line.add(name)
    assert line.made.queued == 3
    for now, after in ("ab", "bc", "cd"):
        assert max(line.leases) == now
        line.leases[now].end()
        await settle()
        assert max(line.leases) == after
    assert line.made.queued == 0


async def test_only_a_release_that_frees_both_roles_ends_a_wait(line):
    await line.add("a")
    await line.add("b")
    line.leases["a"].prefilled(1.0)
    await settle()
    assert "b" not in line.leases  # decode is full still
    line.leases["a"].end()
    await settle()
    assert pair(line.leases["b"]) == ("p0", "d0")


async def test_a_full_line_refuses_at_once(line):
    for name in "abcde":
        await line.add(name)
    error = await line.error("e")
    assert isinstance(error, TooManyRequests)
    assert (error.status, error.retry_after_s) == (429, 1)
    assert line.made.queued == 3


async def test_without_a_line_there_is_no_wait():
    made = scheduler(*fleet(1, 1, max_requests=1))
    with await made.place(request()), pytest.raises(TooManyRequests):
        await made.place(request())
    with await made.place(request()) as lease:
        assert pair(lease) == ("p0", "d0")


async def test_the_deadline_ends_a_wait_and_leaves_nothing(line):
    await line.add("a")
    await line.add("late", request(scheduled_s=line.made._clock.now_s))
    assert (await line.error("late")).stage == "schedule"
    line.start("b", request(scheduled_s=line.made._clock.now_s + 0.02))
    await asyncio.sleep(0)  # it has gone as far as the wait, and no timer was looked at
    assert line.made.queued == 1
    error = await line.error("b")
    assert isinstance(error, DeadlineExceeded)
    assert error.stage == "schedule"
    assert line.made.queued == 0
    line.leases["a"].end()
    await line.add("c")
    assert "c" in line.leases


async def test_a_cancelled_wait_leaves_nothing(line):
    await line.add("a")
    await line.add("b")
    await line.add("c")
    line.tasks["b"].cancel()
    await settle()
    assert line.tasks["b"].cancelled()
    assert line.made.queued == 1
    line.leases["a"].end()
    await settle()
    assert "c" in line.leases


async def test_a_lease_that_comes_together_with_the_cancellation_is_given_back(line):
    await line.add("a")
    await line.add("b")
    await line.add("c")
    line.leases["a"].end()
    line.tasks["b"].cancel()  # its lease is there, but it has not run since
    await settle()
    assert line.tasks["b"].cancelled()
    assert "c" in line.leases
    assert numbers(line.made) == {"p0": (1, 1, 0), "d0": (1, 1, 0)}


async def test_a_request_that_is_cancelled_but_has_not_run_is_passed_over(line):
    await line.add("a")
    await line.add("b")
    await line.add("c")
    line.tasks["b"].cancel()
    line.leases["a"].end()
    await settle()
    assert "b" not in line.leases
    assert "c" in line.leases


async def test_an_error_that_comes_together_with_the_cancellation_is_no_noise(line):
    await line.add("a")
    await line.add("b")
    see(line.made)
    line.tasks["b"].cancel()
    await settle()
    assert line.tasks["b"].cancelled()


async def test_a_view_with_room_ends_waits(line):
    for name in "abc":
        await line.add(name)
    see(line.made, *fleet(2, 2, max_requests=1))
    await settle()
    assert pair(line.leases["b"]) == ("p1", "d1")
    assert "c" not in line.leases
    assert line.made.queued == 1


async def test_a_view_with_nobody_ends_waits_with_no_instance(line):
    for name in "abc":
        await line.add(name)
    see(line.made)
    for name in "bc":
        assert isinstance(await line.error(name), NoInstance)
    assert line.made.queued == 0


async def test_a_view_that_changes_nothing_keeps_the_order(line):
    for name in "abc":
        await line.add(name)
    see(line.made, *fleet(1, 1, max_requests=1, used=5))
    line.leases["a"].end()
    await settle()
    assert "b" in line.leases
    assert "c" not in line.leases


async def test_models_do_not_wait_for_each_other():
    members = [instance(f"{role}{model}", model=model, max_requests=1) for role in "pd" for model in "ab"]
    line = Line(scheduler(*members, max_queue=10))
    for name in ("a1", "b1", "a2", "a3", "b2"):
        await line.add(name, request(name[0]))
    assert sorted(line.leases) == ["a1", "b1"]
    line.leases["b1"].end()
    await settle()
    assert sorted(line.leases) == ["a1", "b1", "b2"]
    line.leases["a1"].end()
    await settle()
    assert sorted(line.leases) == ["a1", "a2", "b1", "b2"]
    line.leases["a2"].end()
    await settle()
    assert line.made.queued == 0
    assert len(line.leases) == 5


async def test_a_retry_that_waits_for_another_instance_is_in_nobodys_way():
    line = Line(scheduler(instance("p0"), *(instance(f"d{n}", max_requests=1) for n in range(2)), max_queue=10))
    await line.add("a")
    await line.add("b")
    held = {lease.decode.id: lease for lease in line.leases.values()}
    await line.add("retry", avoid=frozenset({"d0"}))
    await line.add("c")
    held["d0"].end()
    await settle()
    assert pair(line.leases["c"]) == ("p0", "d0")
    held["d1"].end()
    await settle()
    assert pair(line.leases["retry"]) == ("p0", "d1")
    for lease in line.leases.values():
        lease.end()


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", "abc"), ("shortest", "bca"), ("longest", "acb")], ids=["fcfs", "short", "long"]
)
async def test_order_of_waiting_requests(order, expected):
    made = scheduler(*fleet(1, 1, max_requests=1), policy="load_balance", options={"order": order}, max_queue=5)
    line = Line(made)
    await line.add("0")
    for name, tokens in (("a", 300), ("b", 100), ("c", 200)):
        await line.add(name, request(tokens=tokens))
    served = ["0"]
    for _ in range(3):
        line.leases[served[-1]].end()
        await settle()
        served.append(next(name for name in line.leases if name not in served))
    assert "".join(served) == "0" + expected
    line.leases[served[-1]].end()


async def test_newcomers_do_not_overtake(line):
    await line.add("a")
    await line.add("b")
    line.leases["a"].end()
    await line.add("c")
    assert "b" in line.leases
    assert "c" not in line.leases


@pytest.mark.parametrize("end", ["lease", "deadline", "cancelled"])
async def test_a_wait_that_is_over_leaves_nothing_to_the_collector(end):
    made = scheduler(*fleet(1, 1, max_requests=1), max_queue=3)

    async def wait(for_s):
        held = await made.place(request())
        waiting = asyncio.create_task(made.place(request(scheduled_s=made._clock() + for_s)), name="waiting")
        await asyncio.sleep(0)  # it has gone as far as the wait, and no timer was looked at
        assert made.queued == 1
        if end == "lease":
            held.end()
            (await waiting).end()
        else:
            if end == "cancelled":
                waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled() or isinstance(waiting.exception(), DeadlineExceeded)
            held.end()

    await wait(60 if end != "deadline" else 0.01)
    with left_to_the_collector() as found:
        await wait(60 if end != "deadline" else 0.01)
    assert found == {}
