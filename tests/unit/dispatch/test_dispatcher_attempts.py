"""Attempts of one request: placing it again, giving up, resuming, and who is blamed."""

import asyncio

import pytest
from cycles import left_to_the_collector
from dispatch_world import BODY, LAST, A, World, ended, fails, gives_back, good, hang
from engine_world import count, held, instance, observed, request, turns

from coordinator.core.errors import EngineFailed, EngineRefused, NoInstance, Side, TooManyRequests
from coordinator.core.ports import Resume


def prefill_fails(attempt):
    return EngineFailed(Side.PREFILL, attempt.placement.prefill.id, "reset")


def decode_fails(attempt):
    return EngineFailed(Side.DECODE, attempt.placement.decode.id, "link_lost")


def told_to_avoid(world):
    """The instances that the scheduler is told to avoid, call by call."""
    told = []
    place = world.scheduler.place

    async def note(asked, avoid=frozenset()):
        told.append(set(avoid))
        return await place(asked, avoid)

    world.scheduler.place = note
    return told


class TestOneAttempt:
    async def test_a_good_one(self):
        world = World(good)
        done = await world.run()
        assert done.error is None
        assert done.client.body == A + LAST + b"data: [DONE]\n\n"
        assert done.client.whole
        record = done.record
        assert (record.prefill, record.decode) == world.pairs[0]
        assert (record.attempts, record.recomputes, record.wire_ids) == (1, 0, ["1"])
        assert world.attempts_by_reason() == {"first": 1}
        assert world.cluster.charged == []
        assert sorted(world.cluster.credited) == sorted(world.pairs[0])

    async def test_the_load_is_held_meanwhile_and_given_back(self):
        world = World(hang)
        started = world.start()
        await turns()
        assert held(world.scheduler) == {"p0": (1, 0), "d0": (1, 0)}
        assert world.dispatcher.live == 1
        attempt = world.engine.attempts[0]
        attempt.placement.prefilled(1001.0)
        assert held(world.scheduler) == {"p0": (0, 1), "d0": (1, 0)}
        attempt.placement.decoding(1002.0)
        assert held(world.scheduler) == {"d0": (1, 0)}
        attempt.out.piece(b"data: 1\n\n", 1002.5)
        started.task.cancel()
        assert await ended(started.task) == "cancelled"
        assert (started.record.events, started.record.bytes_out) == (1, 9)
        assert attempt.cancelled
        assert held(world.scheduler) == {}
        assert world.dispatcher.live == 0

    async def test_a_hybrid_instance_is_credited_once(self):
        world = World(good, prefills=0, decodes=0, hybrids=1)
        assert (await world.run()).error is None
        assert world.cluster.credited == ["h0"]

    async def test_nobody_is_there(self):
        world = World(good, decodes=0)
        done = await world.run()
        assert isinstance(done.error, NoInstance)
        assert world.engine.attempts == []
        assert world.attempts_by_reason() == {}
        assert done.record.prefill is None


