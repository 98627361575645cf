"""What goes wrong between the calls: who is blamed, and that decode keeps nothing."""

import asyncio
import gc
import json

import pytest
from engine_world import Out, count, request, turns, until
from microserving_pair import COMPLETIONS, GENERATE, PREPARE, SEND, World, only_metrics_take_time

from coordinator.core.errors import EngineFailed, EngineRefused, Side
from coordinator.core.ports import COMPLETED
from coordinator.engines.microserving import errands as errands_module
from coordinator.engines.microserving.handoff import Handoff
from coordinator.engines.microserving.leg import GenerateLeg

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
DOUBLE = json.dumps(json.dumps({"object": "error", "message": "too long", "code": 400})).encode()
LISTED = json.dumps({"detail": [{"loc": ["body", "n"], "msg": "must be a number", "type": "int"}]}).encode()


def aborts(world, result):
    return count(world.context.metrics.aborts, result)


@both
@pytest.mark.parametrize("fault", [(500, b"Internal Server Error"), "reset"])
async def test_prefill_fails_after_decode_has_reserved(fault, stream):
    async with World() as world:
        world.prefill.faults[SEND] = fault
        run = await world.run(stream=stream)
        assert isinstance(run.error, EngineFailed)
        assert (run.error.side, run.error.instance_id) == (Side.PREFILL, "p0")
        await world.leaves_nothing()
        assert world.decode.paths() == ["prep_recv", "start_generate"]
        [free] = world.decode.bodies(GENERATE)
        assert free["stream"] is True
        assert aborts(world, "sent") == 1
        assert run.out.events == []


async def test_prefill_cannot_be_reached():
    async with World() as world:
        await world.prefill.refuse()
        run = await world.run()
        assert isinstance(run.error, EngineFailed)
        assert run.error.connecting
        assert run.error.instance_id == "p0"
        await world.leaves_nothing()
        assert aborts(world, "sent") == 1


async def test_prefill_takes_too_long():
    async with World(remote_send_s=0.05) as world:
        world.engine._means.errands.sending_s = 0.05
        gate = world.prefill.gate(SEND)
        run = await world.run()
        assert (run.error.instance_id, run.error.reason) == ("p0", "timeout")
        await world.leaves_nothing()
        assert aborts(world, "sent") == 1
        gate.set()


async def test_what_prefill_may_still_write_into_is_not_freed():
    """KV goes into decode's memory without decode's doing: pages must not be somebody else's by then."""
    async with World() as world:
        gate = world.prefill.gate(SEND)
        run = world.start()
        await until(lambda: world.prefill.calls)
        run.task.cancel()
        await run.ended()
        await turns(20)
        assert world.engine.pinned() == {"d0": 1}
        assert world.decode.paths() == ["prep_recv"]
        gate.set()
        await world.leaves_nothing()
        assert world.decode.paths() == ["prep_recv", "start_generate"]


@both
@pytest.mark.parametrize(("status", "body", "says"), [(400, DOUBLE, "too long"), (422, LISTED, "n: must be a number")])
async def test_refusals_are_told_in_the_engines_words(status, body, says, stream):
    async with World() as world:
        for path in (PREPARE, SEND, GENERATE):
            fake = world.prefill if path == SEND else world.decode
            fake.faults[path] = (status, body)
            run = await world.run(stream=stream)
            assert isinstance(run.error, EngineRefused), path
            assert (run.error.status, run.error.message) == (status, says)
            fake.faults.clear()
            if path != GENERATE:
                await world.leaves_nothing()
            else:  # refused before the engine saw it: the reservation is still there, and asked for again
                await until(lambda: not world.engine.pinned())
                assert world.decode.paths()[-2:] == ["start_generate", "start_generate"]


@both
@pytest.mark.parametrize("fault", [(500, b"oops"), "reset"])
async def test_decode_fails(fault, stream):
    async with World() as world:
        for path in (PREPARE, GENERATE):
            world.decode.faults[path] = fault
            run = await world.run(stream=stream)
            assert isinstance(run.error, EngineFailed)
            assert (run.error.side, run.error.instance_id) == (Side.DECODE, "d0")
            world.decode.faults.clear()
            await turns(20)
            assert not world.engine.pinned(), "an engine that has seen start_generate would die of another"
            world.decode.reserved.clear()
        # a connection that was kept, and is closed without an answer, may have been closed before the call was read
        assert world.decode.paths() in (
            ["prep_recv", "prep_recv", "start_generate"], ["prep_recv"] * 3 + ["start_generate"]
        )  # fmt: skip


