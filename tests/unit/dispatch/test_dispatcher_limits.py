"""How many requests there may be, how long they may take, and how they are ended from outside."""

import asyncio
import logging
import math

import pytest
from dispatch_world import A, World, ended, fails, good, hang
from engine_world import held, instance, request, turns

from coordinator.core.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRefused,
    NoInstance,
    Side,
    SlowClient,
    TooManyRequests,
)


class TestAdmission:
    async def test_above_the_limit(self):
        world = World(hang, max_requests=2)
        first = [world.start(), world.start()]
        await turns()
        done = world.start()
        error = await ended(done.task)
        assert isinstance(error, TooManyRequests)
        assert error.retry_after_s == 1
        assert world.dispatcher.live == 2
        for each in first:
            each.task.cancel()
            await ended(each.task)

    async def test_an_end_makes_room(self):
        world = World(hang, good, max_requests=1)
        first = world.start()
        await turns()
        first.task.cancel()
        await ended(first.task)
        assert (await world.run()).error is None

    async def test_refusals_hold_nothing(self):
        world = World(fails(lambda attempt: EngineRefused(400, "x")), max_requests=1)
        for _ in range(5):
            assert (await world.run()).error.status == 400


class TestDraining:
    async def test_nothing_new(self):
        world = World(good)
        world.dispatcher.draining = True
        done = await world.run()
        assert isinstance(done.error, Draining)
        assert world.engine.attempts == []
        with pytest.raises(Draining):
            await world.dispatcher.call(request())

    async def test_what_runs_goes_on(self):
        gate = asyncio.Event()

        async def slow(attempt):
            await gate.wait()
            return await good(attempt)

        world = World(slow)
        started = world.start()
        await turns()
        world.dispatcher.draining = True
        waiting = asyncio.create_task(world.dispatcher.drained(math.inf), name="drain")
        await turns()
        assert not waiting.done()
        gate.set()
        assert await ended(started.task) is None
        assert await ended(waiting) is None

    async def test_also_a_further_attempt_of_it(self):
        world = World(None, good)

        async def fail(attempt):
            world.dispatcher.draining = True
            raise EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "reset")

        world.engine.scripts[0] = fail
        assert (await world.run()).error is None

    async def test_the_wait_has_an_end(self):
        world = World(hang)
        started = world.start()
        await turns()
        await world.dispatcher.drained(0.01)
        assert world.dispatcher.live == 1
        started.task.cancel()
        await ended(started.task)

    async def test_nothing_to_wait_for(self):
        await World(good).dispatcher.drained(math.inf)

    async def test_the_wait_can_be_cancelled(self):
        world = World(hang)
        started = world.start()
        await turns()
        waiting = asyncio.create_task(world.dispatcher.drained(math.inf), name="drain")
        await turns()
        waiting.cancel()
        assert await ended(waiting) == "cancelled"
        started.task.cancel()
        await ended(started.task)


class TestInterrupts:
    async def test_all_at_once(self):
        world = World(hang, max_queue=10)
        started = [world.start() for _ in range(3)]
        await turns()
        world.dispatcher.interrupt_all(Draining())
        assert [type(await ended(each.task)) for each in started] == [Draining] * 3
        assert all(attempt.cancelled for attempt in world.engine.attempts)
        assert held(world.scheduler) == {}
        assert world.cluster.charged == []
        await world.dispatcher.drained(math.inf)

    async def test_those_that_wait_too(self):
        from coordinator.core.instance import Capacity

        world = World(hang, instances=[instance("p0"), instance("d0", capacity=Capacity(max_requests=1))])
        started = [world.start(), world.start()]
        await turns()
        assert world.scheduler.queued == 1
        world.dispatcher.interrupt_all(Draining())
        assert [type(await ended(each.task)) for each in started] == [Draining] * 2
        assert world.scheduler.queued == 0

    async def test_a_client_that_leaves_at_the_same_time_has_left(self):
        world = World(hang)
        started = world.start()
        await turns()
        world.dispatcher.interrupt_all(Draining())
        started.task.cancel()
        assert await ended(started.task) == "cancelled"
        assert held(world.scheduler) == {}

    async def test_a_slow_client_is_cut_off_alone(self):
        world = World(hang)
        slow, other = world.start(), world.start()
        await turns()
        out = world.engine.attempts[0].out
        slow.client.exchange.congested = True
        slow.client.transport.unsent = 5000
        out.piece(A, 1001.0)
        assert isinstance(await ended(slow.task), SlowClient)
        assert world.engine.attempts[0].cancelled
        assert not other.task.done()
        other.task.cancel()
        await ended(other.task)

    async def test_cut_off_from_inside_its_own_task(self):
        """An engine may hand over a piece without having waited."""

        async def straight(attempt):
            attempt.out.piece(A, 1001.0)
            attempt.out.piece(A, 1001.0)
            return await good(attempt)

        world = World(straight)
        started = world.start()
        started.client.exchange.congested = True
        started.client.transport.unsent = 5000
        assert isinstance(await ended(started.task), SlowClient)
        assert held(world.scheduler) == {}

    async def test_after_the_end_the_relay_ends_nobody(self):
        world = World(good)
        done = await world.run()
        assert done.relay.on_cut is None


