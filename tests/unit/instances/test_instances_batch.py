import asyncio

from mindie_client import until

from instances.batch import Batch
from instances.tasks import Tasks
from instances.timing import Clockwork, Timing


class Counted:
    def __init__(self, tokens, trace):
        self.left, self.trace = tokens, trace

    def step(self):
        self.left -= 1
        self.trace.append(self)
        return self.left > 0


async def _nothing():
    pass


async def _run(max_running, *counts):
    trace, steps, tasks = [], [], Tasks()
    batch = Batch(Clockwork(Timing(), 0), max_running, _nothing, lambda: steps.append(len(trace)))
    members = [Counted(count, trace) for count in counts]
    for member in members:
        batch.join(member)
    tasks.spawn(batch.run(), "batch")
    await until(lambda: len(trace) == sum(counts))
    await until(lambda: batch.running == 0)
    await tasks.aclose()
    return [members.index(member) for member in trace], steps


async def test_every_running_request_gets_one_token_a_step():
    trace, steps = await _run(10, 2, 3, 1)
    assert trace == [0, 1, 2, 0, 1, 1]
    assert steps == [3, 5, 6]


async def test_further_requests_wait_for_a_place():
    trace, _ = await _run(2, 2, 2, 2)
    assert trace == [0, 1, 0, 1, 2, 2]


async def test_a_request_leaves_from_the_batch_and_from_the_queue():
    batch = Batch(Clockwork(Timing(), 0), 1, _nothing, lambda: None)
    first, second = Counted(9, []), Counted(9, [])
    batch.join(first)
    batch.join(second)
    assert batch.waiting == 2
    batch.leave(second)
    batch.leave(second)
    assert batch.waiting == 1
    batch.clear()
    assert (batch.running, batch.waiting) == (0, 0)


async def test_a_failing_task_is_reported_not_swallowed():
    seen, tasks = [], Tasks()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))

    async def fails():
        raise KeyError("x")

    task = tasks.spawn(fails(), "fails")
    await asyncio.wait([task], timeout=1)
    await until(lambda: seen)
    assert isinstance(seen[0], KeyError)