@both
@pytest.mark.parametrize("path", [PREPARE, SEND, GENERATE])
@pytest.mark.parametrize("fault", [(500, b"oops"), (400, DOUBLE)], ids=["fails", "refuses"])
async def test_a_request_that_fails_is_freed_with_its_error(path, fault, stream):
    """Its prompt may be as long as a model's context: it must not wait for the garbage collector."""
    async with World() as world:
        (world.prefill if path == SEND else world.decode).faults[path] = fault
        gc.collect()
        gc.disable()
        try:
            asked = completion_request(stream=stream)
            with world.scheduler.try_place(asked) as lease, pytest.raises((EngineFailed, EngineRefused)):
                await world.engine.serve(asked, lease, Out())
            world.decode.faults.clear()
            await until(lambda: not world.engine.pinned())
            await turns(20)
            assert not any(isinstance(one, Handoff | GenerateLeg) for one in gc.get_objects())
        finally:
            gc.enable()
            world.decode.reserved.clear()


def completion_request(*, stream):
    body = json.dumps({"model": "m", "prompt": "one two three", "stream": stream}).encode()
    return request(path=COMPLETIONS, body=body, stream=stream)


async def connected(world):
    """Have connections, so that a call goes out in the moment in which its time begins."""
    for each in world.instances:
        assert await world.engine.probe(each) == "m"


async def test_decode_finds_room_too_late():
    """The reservation comes although nobody waits for it any more, and is freed then."""
    async with World(prep_recv_s=0.05) as world:
        await connected(world)
        gate = world.decode.gate(PREPARE)
        run = await world.run()
        assert (run.error.instance_id, run.error.reason) == ("d0", "timeout")
        assert world.engine.pinned() == {"d0": 1}
        await until(lambda: world.decode.calls)
        assert world.decode.paths() == ["prep_recv"], "start_generate before there is a reservation would be fatal"
        gate.set()
        await world.leaves_nothing()
        assert world.decode.paths() == ["prep_recv", "start_generate"]
        assert aborts(world, "sent") == 1


async def test_decode_never_finds_room():
    async with World(prep_recv_s=0.05) as world:
        world.engine._means.errands.late_answer_s = 0.05
        await connected(world)
        world.decode.gate(PREPARE)
        await world.run()
        await until(lambda: not world.engine.pinned())
        await until(lambda: world.decode.calls)
        assert world.decode.paths() == ["prep_recv"]
        assert aborts(world, "failed") == 1


async def test_a_prep_recv_that_is_refused_late_has_nothing_to_free():
    async with World(prep_recv_s=0.05) as world:
        await connected(world)
        gate = world.decode.gate(PREPARE)
        world.decode.faults[PREPARE] = (500, b"no")
        await world.run()
        await until(lambda: world.decode.calls)
        gate.set()
        await world.leaves_nothing()
        assert world.decode.paths() == ["prep_recv"]


async def test_decode_is_gone_when_it_should_free_something():
    async with World() as world:
        gate = world.prefill.gate(SEND)
        run = world.start()
        await until(lambda: world.prefill.calls)
        await world.decode.refuse()
        run.task.cancel()
        await run.ended()
        gate.set()
        await until(lambda: not world.engine.pinned())
        assert aborts(world, "not_found") == 1


async def test_decode_does_not_take_the_call_that_frees():
    async with World(cleanup_s=0.05) as world:
        world.prefill.faults[SEND] = (500, b"")
        world.decode.gate(GENERATE)
        await world.run()
        await until(lambda: not world.engine.pinned())
        assert aborts(world, "failed") == 1


async def test_too_many_reservations_to_free(monkeypatch):
    monkeypatch.setattr(errands_module, "MAX_PENDING", 1)
    async with World() as world:
        world.prefill.faults[SEND] = (500, b"")
        gate = world.decode.gate(GENERATE)
        for _ in range(2):
            await world.run()
        assert aborts(world, "dropped") == 1
        assert world.engine.pinned() == {"d0": 1}
        gate.set()
        await until(lambda: not world.engine.pinned())


# --- clients that leave


