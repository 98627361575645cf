"""A whole request, cancelled at each point at which it can be: nothing may be left of it.

The coroutine of the request is stepped by hand. At its k-th wait the task is cancelled in one of two ways: as the wait
begins, or just when what it waits for has come, so that the cancellation meets a result. k grows until the request gets
through to its end.
"""

import asyncio
import time

import pytest
from dispatched_world import DispatchedWorld
from engine_adapters import ADAPTERS, Script, words_of
from engine_world import GUARD_S, chat, turns, until

from coordinator.core.errors import DeadlineExceeded, Draining, EngineFailed

MOST_WAITS = 60
each = pytest.mark.parametrize("adapter", ADAPTERS, ids=[adapter.name for adapter in ADAPTERS])
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


class Stepped:
    """Awaits a coroutine, counts its waits and does something at the one numbered `at`."""

    def __init__(self, coroutine, at, act):
        self._coroutine = coroutine
        self._at = at
        self._act = act
        self.waits = 0

    def __await__(self):
        send, value = self._coroutine.send, None
        while True:
            try:
                awaited = send(value)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._at:
                self._act(awaited)
            try:
                value = yield awaited
                send = self._coroutine.send
            except BaseException as error:  # noqa: BLE001  # handed on to whom it is meant for
                send, value = self._coroutine.throw, error


class World(DispatchedWorld):
    """Requests whose coroutines are stepped."""

    def request(self, *, at=0, act=None, **given):
        client, serving = self.begin(**given)
        stepped = Stepped(serving, at, act)

        async def run():
            await stepped

        client.stepped = stepped
        client.task = asyncio.create_task(run(), name="request")
        return client


async def outcome(task):
    async with asyncio.timeout(GUARD_S):
        await asyncio.wait([task])
    return "cancelled" if task.cancelled() else task.exception()


def tasks_of_ours():
    """Running tasks, those of the fakes, of gRPC and of the test aside."""
    return {task for task in asyncio.all_tasks() if task.get_name() != "fake instance" and not _of_grpc(task)}


def _of_grpc(task):
    """gRPC's servers always wait for the next call, and a call of its client ends a turn after its caller has left."""
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    return type(coroutine).__module__.startswith("_cython") or (code is not None and "/grpc/" in code.co_filename)


def as_it_begins(awaited):
    asyncio.current_task().cancel()


def as_it_is_over(awaited):
    """Cancel the task between the moment at which its future is done and that at which it goes on."""
    task = asyncio.current_task()
    if awaited is None:
        asyncio.get_running_loop().call_soon(task.cancel)
    else:
        awaited.add_done_callback(lambda _: task.cancel())


async def until_known(adapter):
    """The engine's side is quiet: whoever was asked has either answered or is left."""
    await adapter.settled()
    await turns(10)


@each
@both
@pytest.mark.parametrize("act", [as_it_begins, as_it_is_over])
@pytest.mark.parametrize("cold", [True, False], ids=["connecting", "connected"])
async def test_cancelled_at_every_wait(adapter, stream, act, cold):
    async with adapter() as made:
        world = World(made)
        await outcome(world.request().task)
        baseline = tasks_of_ours()
        for at in range(1, MOST_WAITS):
            if cold:
                await world.forget_connections()
            before = len(made.asked())
            client = world.request(at=at, act=act, stream=stream)
            ended = await outcome(client.task)
            await world.leaves_nothing()
            await until_known(made)
            if client.stepped.waits < at:
                assert ended is None
                assert client.whole
                assert at > (2 if cold else 1), "there was no wait to cancel"
                break
            assert ended == "cancelled", f"wait {at} of {client.stepped.waits}: the cancellation was lost"
            assert tasks_of_ours() == baseline, f"after wait {at}"
            asked = made.wire_ids()[before:]
            aborted = await made.aborted()
            complete = bool(client.ends)
            if complete:
                assert client.whole
                assert not aborted & set(asked), f"wait {at}: an abort for a request that had its whole answer"
            else:
                assert set(asked) - made.over() <= aborted, f"wait {at}: the engine goes on for nobody"
        else:
            pytest.fail("it never came to its end")
        # and everything still works, at once
        last = world.request(stream=stream)
        assert await outcome(last.task) is None
        assert words_of(last.body) == "ABCD"