class TestRetry:
    async def test_elsewhere_while_nothing_was_sent(self):
        world = World(fails(prefill_fails), good)
        done = await world.run()
        assert done.error is None
        assert done.client.body.startswith(A)
        assert world.pairs[0][0] != world.pairs[1][0]
        assert done.record.attempts == 2
        assert world.attempts_by_reason() == {"first": 1, "reset": 1}

    async def test_a_new_id_on_the_wire(self):
        world = World(fails(prefill_fails), good)
        done = await world.run()
        assert done.record.wire_ids == ["1", "2"]
        assert all(attempt.request.wire_id == "" for attempt in world.engine.attempts)

    @pytest.mark.parametrize(("error", "guilty"), [(prefill_fails, 0), (decode_fails, 1)])
    async def test_only_the_guilty_one_is_avoided_and_charged(self, error, guilty):
        """With one instance of the innocent role, that one is used again."""
        world = World(fails(error), good, prefills=2 if guilty == 0 else 1, decodes=2 if guilty == 1 else 1)
        assert (await world.run()).error is None
        first, second = world.pairs
        assert first[guilty] != second[guilty]
        assert first[1 - guilty] == second[1 - guilty]
        assert world.cluster.charged == [(first[guilty], "reset" if guilty == 0 else "link_lost")]
        failures = world.metrics.engine_failures
        assert count(failures, first[guilty], "prefill" if guilty == 0 else "decode", world.cluster.charged[0][1]) == 1

    @pytest.mark.uncompiled
    async def test_a_doubted_one_is_avoided_and_not_charged(self):
        def doubtful(attempt):
            error = decode_fails(attempt)
            error.doubted = attempt.placement.prefill.id
            return error

        world = World(fails(doubtful), good)
        told = told_to_avoid(world)
        assert (await world.run()).error is None
        prefill, decode = world.pairs[0]
        assert told == [set(), {prefill, decode}]
        assert world.cluster.charged == [(decode, "link_lost")]

    @pytest.mark.uncompiled
    async def test_the_scheduler_is_told_of_the_guilty_ones_alone(self):
        world = World(fails(prefill_fails), fails(decode_fails), good)
        told = told_to_avoid(world)
        assert (await world.run()).error is None
        first, second = world.pairs[0][0], world.pairs[1][1]
        assert told == [set(), {first}, {first, second}]

    async def test_each_failed_one_is_avoided_from_then_on(self):
        world = World(fails(prefill_fails), fails(prefill_fails), good, prefills=3)
        assert (await world.run()).error is None
        assert len({prefill for prefill, _ in world.pairs}) == 3

    async def test_who_gave_it_back_for_want_of_room_is_avoided_but_not_charged(self):
        async def full(attempt):
            return Resume(BODY, "id", avoid=attempt.placement.decode.id)

        world = World(full, full, good, prefills=1, decodes=3)
        assert (await world.run()).error is None
        assert len({decode for _, decode in world.pairs}) == 3
        assert world.cluster.charged == []

    async def test_the_same_again_where_there_is_no_other(self):
        world = World(fails(prefill_fails), good, prefills=1, decodes=1)
        assert (await world.run()).error is None
        assert world.pairs == [("p0", "d0"), ("p0", "d0")]

    @pytest.mark.parametrize("most", [1, 2, 3])
    async def test_at_most_so_many(self, most):
        world = World(fails(prefill_fails), prefills=9, max_attempts=most)
        done = await world.run()
        assert isinstance(done.error, EngineFailed)
        assert len(world.engine.attempts) == done.record.attempts == most
        assert len(world.cluster.charged) == most
        assert done.client.writes == []  # the caller tells the client

    async def test_never_after_output(self):
        """The client would see the text from its start again."""
        world = World(fails(decode_fails, after=3), good)
        done = await world.run()
        assert isinstance(done.error, EngineFailed)
        assert len(world.engine.attempts) == 1
        assert done.client.body == A * 3
        assert not done.client.whole

    async def test_a_refusal_is_final_and_nobodys_fault(self):
        world = World(fails(lambda attempt: EngineRefused(422, "n must be 1")), good)
        done = await world.run()
        assert done.error.status == 422
        assert len(world.engine.attempts) == 1
        assert world.cluster.charged == []
        assert world.cluster.credited == [world.pairs[0][0]]

    async def test_a_fault_of_our_own_is_final(self):
        world = World(fails(lambda attempt: ZeroDivisionError()), good)
        done = await world.run()
        assert isinstance(done.error, ZeroDivisionError)
        assert len(world.engine.attempts) == 1
        assert world.cluster.charged == []

    async def test_the_failure_is_the_answer_where_nobody_is_left(self):
        """Not `no instance`, which would hide what happened."""
        world = World(None, good, prefills=1, decodes=1)

        async def fail_and_vanish(attempt):
            world.scheduler.on_view(type(world.cluster.view)(2))
            raise prefill_fails(attempt)

        world.engine.scripts[0] = fail_and_vanish
        done = await world.run()
        assert done.error.reason == "reset"
        assert world.cluster.charged == [("p0", "reset")]

    async def test_a_failure_that_was_kept_is_freed_with_its_request(self):
        async def last_one_fails(attempt):
            world.scheduler.on_view(type(world.cluster.view)(2))
            raise prefill_fails(attempt)

        world = World(last_one_fails)
        with left_to_the_collector() as found:
            done = await world.run()
            assert done.error.reason == "reset"
            done.client.exchange = None  # it knows its client
            world.engine.attempts.clear()
            del done
            await turns()
        assert not [name for name in found if not name.startswith("coordinator.scheduler.")]  # pools of the old view

    async def test_the_load_of_the_failed_attempt_is_gone_before_the_next(self):
        world = World(None, None)
        seen = []

        async def look(attempt):
            seen.append(held(world.scheduler))
            if len(seen) == 1:
                attempt.placement.prefilled(1001.0)
                raise decode_fails(attempt)
            return await good(attempt)

        world.engine.scripts = [look]
        assert (await world.run()).error is None
        assert [sorted(numbers.values()) for numbers in seen] == [[(1, 0), (1, 0)]] * 2


