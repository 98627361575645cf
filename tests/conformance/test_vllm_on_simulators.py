"""The vLLM engine against the simulated instances, which check what they get and count the KV that they hold."""

import asyncio

import pytest
from engine_world import until
from pair_on_simulators import CHAT, COMPLETIONS, World, text_of

from coordinator.core.errors import DeadlineExceeded, RequestError
from instances.timing import Timing

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TEXT = "one two three"
# what must not change the answer
HARMLESS = (
    "delay=0.02", "split_bytes", "no_done", "empty_first", "comments", "no_space", "multi_line", "crlf", "join@3",
    "split", "split_chunks", "huge@2=0.2", "gzip", "slow=0.002",
    "no_params", "null_params", "empty_params", "finish_stop",
)  # fmt: skip
# what fails an attempt
BROKEN = ("status=500", "status=503", "status=400", "reset", "close")
CUT = ("cut_after=20", "reset_after=20")
UNREADABLE = (*CUT, "empty", "not_json")  # of prefill: the only record is lost with the answer
BROKEN_STREAMS = ("stream_end@0", "stream_end@3", "stream_close@0", "stream_close@3", "stream_reset@3")


@both
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answers_are_the_same_whatever_the_wire_does(path, stream):
    """The simulator's answer depends on the prompt and on the KV that really arrived."""
    async with World("vllm") as world:
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
        await world.leaves_nothing()
        assert world.expired == 0


@both
@pytest.mark.parametrize("shape", ["new", "plain", "old"])
async def test_records_of_all_versions(shape, stream):
    async with World("vllm", shape=shape, same_request_id=int(shape == "old")) as world:
        texts = [text_of((await world.run(TEXT, stream=stream)).body) for _ in range(2)]
        assert texts[0] == texts[1]
        assert world.fleet.decode[0].engine.load_failures == {}
        await world.leaves_nothing()


@both
@pytest.mark.parametrize("fault", [*BROKEN, *UNREADABLE, "crash"])
async def test_failures_of_prefill(fault, stream):
    """They leave nothing pinned, but for an answer that cannot be read: its KV goes with the engine's lease."""
    async with World("vllm", prefill=2, kv_lease_s=0.4) as world:
        for each in world.fleet.prefill:
            each.faults.replace([fault])
        failed = await world.run(TEXT, stream=stream)
        assert isinstance(failed.task.exception(), RequestError)
        assert not failed.ends, "never an end that is made up"
        assert [name for name, _ in world.members.charged] == ([] if fault == "status=400" else ["p0", "p1"])
        assert not any(each.ordinal for each in world.fleet.decode)
        await world.leaves_nothing()
        assert world.expired == (2 if fault in UNREADABLE else 0)
        world.set()
        if fault != "crash":
            assert (await world.run(TEXT, stream=stream)).task.exception() is None


@both
@pytest.mark.parametrize("fault", [*BROKEN, *CUT, "answer_error@0", "answer_error@3"])
async def test_failures_of_decode_leave_nothing_pinned(fault, stream):
    async with World("vllm", decode=2, attempts=1) as world:
        world.fleet.decode[0].faults.replace([fault])
        ended = [await world.run(f"{TEXT} {number}", stream=stream) for number in range(2)]
        [failed] = [client for client in ended if client.task.exception() is not None]
        assert isinstance(failed.task.exception(), RequestError)
        assert not failed.ends, "never an end that is made up"
        assert {name for name, _ in world.members.charged} <= {"d0"}
        await world.leaves_nothing()
        assert world.expired == 0


@pytest.mark.parametrize("fault", BROKEN_STREAMS)
async def test_streams_that_break_off_leave_nothing_pinned(fault):
    async with World("vllm") as world:
        world.fleet.decode[0].faults.replace([fault])
        failed = await world.run(TEXT)
        assert isinstance(failed.task.exception(), RequestError)
        assert not failed.ends
        await world.leaves_nothing()
        assert world.expired == 0


@both
async def test_a_transfer_that_fails_leaves_the_kv_to_another_decode(stream):
    async with World("vllm", decode=2, attempts=1) as world:
        for each in world.fleet.decode:
            each.faults.replace(["#1:transfer_failed"] if each is world.fleet.decode[0] else [])
        ended = [await world.run(TEXT, stream=stream) for _ in range(2)]
        assert sum(client.task.exception() is not None for client in ended) == 1
        await world.leaves_nothing()
        assert world.expired == 0