@both
@pytest.mark.parametrize("path", [PREPARE, SEND, GENERATE])
async def test_a_client_that_leaves_in_any_stage_leaves_no_reservation(path, stream):
    async with World() as world:
        fake = world.prefill if path == SEND else world.decode
        gate = fake.gate(path)
        run = world.start(stream=stream)
        await until(lambda: any(call.target == path for call in fake.calls))
        run.task.cancel()
        await run.ended()
        assert run.task.cancelled()
        await turns(20)
        gate.set()
        await world.leaves_nothing()
        assert world.decode.paths() == ["prep_recv", "start_generate"]
        assert run.out.events == []


@both
async def test_a_client_that_leaves_while_decode_generates(stream):
    async with World() as world:
        world.decode.after.clear()
        run = world.start(stream=stream)
        if stream:
            await until(lambda: len(run.out.events) == 4)
        else:
            world.decode.gate(GENERATE)
            await until(lambda: GENERATE in [call.target for call in world.decode.calls])
        call = world.decode.calls[-1]
        run.task.cancel()
        await run.ended()
        await call.left()
        world.decode.gates.get(GENERATE, asyncio.Event()).set()
        world.decode.after.set()


async def test_cancelled_while_connecting_to_decode_for_its_answer():
    """Whatever the moment: no reservation is left, and none is asked for twice."""
    for turns_before in range(60):
        async with World() as world:
            run = world.start()
            await turns(turns_before)
            run.task.cancel()
            await run.ended()
            run.lease.end()  # a task that never began has not given it back
            await world.leaves_nothing()
            if run.out.over:
                break


async def test_closing_frees_what_is_due():
    async with World() as world:
        world.prefill.faults[SEND] = (500, b"")
        gate = world.decode.gate(GENERATE)
        await world.run()
        asyncio.get_running_loop().call_later(0.02, gate.set)
        await world.engine.aclose()
        assert world.decode.reserved == {}
        assert world.engine.pinned() == {}


async def test_closing_does_not_wait_for_prefill():
    async with World() as world:
        world.prefill.gate(SEND)
        run = world.start()
        await until(lambda: world.prefill.calls)
        run.task.cancel()
        await run.ended()
        await world.engine.aclose()
        assert world.decode.reserved == {}


async def test_prefill_answers_nonsense():
    async with World() as world:
        world.prefill.faults[SEND] = (200, b"this is not JSON")
        run = await world.run()
        assert (run.error.instance_id, run.error.reason) == ("p0", "bad_reply")
        await world.leaves_nothing()


async def test_closing_does_not_wait_for_ever(monkeypatch):
    from coordinator.engines.microserving import engine as engine_module

    monkeypatch.setattr(engine_module, "CLOSE_S", 0.05)
    async with World(prep_recv_s=0.02) as world:
        world.decode.gate(PREPARE)
        await world.run()
        await world.engine.aclose()
        assert world.engine.pinned() == {}


# --- health


async def test_a_dead_loop_behind_a_living_http_is_found(monkeypatch):
    only_metrics_take_time(monkeypatch)
    async with World() as world:
        [one] = [each for each in world.instances if each.id == "d0"]
        assert await world.engine.probe(one) == "m"
        world.decode.metrics_hang = True
        world.engine._context = type(world.context)(
            **{name: getattr(world.context, name) for name in world.context.__slots__ if name != "health_timeout_s"},
            health_timeout_s=0.1,
        )
        with pytest.raises(EngineFailed, match="timeout") as caught:
            await world.engine.probe(one)
        assert "loop is dead" in caught.value.detail


async def test_an_instance_that_is_gone_is_found():
    async with World() as world:
        await world.decode.refuse()
        with pytest.raises(EngineFailed):
            await world.engine.probe(world.instances[-1])


async def test_two_clients_with_one_user_do_not_meet():
    async with World() as world:
        runs = [world.start(user="me") for _ in range(5)]
        for run in runs:
            await run.ended()
            assert run.result == COMPLETED
        assert len(set(world.decode.users)) == 5


async def test_several_prefill_instances_share_the_work():
    async with World(prefills=2, decodes=2) as world:
        for _ in range(4):
            assert (await world.run()).error is None
        assert [len(fake.calls) for fake in world.prefills] == [2, 2]
        ranks = {rank for fake in world.prefills for _, rank, *_ in fake.sent}
        assert ranks == {4, 6}
        await world.leaves_nothing()