class TestRecompute:
    async def test_the_round_goes_on_with_decodes_body_and_id(self):
        world = World(gives_back(2), good)
        done = await world.run()
        assert done.error is None
        assert done.client.body == A * 3 + LAST + b"data: [DONE]\n\n"
        again = world.engine.attempts[1].request
        assert (again.body, again.wire_id, again.path) == (b'{"model":"m","messages":"2,1,2,3","stream":true}', "77",
                                                           done.asked.path)  # fmt: skip
        assert (again.id, again.headers, again.arrived_s) == (done.asked.id, done.asked.headers, done.asked.arrived_s)
        assert (done.record.attempts, done.record.recomputes) == (2, 1)
        assert world.attempts_by_reason() == {"first": 1, "recompute": 1}
        assert count(world.metrics.recomputes) == 1
        assert world.cluster.charged == []

    async def test_twice(self):
        world = World(gives_back(1), gives_back(1), good)
        done = await world.run()
        assert done.error is None
        assert [attempt.request.wire_id for attempt in world.engine.attempts] == ["", "77", "77"]
        assert done.client.body == A * 3 + LAST + b"data: [DONE]\n\n"
        assert done.record.recomputes == 2

    async def test_it_is_placed_anew(self):
        world = World(gives_back(), good)
        await world.run()
        assert world.pairs[0] != world.pairs[1]

    async def test_whoever_gave_it_back_is_not_credited_for_an_answer(self):
        world = World(gives_back(), good, prefills=1)
        await world.run()
        first, second = (pair[1] for pair in world.pairs)
        assert first not in world.cluster.credited
        assert second in world.cluster.credited

    async def test_model_and_kind_of_answer_stay_the_clients(self):
        """The engine's body names its own model, and says what it likes about streaming."""
        world = World(gives_back(body=b'{"model":"None","messages":"1,2","stream":false}'), good)
        await world.run(request(stream=True, arrived_s=1000.0))
        ask = world.engine.attempts[1].request.ask
        assert (ask.model, ask.stream) == ("m", True)
        assert ask.prompt_bytes == len(b'"1,2"')

    async def test_not_streaming(self):
        world = World(gives_back(0, body=b'{"messages":"1,2"}'), good)
        done = await world.run(stream=False)
        assert done.error is None
        assert done.client.body == b"{}"

    async def test_not_without_end(self):
        world = World(gives_back(1), max_recomputes=4)
        done = await world.run()
        assert (done.error.reason, done.error.side) == ("recompute", Side.DECODE)
        assert len(world.engine.attempts) == 5
        assert done.record.recomputes == 5

    @pytest.mark.parametrize("body", [b"", b"{}", b"nonsense", b"[]"])
    async def test_a_body_that_cannot_be_read(self, body):
        world = World(gives_back(body=body), good)
        done = await world.run()
        assert isinstance(done.error, EngineFailed)
        assert (done.error.reason, done.error.instance_id) == ("recompute", world.pairs[0][1])
        assert len(world.engine.attempts) == 1

    async def test_a_round_of_which_nothing_was_sent_may_be_tried_again(self):
        world = World(gives_back(2), fails(prefill_fails), good, prefills=3)
        done = await world.run()
        assert done.error is None
        assert done.client.body == A * 3 + LAST + b"data: [DONE]\n\n"
        assert [attempt.request.wire_id for attempt in world.engine.attempts] == ["", "77", "77"]
        assert world.attempts_by_reason() == {"first": 1, "recompute": 1, "reset": 1}

    async def test_but_not_once_the_round_has_sent_something(self):
        world = World(gives_back(2), fails(prefill_fails, after=1), good)
        done = await world.run()
        assert isinstance(done.error, EngineFailed)
        assert len(world.engine.attempts) == 2
        assert done.client.body == A * 3

    async def test_each_round_has_its_own_number_of_tries(self):
        world = World(fails(prefill_fails), gives_back(1), fails(prefill_fails), good, prefills=9, max_attempts=2)
        assert (await world.run()).error is None
        assert len(world.engine.attempts) == 4

    async def test_who_failed_before_the_round_is_still_avoided(self):
        world = World(fails(prefill_fails), gives_back(1), good, prefills=2)
        await world.run()
        assert world.pairs[0][0] not in [prefill for prefill, _ in world.pairs[1:]]

    @pytest.mark.parametrize("way", ["given back", "failed"])
    async def test_a_later_wait_for_an_instance_has_its_own_limit(self, way):
        """The time that the attempt before took is no waiting; the request's own deadline bounds it all."""
        world = World(None, good, instances=[instance("p0"), full("d0")])
        busy = asyncio.Event()

        async def long(attempt):
            await busy.wait()
            world.clock.now_s += 100.0
            if way == "failed":
                raise prefill_fails(attempt)
            return await gives_back(1)(attempt)

        async def other(attempt):
            await asyncio.Event().wait()

        world.engine.scripts = [long, other, good]
        first = world.start(scheduled_s=60.0)
        await turns()
        second = world.start()  # waits, and takes the place that the first one gives back
        await turns()
        busy.set()
        await turns()
        assert world.scheduler.queued == 1
        assert not first.task.done()
        second.task.cancel()
        assert await ended(first.task) is None
        assert first.client.whole