@both
async def test_a_record_that_nobody_can_use_is_asked_for_once_and_left_to_the_lease(stream):
    async with World("vllm", attempts=1, kv_lease_s=0.5) as world:
        world.fleet.prefill[0].faults.replace(["#1:stale_params"])
        failed = await world.run(TEXT, stream=stream)
        assert isinstance(failed.task.exception(), RequestError)
        await world.leaves_nothing()
        assert world.expired == 1
        assert world.fleet.decode[0].ordinal == 2, "the request and one release"


# --- clients that leave


@both
async def test_clients_that_leave_at_any_time_leave_nothing_pinned(stream):
    async with World("vllm", timing=Timing(prefill_ms=10, prefill_lanes=40, transfer_ms=4, decode_ms=3)) as world:
        world.engine._farewells.read_on_s = 0.5  # prefill's 10 ms are over by then on a slow machine too
        clients = []
        for number in range(40):
            client = world.start(f"text {number}", stream=stream)
            asyncio.get_running_loop().call_later(number * 0.0008, client.task.cancel)
            clients.append(client)
        await world.ended(*clients)
        assert any(client.task.cancelled() for client in clients)
        await world.leaves_nothing()
        assert world.expired == 0
        assert (await world.run("and one more", stream=stream)).task.exception() is None


@both
async def test_forty_clients_that_leave_between_prefill_and_decode(stream):
    """By the simulators' own books and by our gauge: pinned, and then no more, without waiting for the lease."""
    async with World("vllm", decode=2, timing=Timing(transfer_ms=50)) as world:
        for each in world.fleet.decode:
            each.faults.replace(["slow=60"])  # decode has said nothing when the client leaves
        for turns in range(40):
            await world.leave_between(world.start(f"text {turns}", stream=stream), turns)
        await world.leaves_nothing()
        books = [each.engine.handoffs for each in world.fleet.prefill]
        assert sum(each.expired for each in books) == 0
        assert sum(each.read + each.given_up for each in books) == 40
        world.set()
        assert (await world.run("and one more", stream=stream)).task.exception() is None


@both
@pytest.mark.parametrize("fault", ["delay=0.5", "hang"])
async def test_a_client_that_leaves_a_decode_that_has_not_looked_at_its_request(fault, stream):
    async with World("vllm", decode=2) as world:
        for each in world.fleet.decode:
            each.faults.replace([f"#1:{fault}"])
        clients = [world.start(f"text {number}", stream=stream) for number in range(2)]
        await until(lambda: sum(each.live for each in world.fleet.decode) == 2)
        for client in clients:
            client.task.cancel()
        await world.ended(*clients)
        assert world.pinned() == 2, "what may still be pinned shows"
        await world.leaves_nothing()
        assert world.expired == 0


@both
async def test_a_deadline_while_decode_hangs_leaves_nothing_pinned(stream):
    async with World("vllm", decode=1) as world:
        world.fleet.decode[0].faults.replace(["#1:hang"])
        client = world.start(TEXT, stream=stream)
        await until(lambda: world.fleet.decode[0].live)
        world.dispatcher.interrupt_all(DeadlineExceeded("first_token"))
        await world.ended(client)
        assert isinstance(client.task.exception(), DeadlineExceeded)
        await world.leaves_nothing()
        assert world.expired == 0


async def test_many_at_once_get_their_own_answers():
    async with World("vllm", prefill=2, decode=2) as world:
        alone = [text_of((await world.run(f"say {number}")).body) for number in range(20)]
        started = [world.start(f"say {number}", stream=number % 2 == 0) for number in range(20)]
        await world.ended(*started)
        assert [text_of(client.body) for client in started] == alone
        await world.leaves_nothing()


async def test_lists_of_prompts_and_requests_of_decode_alone():
    async with World("vllm") as world:
        listed = await world.run(["a b", "c d", "e f"], path=COMPLETIONS, stream=False)
        assert listed.task.exception() is None
        assert world.fleet.prefill[0].engine.handoffs.read == 3
        alone = await world.run("a b", path=COMPLETIONS, n=2)
        assert alone.task.exception() is None
        assert world.fleet.prefill[0].engine.handoffs.read == 3
        stages = world.context.metrics.stages
        assert sum(stages.prefill.values()[:-1]) == 1, "a prefill that was not is not timed"
        await world.leaves_nothing()