@each
@both
async def test_interrupted_at_every_wait(adapter, stream):
    """The same by the dispatcher's own means: the error comes out, nothing else is left."""
    async with adapter() as made:
        world = World(made)
        baseline = tasks_of_ours()
        for at in range(1, MOST_WAITS):
            await world.forget_connections()
            client = world.request(at=at, act=lambda _: world.dispatcher.interrupt_all(Draining()), stream=stream)
            ended = await outcome(client.task)
            await world.leaves_nothing()
            await until_known(made)
            assert tasks_of_ours() == baseline
            if client.stepped.waits < at:
                assert ended is None
                break
            assert isinstance(ended, Draining), f"wait {at}"
        else:
            pytest.fail("it never came to its end")


@pytest.mark.parametrize("fault", ["500", "reset"])
@pytest.mark.parametrize("act", [as_it_begins, as_it_is_over])
async def test_cancelled_at_every_wait_while_attempts_fail(fault, act):
    async with ADAPTERS[0]() as made:
        world = World(made)
        made.script = Script(prefill_fault=fault)
        for at in range(1, MOST_WAITS):
            await world.forget_connections()
            client = world.request(at=at, act=act)
            ended = await outcome(client.task)
            await world.leaves_nothing()
            await made.aborted()  # none twice
            if client.stepped.waits < at:
                assert isinstance(ended, EngineFailed)
                break
            assert ended == "cancelled", f"wait {at}"
        else:
            pytest.fail("it never came to its end")
        assert at > 4


@pytest.mark.parametrize("act", [as_it_begins, as_it_is_over])
async def test_cancelled_at_every_wait_of_a_recompute(act, monkeypatch):
    """Twice given back, resent once while prefill still knows the id; then answered."""
    from coordinator.engines.mindie import engine as engine_module

    monkeypatch.setattr(engine_module, "RESEND_PAUSE_S", 0.001)
    async with ADAPTERS[0]() as made:
        world = World(made)
        ordinary = made.prefill.infer
        rounds = {}

        async def give_back(call):
            number = rounds[call.wire_id] = rounds.get(call.wire_id, 0) + 1
            if number == 2:
                call.reply(b'{"error":"Runtime request has been used before."}', 500)
                return
            if number == 4:
                await ordinary(call)
                return
            from fake_instances import envelope

            call.reply(envelope(call.wire_id, "", last=False))
            made.decode.say(call.wire_id, "retry", chat("again"))

        made.prefill.infer = give_back
        for at in range(1, MOST_WAITS):
            await world.forget_connections()
            before = len(made.wire_ids())
            client = world.request(at=at, act=act)
            ended = await outcome(client.task)
            await world.leaves_nothing()
            await until_known(made)
            asked = set(made.wire_ids()[before:])
            assert len(asked) <= 1, "a recompute keeps its id"
            aborted = await made.aborted()
            if client.stepped.waits < at:
                assert ended is None
                assert words_of(client.body) == "ABCD"
                assert list(rounds.values())[-1] == 4
                break
            assert ended == "cancelled", f"wait {at}"
            if client.ends:
                assert not aborted & asked
        else:
            pytest.fail("it never came to its end")
        assert at > 6


@each
@pytest.mark.parametrize(
    ("given", "stage"), [({"first_token_s": 0.03}, "first_token"), ({"finished_s": 0.03}, "request")]
)
async def test_a_slow_stage_runs_into_its_own_deadline(adapter, given, stage):
    async with adapter() as made:
        world = World(made)
        made.script = Script(hold="prefill")
        begun_s = time.monotonic()
        world.clock = lambda: begun_s
        client = world.request(**given)
        async with asyncio.timeout(GUARD_S):
            await made.reached.wait()
        world.clock = time.monotonic
        error = await outcome(client.task)
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == stage
        assert await made.aborted() == set(made.wire_ids())
        assert world.cluster.charged == []
        made.release.set()
        await world.leaves_nothing()


@each
async def test_a_stream_that_falls_silent_runs_into_its_deadline(adapter):
    async with adapter() as made:
        world = World(made)
        made.script = Script(hold="decode")
        begun_s = time.monotonic()
        world.clock = lambda: begun_s  # a token that is late, on a slow machine, is no silence
        client = world.request(inter_token_s=0.03)
        await until(lambda: client.body.startswith(b"data:") and words_of(client.body) == "ABC")
        world.clock = time.monotonic
        error = await outcome(client.task)
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == "inter_token"
        assert words_of(client.body) == "ABC"
        assert await made.aborted() == set(made.wire_ids())
        made.release.set()
        await world.leaves_nothing()