def full(name):
    """An instance that takes one request at a time."""
    from coordinator.core.instance import Capacity

    return instance(name, capacity=Capacity(max_requests=1))


class TestWaiting:
    async def test_a_request_waits_for_a_full_instance_and_says_how_long(self):
        world = World(good, instances=[instance("p0"), full("d0")])
        lease = world.scheduler.try_place(request())
        started = world.start()
        await turns()
        assert world.scheduler.queued == 1
        assert world.dispatcher.live == 1
        world.clock.now_s += 3.0
        lease.end()
        assert await ended(started.task) is None
        assert started.record.queue_s == pytest.approx(3.0)
        assert observed(world.metrics.stages.queue) == (1, pytest.approx(3.0))

    async def test_a_full_line(self):
        world = World(good, instances=[instance("p0"), full("d0")], max_queue=0)
        lease = world.scheduler.try_place(request())
        started = world.start()
        error = await ended(started.task)
        assert isinstance(error, TooManyRequests)
        assert error.retry_after_s == 1
        lease.end()

    async def test_leaving_while_waiting(self):
        world = World(good, instances=[instance("p0"), full("d0")])
        lease = world.scheduler.try_place(request())
        started = world.start()
        await turns()
        started.task.cancel()
        assert await ended(started.task) == "cancelled"
        assert (world.scheduler.queued, world.dispatcher.live) == (0, 0)
        lease.end()
        assert held(world.scheduler) == {}
        assert world.engine.attempts == []

    async def test_leaving_just_when_a_place_is_free(self):
        """The lease that came at the same moment is given back."""
        world = World(good, instances=[instance("p0"), full("d0")])
        lease = world.scheduler.try_place(request())
        started = world.start()
        await turns()
        lease.end()
        assert held(world.scheduler) != {}  # it has the place, and does not know it yet
        started.task.cancel()
        assert await ended(started.task) == "cancelled"
        assert held(world.scheduler) == {}
        assert world.engine.attempts == []
        assert (await world.run()).error is None

    async def test_the_first_wait_alone_is_the_requests_queue_time(self):
        world = World(fails(prefill_fails), good)
        done = await world.run()
        assert done.record.queue_s == 0.0


class TestStages:
    async def test_times_of_a_good_attempt(self):
        world = World(None)

        async def timed(attempt):
            world.clock.now_s += 0.5  # the request goes out when it is placed
            attempt.placement.prefilled(world.clock.now_s)
            world.clock.now_s += 0.25
            attempt.placement.decoding(world.clock.now_s)
            world.clock.now_s += 2.0
            attempt.out.finish(LAST, world.clock.now_s)
            from coordinator.core.ports import COMPLETED

            return COMPLETED

        world.engine.scripts = [timed]
        await world.run()
        stages = world.metrics.stages
        assert observed(stages.prefill) == (1, pytest.approx(0.5))
        assert observed(stages.handoff) == (1, pytest.approx(0.25))
        assert observed(stages.decode) == (1, pytest.approx(2.0))
        assert observed(stages.queue) == (1, 0.0)

    async def test_a_stage_that_was_not_reached_is_not_counted(self):
        world = World(fails(prefill_fails), good)
        await world.run()
        assert observed(world.metrics.stages.prefill)[0] == 1
        assert observed(world.metrics.stages.decode)[0] == 1

    async def test_decode_that_overtakes_prefill_makes_no_negative_time(self):
        world = World(None)

        async def overtaken(attempt):
            attempt.placement.decoding(1001.0)
            attempt.placement.prefilled(1002.0)
            return await good(attempt)

        world.engine.scripts = [overtaken]
        await world.run()
        assert observed(world.metrics.stages.handoff) == (1, 0.0)


