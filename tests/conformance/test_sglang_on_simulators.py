"""The SGLang engine against the simulated instances, which check what they get and count the KV that they hold."""

import asyncio

import pytest
from engine_world import until
from pair_on_simulators import CHAT, COMPLETIONS, World, text_of

from coordinator.core.errors import DeadlineExceeded, EngineFailed, EngineRefused, RequestError
from instances.timing import Timing

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TEXT = "one two three"
# what must not change the answer
HARMLESS = (
    "delay=0.02", "split_bytes", "no_done", "empty_first", "comments", "no_space", "multi_line", "crlf", "join@3",
    "split", "split_chunks", "huge@2=0.2", "gzip", "slow=0.002", "late_reply=0.05",
)  # fmt: skip
BROKEN = ("status=500", "status=503", "status=400", "reset", "close")
CUT = ("cut_after=20", "reset_after=20")
PREFILL_FAULTS = (*BROKEN, *CUT, "empty", "prefill_error=out of memory", "crash")
DECODE_FAULTS = (*BROKEN, *CUT, "empty", "answer_error@0", "answer_error@3", "transfer_failed", "crash")
BROKEN_STREAMS = ("stream_end@0", "stream_end@3", "stream_close@0", "stream_close@3", "stream_reset@3")


async def leaves_nothing(world):
    """No load, no KV, and no room in which a leg waits for the other."""
    await world.leaves_nothing()
    await until(lambda: not any(each.engine.rooms.state() for each in world.fleet.prefill))


@both
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answers_are_the_same_whatever_the_wire_does(path, stream):
    """The simulator's answer depends on the prompt and on the KV that really arrived."""
    async with World("sglang") as world:
        plain = await world.run(TEXT, path=path, stream=stream)
        assert plain.task.exception() is None
        wanted = text_of(plain.body)
        assert wanted
        for fault in HARMLESS:
            world.set(fault)
            got = await world.run(TEXT, path=path, stream=stream)
            assert got.task.exception() is None, (fault, got.task.exception())
            assert got.whole, fault
            assert text_of(got.body) == wanted, fault
            assert got.body.count(b"[DONE]") == stream, fault
            assert got.record.attempts == 1, fault
        await leaves_nothing(world)
        assert [each.engine.duplicate_rooms for each in world.fleet.instances] == [0, 0]


async def failing(world, victim, fault, *, stream):
    """Run a request on instances of which one has a fault; returns the failure."""
    victim.faults.replace([fault])
    failed = await world.run(TEXT, stream=stream)
    error = failed.task.exception()
    assert isinstance(error, RequestError)
    assert not failed.ends, "never an end that is made up"
    await leaves_nothing(world)
    return error


@both
@pytest.mark.parametrize("fault", PREFILL_FAULTS)
async def test_failures_of_prefill_are_charged_to_it_and_leave_nothing(fault, stream):
    async with World("sglang", attempts=1) as world:
        error = await failing(world, world.fleet.prefill[0], fault, stream=stream)
        if fault == "status=400":
            assert isinstance(error, EngineRefused)
        assert {name for name, _ in world.members.charged} == ({"p0"} if isinstance(error, EngineFailed) else set())


@both
@pytest.mark.parametrize("fault", DECODE_FAULTS)
async def test_failures_of_decode_are_charged_to_it_and_leave_nothing(fault, stream):
    async with World("sglang", attempts=1) as world:
        error = await failing(world, world.fleet.decode[0], fault, stream=stream)
        if fault == "status=400":
            assert isinstance(error, EngineRefused)
        assert {name for name, _ in world.members.charged} == ({"d0"} if isinstance(error, EngineFailed) else set())


@pytest.mark.parametrize("fault", BROKEN_STREAMS)
async def test_streams_that_break_off_leave_nothing(fault):
    async with World("sglang", attempts=1) as world:
        error = await failing(world, world.fleet.decode[0], fault, stream=True)
        assert isinstance(error, EngineFailed)
        assert error.instance_id == "d0"