class TestDeadlines:
    @pytest.mark.parametrize(
        ("given", "stage"),
        [({"first_token_s": 0.004}, "first_token"), ({"finished_s": 0.004}, "request")],
    )
    async def test_a_hanging_engine(self, given, stage):
        world = World(hang)
        started = world.start(**given)
        await asyncio.sleep(0.02)
        assert not started.task.done()  # the clock stands still
        world.clock.now_s += 0.005
        error = await ended(started.task)
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == stage
        assert world.engine.attempts[0].cancelled
        assert held(world.scheduler) == {}
        assert world.cluster.charged == []

    async def test_a_stream_that_falls_silent(self):
        async def one(attempt):
            attempt.out.piece(A, world.clock.now_s)
            await asyncio.Event().wait()

        world = World(one)
        started = world.start(inter_token_s=0.004)
        await turns()
        world.clock.now_s += 0.005
        assert (await ended(started.task)).stage == "inter_token"

    async def test_a_deadline_is_not_tried_again(self):
        world = World(hang)
        started = world.start(first_token_s=0.004)
        await turns()
        world.clock.now_s += 0.005
        await ended(started.task)
        assert len(world.engine.attempts) == 1

    async def test_a_call_that_ended_with_it_is_no_fault_of_the_instance(self):
        async def one(attempt):
            world.clock.now_s += 0.005
            raise EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "timeout")

        world = World(one)
        started = world.start(finished_s=0.004)
        assert (await ended(started.task)).stage == "request"
        assert len(world.engine.attempts) == 1
        assert world.cluster.charged == []

    async def test_all_attempts_share_them(self):
        world = World(fails(lambda a: EngineFailed(Side.PREFILL, a.placement.prefill.id, "reset")), hang)
        started = world.start(finished_s=0.004)
        await turns()
        world.clock.now_s += 0.005
        assert (await ended(started.task)).stage == "request"
        assert len(world.engine.attempts) == 2

    async def test_waiting_for_an_instance(self):
        from coordinator.core.instance import Capacity

        world = World(hang, instances=[instance("p0"), instance("d0", capacity=Capacity(max_requests=1))])
        lease = world.scheduler.try_place(request())
        started = world.start(scheduled_s=0.004)
        assert (await ended(started.task)).stage == "schedule"
        assert world.scheduler.queued == 0
        lease.end()

    async def test_a_finished_request_leaves_no_timer(self):
        world = World(good)
        loop = asyncio.get_running_loop()
        timers = len(loop._scheduled)
        await world.run(first_token_s=60.0, finished_s=60.0, inter_token_s=60.0)
        left = [handle for handle in loop._scheduled[timers:] if not handle.cancelled()]
        assert not [handle for handle in left if "Watch" in repr(handle)]


class TestCall:
    async def test_the_instance_with_the_least_to_do(self):
        world = World(hang, prefills=1, decodes=1)
        started = world.start()
        await turns()
        world.engine.attempts[0].placement.prefilled(1.0)
        world.engine.attempts[0].placement.decoding(1.0)
        answer = await world.dispatcher.call(request(model=None))
        assert answer.status == 200
        assert world.engine.calls[0][1].id == "p0"
        started.task.cancel()
        await ended(started.task)

    async def test_of_the_model(self):
        instances = [instance("p0", model="a"), instance("p1", model="b"), instance("p2", model=None)]
        world = World(good, instances=instances)
        await world.dispatcher.call(request(model="b"))
        assert world.engine.calls[0][1].id in ("p1", "p2")
        world = World(good, instances=instances[:1])
        with pytest.raises(NoInstance):
            await world.dispatcher.call(request(model="b"))

    async def test_a_failure_is_charged(self):
        world = World(good, prefills=1, decodes=0)
        world.engine.call_error = EngineFailed(Side.PREFILL, "p0", "reset")
        with pytest.raises(EngineFailed):
            await world.dispatcher.call(request())
        assert world.cluster.charged == [("p0", "reset")]
        world.engine.call_error = EngineRefused(422, "x")
        with pytest.raises(EngineRefused):
            await world.dispatcher.call(request())
        assert len(world.cluster.charged) == 1


async def test_nothing_is_logged_on_the_way(caplog):
    """Whoever tells the client also logs; nobody does both."""
    caplog.set_level(logging.INFO)
    world = World(fails(lambda a: EngineFailed(Side.PREFILL, a.placement.prefill.id, "reset")))
    await world.run()
    assert caplog.records == []