async def test_many_at_once_leave_nothing_behind():
    world = World(None, prefills=3, decodes=3)

    async def mixed(attempt):
        number = int(attempt.request.id)
        await asyncio.sleep(0)
        if number % 3 == 0 and len(attempt.request.wire_id) == 0 and number not in failed:
            failed.add(number)
            raise prefill_fails(attempt)
        if number % 5 == 0:
            await asyncio.Event().wait()
        return await good(attempt)

    failed = set()
    world.engine.scripts = [mixed]
    started = [world.start(request(ident=str(number), arrived_s=1000.0)) for number in range(60)]
    await turns(20)
    for each in started:
        if int(each.asked.id) % 5 == 0:
            each.task.cancel()
    outcomes = [await ended(each.task) for each in started]
    assert outcomes.count("cancelled") == 12
    assert outcomes.count(None) == 48
    assert held(world.scheduler) == {}
    assert world.dispatcher.live == 0


class TestAnotherDecode:
    """An engine that holds the KV itself takes it to another decode instance within one attempt."""

    @staticmethod
    def replays(most, *, then=good):
        """Ask for another decode until there is none, at most so often; says whether there was one each time."""

        async def script(attempt):
            attempt.got = []
            attempt.decodes = [attempt.placement.decode.id]
            attempt.placement.prefilled(1001.0, pinned=False)
            for _ in range(most):
                failure = decode_fails(attempt)
                attempt.got.append(attempt.placement.another_decode(failure))
                if not attempt.got[-1]:
                    raise failure
                attempt.decodes.append(attempt.placement.decode.id)
            return await then(attempt)

        return script

    async def test_the_request_goes_on_elsewhere(self):
        world = World(self.replays(1), decodes=3)
        done = await world.run()
        assert done.error is None
        [attempt] = world.engine.attempts
        first, second = attempt.decodes
        assert first != second
        assert world.cluster.charged == [(first, "link_lost")]
        assert sorted(world.cluster.credited) == sorted([attempt.pair[0], second])
        assert (done.record.attempts, done.record.decode) == (2, second)
        assert world.attempts_by_reason() == {"first": 1, "link_lost": 1}
        assert count(world.metrics.decode_replays) == 1
        assert count(world.metrics.engine_failures, first, "decode", "link_lost") == 1
        assert observed(world.metrics.stages.queue)[0] == 1

    async def test_at_most_so_many_placements_in_all(self):
        world = World(self.replays(9), decodes=9, max_attempts=3)
        done = await world.run()
        assert done.error.reason == "link_lost"
        [attempt] = world.engine.attempts
        assert attempt.got == [True, True, False]
        assert [name for name, _ in world.cluster.charged] == attempt.decodes, "each once"
        assert done.record.attempts == 3

    async def test_where_no_other_is_free_the_whole_request_is_placed_again(self):
        world = World(self.replays(9), good, decodes=2, max_attempts=9)
        done = await world.run()
        assert done.error is None
        assert world.engine.attempts[0].got == [True, False]
        assert [name for name, _ in world.cluster.charged] == world.engine.attempts[0].decodes
        assert done.record.attempts == 3
        assert count(world.metrics.decode_replays) == 1

    async def test_what_has_failed_before_is_avoided(self):
        world = World(fails(decode_fails), self.replays(1), decodes=3)
        assert (await world.run()).error is None
        first = world.engine.attempts[0].pair[1]
        decodes = world.engine.attempts[1].decodes
        assert len({first, *decodes}) == 3

    async def test_not_once_something_was_sent(self):
        async def script(attempt):
            attempt.out.piece(A, 1001.0)
            attempt.got = attempt.placement.another_decode(decode_fails(attempt))
            return await good(attempt)

        world = World(script)
        await world.run()
        assert world.engine.attempts[0].got is False
        assert world.cluster.charged == []
