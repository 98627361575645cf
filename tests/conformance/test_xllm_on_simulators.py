"""The xllm engine against the simulated instances, which check what they get and count the KV that they hold."""

import asyncio
import json

import pytest
from engine_world import Watcher, until
from pair_on_simulators import CHAT, COMPLETIONS, text_of
from xllm_on_simulators import XllmWorld

from coordinator.core.errors import DeadlineExceeded, EngineFailed, EngineRefused
from coordinator.engines.xllm import linking
from instances.timing import Timing

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TEXT = "one two three"
# what must not change the answer
HARMLESS = (
    "gzip_frames", "split_frames", "joined_frames=3", "single_frames", "reply_delay=0.02", "empty_step@3",
    "empty_gens@3", "unknown_id@3", "finish_twice", "late=2", "overtaken=0.05", "duplicate@0", "slow=0.002",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(linking, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(linking, "LONGEST_PAUSE_S", 0.05)


def well(client):
    assert client.task.exception() is None, client.task.exception()
    assert client.whole
    return text_of(client.body)


@both
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answers_are_the_same_whatever_the_wire_does(path, stream):
    """The simulator's answer depends on the prompt and on the KV that really arrived."""
    async with XllmWorld(engine={"order_wait_s": 5}) as world:
        wanted = well(await world.run(TEXT, path=path, stream=stream))
        assert wanted
        for fault in HARMLESS:
            world.set(fault)
            got = await world.run(TEXT, path=path, stream=stream)
            assert well(got) == wanted, fault
            assert got.record.attempts == 1, fault
            assert got.body.count(b"[DONE]") == stream, fault
        state = world.decode_state()
        assert state["unknown_refused"] > 0
        await until(lambda: world.decode_state()["late_refused"] > 0)
        assert (state["unknown_accepted"], state["late_accepted"], state["lost_kv"]) == (0, 0, 0)
        assert all(each.engine.intake.other_ids == 0 for each in world.fleet.instances)
        await world.leaves_nothing()
        assert world.aborts == []


@both
@pytest.mark.parametrize("settings", [{"kv_cache_transfer_mode": "PULL"}, {"proto": "old"}], ids=str)
async def test_pull_and_the_older_protocol(settings, stream):
    async with XllmWorld(**settings) as world:
        assert well(await world.run(TEXT, stream=stream))
        assert world.decode_state()["lost_kv"] == 0
        await world.leaves_nothing()


@both
async def test_a_first_token_that_is_half_a_character(stream):
    async with XllmWorld(engine={"order_wait_s": 5}, heartbeat_s=0.02) as world:
        await until(lambda: all(each.engine.presence.beats for each in world.fleet.instances))
        world.set("partial_first")
        text = well(await world.run(TEXT, stream=stream))
        assert "\N{REPLACEMENT CHARACTER}" not in text
        assert not text[0].isascii()
        await world.leaves_nothing()


@both
async def test_one_token(stream):
    async with XllmWorld() as world:
        client = await world.run(TEXT, path=COMPLETIONS, stream=stream, tokens=1)
        assert well(client)
        assert b'"finish_reason":"length"' in client.body
        await world.leaves_nothing()


async def test_many_at_once_share_calls():
    async with XllmWorld(prefill=2, decode=2, timing=Timing(decode_ms=2)) as world:
        texts = [f"question number {number}" for number in range(40)]
        clients = [world.start(text, stream=number % 2 == 0, tokens=12) for number, text in enumerate(texts)]
        await world.ended(*clients)
        answers = [well(client) for client in clients]
        assert len(set(answers)) > 20
        again = [well(await world.run(text, stream=False, tokens=12)) for text in texts[:6]]
        assert again == answers[:6]
        generations = [each.engine.state()["generations"] for each in world.fleet.decode]
        assert all(one["generations"] > one["calls"] for one in generations), generations
        await world.leaves_nothing()
        assert world.aborts == []


@both
async def test_several_sequences_and_log_probabilities(stream):
    async with XllmWorld(options={"prefix_blocks": 100}) as world:
        client = await world.run(TEXT, path=COMPLETIONS, stream=stream, n=2, logprobs=2, tokens=5)
        assert client.task.exception() is None, client.task.exception()
        if not stream:
            choices = json.loads(client.body)["choices"]
            assert [choice["index"] for choice in choices] == [0, 1]
            assert all(len(choice["logprobs"]["tokens"]) == 5 for choice in choices)
        await world.leaves_nothing()


async def test_usage_is_the_engines():
    async with XllmWorld() as world:
        plain = json.loads((await world.run(TEXT, stream=False, tokens=5)).body)["usage"]
        streamed = await world.run(TEXT, tokens=5, stream_options={"include_usage": True})
        last = json.loads(streamed.body.split(b"\n\n")[-3].removeprefix(b"data: "))
        assert last["usage"] == plain
        assert plain["completion_tokens"] == 5
        assert plain["prompt_tokens"] > 3


# --- failures


@both
async def test_an_error_before_anything_was_said_is_tried_elsewhere(stream):
    async with XllmWorld(prefill=2) as world:
        world.fleet.prefill[0].faults.replace(["generation_error@0=2"])
        client = await world.run(TEXT, stream=stream)
        assert well(client)
        assert client.record.attempts == 2
        assert world.members.charged == [("p0", "engine_error")]
        await world.unlinked()


@pytest.mark.parametrize(("code", "status"), [(3, 400), (5, 429), (6, 503), (4, 504), (1, 503)])
async def test_statuses_reach_the_client(code, status):
    async with XllmWorld(attempts=1) as world:
        world.fleet.prefill[0].faults.replace([f"generation_error@0={code}"])
        client = await world.run(TEXT)
        assert client.status == status
        assert ("retry-after" in client.headers) == (status in (429, 503))
        await world.unlinked()


async def test_an_error_in_the_middle_ends_the_answer_without_an_end():
    async with XllmWorld() as world:
        world.fleet.decode[0].faults.replace(["generation_error@3=2"])
        client = await world.run(TEXT)
        assert isinstance(client.task.exception(), EngineFailed)
        assert client.task.exception().instance_id == "d0"
        assert not client.whole
        assert b"[DONE]" not in client.body
        await world.leaves_nothing()


async def test_a_full_prefill_sends_the_request_to_another_and_then_away():
    async with XllmWorld(prefill=2, max_concurrent=1, timing=Timing(prefill_ms=200)) as world:
        first, second = world.start(TEXT), world.start(TEXT)
        await until(lambda: all(each.engine.intake.concurrent for each in world.fleet.prefill))
        third = await world.run(TEXT)
        assert third.status == 429
        assert third.record.attempts == 2
        await world.ended(first, second)
        assert [well(first), well(second)]
        await world.leaves_nothing()


async def test_a_model_that_prefill_does_not_have():
    async with XllmWorld(options={"model": "another"}) as world:
        client = await world.run(TEXT)
        assert isinstance(client.task.exception(), EngineRefused)
        assert client.status == 404
        await world.leaves_nothing()


async def test_without_a_decode_nothing_is_sent():
    async with XllmWorld(decode=0) as world:
        client = await world.run(TEXT)
        assert client.status == 503
        assert world.fleet.prefill[0].ordinal == 0


@both
async def test_a_decode_that_never_has_room_ends_in_the_deadline(stream):
    async with XllmWorld() as world:
        world.fleet.decode[0].faults.replace(["decode_full"])
        client = world.start(TEXT, stream=stream, deadlines={"first_token_s": 0.3})
        await world.ended(client)
        assert isinstance(client.task.exception(), DeadlineExceeded)
        assert client.status == 504
        world.set()
        await world.leaves_nothing()


async def test_a_first_token_that_decode_never_gets_ends_in_the_deadline():
    async with XllmWorld() as world:
        world.fleet.prefill[0].faults.replace(["first_lost"])
        client = world.start(TEXT, deadlines={"inter_token_s": 0.3})
        await world.ended(client)
        assert isinstance(client.task.exception(), DeadlineExceeded)
        assert not client.whole
        await world.unlinked()


async def test_decode_that_dies_fails_its_requests_and_comes_back():
    async with XllmWorld(heartbeat_s=0.05) as world:
        await until(lambda: all(each.engine.presence.beats for each in world.fleet.instances))
        world.fleet.decode[0].faults.replace(["answer_crash@2=0.1"])
        client = world.start(TEXT)
        await world.ended(client)
        error = client.task.exception()
        assert isinstance(error, EngineFailed)
        assert (error.instance_id, error.reason) == ("d0", "instance_lost")
        assert not client.whole
        world.set()
        await until(lambda: world.watchers["d0"].up)
        assert well(await world.run(TEXT))
        assert world.decode_state()["lost_kv"] == 0
        await world.leaves_nothing()


# --- clients that leave


@pytest.mark.parametrize("tokens_before", [0, 1, 3])
async def test_a_client_that_leaves_ends_the_request_at_decode(tokens_before):
    async with XllmWorld(timing=Timing(decode_ms=5)) as world:
        client = world.start(TEXT, tokens=2000, ignore_eos=True)
        await until(lambda: client.relay.events >= tokens_before)
        client.task.cancel()
        await world.ended(client)
        await world.leaves_nothing()
        assert world.aborts == []


async def test_one_client_that_leaves_spares_the_others_of_a_batch():
    async with XllmWorld(timing=Timing(decode_ms=3)) as world:
        leaving = world.start(TEXT, tokens=500, ignore_eos=True)
        staying = [world.start(f"{TEXT} {number}", tokens=30) for number in range(5)]
        await until(lambda: leaving.relay.events > 2)
        leaving.task.cancel()
        await world.ended(leaving, *staying)
        assert all(well(client) for client in staying)
        await until(lambda: world.decode_state()["cancelled"] == 1)
        await world.leaves_nothing()


# --- links


async def test_a_link_that_fails_is_made_later():
    async with XllmWorld() as world:
        decode = world.fleet.decode[0]
        decode.faults.replace(["link_fails=2"])
        unit = world.engine._linker.units[world.decodes[0].address.netloc]
        unit.break_off("the test says so")
        await until(lambda: not world.watchers["d0"].up)
        await until(lambda: world.watchers["d0"].up)
        assert decode.engine.links.failed == 2
        assert well(await world.run(TEXT))
        assert decode.engine.links.implicit == 0
        await world.leaves_nothing()


async def test_a_link_call_that_hangs_does_not_hold_up_the_others():
    async with XllmWorld(decode=2, engine={"call_timeout_s": 0.2}) as world:
        world.fleet.decode[0].faults.replace(["link_hang"])
        world.engine._linker.units[world.decodes[0].address.netloc].break_off("the test says so")
        world.engine._linker.units[world.decodes[1].address.netloc].break_off("the test says so")
        await until(lambda: not world.watchers["d1"].up)
        await until(lambda: world.watchers["d1"].up)
        assert not world.watchers["d0"].up


# --- two coordinators


async def test_results_go_to_the_coordinator_that_asked():
    async with XllmWorld(timing=Timing(decode_ms=1)) as world, XllmWorld(prefill=0, decode=0) as other:
        for each in (*world.prefills, *world.decodes):
            watcher = Watcher()
            other.engine.attach(each, watcher)
            await until(lambda watcher=watcher: watcher.up)
        other.scheduler.on_view(_view(world))
        clients = [where.start(f"{TEXT} {number}") for number in range(6) for where in (world, other)]
        await world.ended(*clients)
        answers = [well(client) for client in clients]
        assert answers[::2] == answers[1::2]
        assert world.decode_state()["cancelled"] == 0
        await asyncio.gather(world.leaves_nothing(), until(lambda: not len(other.engine._boxes)))


def _view(world):
    from coordinator.core.view import ClusterView

    return ClusterView(2, ready=(*world.prefills, *world.decodes))