@both
async def test_a_transfer_that_never_comes_is_prefills_failure(stream):
    """Both legs give up at the same time: decode was there, prefill had not finished."""
    async with World("sglang", attempts=1, waiting_timeout_s=0.2) as world:
        error = await failing(world, world.fleet.prefill[0], "prefill_stall", stream=stream)
        assert isinstance(error, EngineFailed)
        assert error.instance_id == "p0"


@both
async def test_a_decode_that_never_joins_is_decodes_failure(stream):
    async with World("sglang", attempts=1, bootstrap_timeout_s=0.2) as world:
        error = await failing(world, world.fleet.decode[0], "delay=5", stream=stream)
        assert isinstance(error, EngineFailed)
        assert (error.instance_id, error.reason) == ("d0", "timeout")


async def test_garbage_after_prefills_failure_does_not_reach_the_client():
    async with World("sglang", attempts=1) as world:
        world.fleet.decode[0].faults.replace(["garbage"])
        error = await failing(world, world.fleet.prefill[0], "prefill_error", stream=True)
        assert isinstance(error, EngineFailed)
        assert error.instance_id == "p0"


# --- clients that leave


@both
async def test_clients_that_leave_at_any_time_leave_nothing(stream):
    timing = Timing(prefill_ms=10, prefill_lanes=40, transfer_ms=4, decode_ms=3)
    async with World("sglang", timing=timing) as world:
        clients = []
        for number in range(40):
            client = world.start(f"text {number}", stream=stream)
            asyncio.get_running_loop().call_later(number * 0.0008, client.task.cancel)
            clients.append(client)
        await world.ended(*clients)
        assert any(client.task.cancelled() for client in clients)
        await leaves_nothing(world)
        assert (await world.run("and one more", stream=stream)).task.exception() is None


@both
async def test_forty_clients_that_leave_between_prefill_and_decode(stream):
    """Prefill has answered, so that its KV counts as pinned until decode's first output, which never comes here."""
    async with World("sglang") as world:
        world.fleet.decode[0].faults.replace(["slow=60"])
        for turns in range(40):
            client = world.start(f"text {turns}", stream=stream)
            await world.leave_between(client, turns)
        await leaves_nothing(world)
        assert all(each.ledger.used_blocks == 0 for each in world.fleet.instances)
        world.set()
        assert (await world.run("and one more", stream=stream)).task.exception() is None


@both
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["delay=0.5", "hang"])
async def test_a_client_that_leaves_an_instance_that_does_not_answer(role, fault, stream):
    async with World("sglang") as world:
        [victim] = getattr(world.fleet, role)
        victim.faults.replace([fault])
        client = world.start(TEXT, stream=stream)
        await until(lambda: all(each.live for each in world.fleet.instances))
        client.task.cancel()
        await world.ended(client)
        await leaves_nothing(world)


@both
async def test_a_deadline_while_prefill_stalls_leaves_nothing(stream):
    async with World("sglang") as world:
        world.fleet.prefill[0].faults.replace(["prefill_stall"])
        client = world.start(TEXT, stream=stream)
        await until(lambda: all(each.live for each in world.fleet.instances))
        world.dispatcher.interrupt_all(DeadlineExceeded("first_token"))
        await world.ended(client)
        assert isinstance(client.task.exception(), DeadlineExceeded)
        await leaves_nothing(world)


async def test_many_at_once_get_their_own_answers():
    async with World("sglang", prefill=2, decode=2) as world:
        alone = [text_of((await world.run(f"say {number}")).body) for number in range(20)]
        started = [world.start(f"say {number}", stream=number % 2 == 0) for number in range(20)]
        await world.ended(*started)
        assert [text_of(client.body) for client in started] == alone
        await leaves_nothing(world)


async def test_lists_of_prompts_and_several_answers_have_rooms_of_their_own():
    async with World("sglang") as world:
        for given in ({"n": 2}, {}):
            ended = await world.run(["a b", "c d"], path=COMPLETIONS, stream=False, **given)
            assert ended.task.exception() is None
        assert world.fleet.prefill[0].engine.rooms.transferred == 6
        await leaves_nothing(world)
