"""The disaggpb engine against the simulated workers, which know what KV belongs to a prompt."""

import asyncio

import pytest
from disagg_on_simulators import LOST, DisaggWorld, tokenizers
from engine_world import count, until
from pair_on_simulators import CHAT, COMPLETIONS, text_of

from coordinator.core.errors import EngineFailed, KvTooLarge, RequestError, Side
from instances.timing import Timing

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TEXT = "one two three"


@both
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_in_and_text_out(path, stream):
    """The simulator's answer depends on the prompt and on the KV that really arrived."""
    async with DisaggWorld() as world:
        plain = await world.run(TEXT, path=path, stream=stream, tokens=20)
        assert plain.task.exception() is None
        assert plain.whole
        wanted = text_of(plain.body)
        assert wanted
        assert LOST not in wanted
        again = await world.run(TEXT, path=path, stream=not stream, tokens=20)
        assert text_of(again.body) == wanted
        await world.leaves_nothing()


@both
async def test_ids_in_and_ids_out(stream):
    async with DisaggWorld() as world:
        ids = await tokenizers().for_model("m").encode(TEXT)
        client = await world.own(ids, stream=stream, max_new_tokens=6)
        assert client.task.exception() is None
        assert client.whole
        (_, prefill), (_, decode) = *world.calls("prefill"), *world.calls("decode")
        assert prefill["token_ids"] == decode["token_ids"] == ids
        assert prefill["request_id"] == decode["request_id"]
        assert len(decode["kv_blocks"]) == 4
        await world.leaves_nothing()


@both
@pytest.mark.parametrize(
    "fault", ["delay=0.02", "prefill_slow=0.002", "decode_slow=0.002", "block_after_done", "after_done"]
)
async def test_what_must_not_change_the_answer(fault, stream):
    async with DisaggWorld() as world:
        wanted = text_of((await world.run(TEXT, stream=stream)).body)
        world.set(fault)
        got = await world.run(TEXT, stream=stream)
        assert got.task.exception() is None
        assert got.whole
        assert text_of(got.body) == wanted
        assert got.record.attempts == 1
        await world.leaves_nothing()


@pytest.mark.parametrize("fault", ["token_zero", "token_zero@2", "eos_first", "length=3"])
async def test_answers_of_all_kinds(fault):
    async with DisaggWorld() as world:
        ids = await tokenizers().for_model("m").encode(TEXT)
        world.set(fault)
        whole = await world.own(ids, stream=False, max_new_tokens=8)
        assert whole.task.exception() is None
        if fault == "eos_first":
            assert whole.body == b'{"token_ids":[2],"finish_reason":"stop"}'
        elif fault == "token_zero":
            assert whole.body.startswith(b'{"token_ids":[0,')
        await world.leaves_nothing()


BROKEN_KV = (
    "zero_layers", "done_first", "no_done", "no_done@2", "wrong_id", "out_of_order", "duplicate", "odd_length",
    "odd_length@3",
)  # fmt: skip
BROKEN_PREFILL = (
    "status=14", "status=2", "status=8", "reset", "prefill_unavailable", "prefill_unavailable@2", "prefill_fail",
    "prefill_fail@3", "prefill_cut", "prefill_cut@2",
)  # fmt: skip


@both
@pytest.mark.parametrize("fault", [*BROKEN_KV, *BROKEN_PREFILL])
async def test_another_prefill_takes_over(fault, stream):
    async with DisaggWorld(prefill=2) as world:
        wanted = text_of((await world.run(TEXT, stream=stream)).body)
        world.fleet.prefill[1].faults.replace([fault])
        for _ in range(2):
            got = await world.run(TEXT, stream=stream)
            assert got.task.exception() is None, got.task.exception()
            assert text_of(got.body) == wanted
        assert {name for name, _ in world.members.charged} == {"p1"}
        assert len(world.calls("decode")) == 3, "KV that is not whole never reaches decode"
        await world.leaves_nothing()


async def test_a_layer_too_few_is_seen_once_it_is_known_how_many_there_are():
    async with DisaggWorld(prefill=2) as world:
        wanted = text_of((await world.run(TEXT)).body)
        world.fleet.prefill[1].faults.replace(["skip_layer"])
        got = await world.run(TEXT)
        assert text_of(got.body) == wanted
        assert world.members.charged == [("p1", "bad_reply")]
        await world.leaves_nothing()
    async with DisaggWorld(attempts=1, engine={"kv_layers": 4}) as world:
        world.set("skip_layer")
        failed = await world.run(TEXT)
        assert failed.task.exception().reason == "bad_reply"
        await world.leaves_nothing()


async def test_the_simulators_see_wrong_kv():
    """Without this no other test here would mean much."""
    async with DisaggWorld() as world:
        world.set("wrong_kv")
        assert LOST in text_of((await world.run(TEXT)).body)


@both
@pytest.mark.parametrize("fault", ["status=14", "status=2", "reset", "decode_unavailable", "decode_fail", "decode_cut"])
async def test_decode_is_replayed(fault, stream):
    """With the KV that is there: prefill is asked once, and the answer is that of the prompt."""
    async with DisaggWorld(decode=2) as world:
        wanted = text_of((await world.run(TEXT, stream=stream)).body)
        world.fleet.decode[1].faults.replace([fault])
        got = await world.run(TEXT, stream=stream)
        assert got.task.exception() is None, got.task.exception()
        assert text_of(got.body) == wanted
        assert {name for name, _ in world.members.charged} == {"d1"}
        assert len(world.calls("prefill")) == 2
        assert count(world.context.metrics.decode_replays) == 1
        assert got.record.attempts == 2
        await world.leaves_nothing()


async def test_a_decode_that_has_died():
    async with DisaggWorld(decode=2) as world:
        wanted = text_of((await world.run(TEXT)).body)
        world.fleet.decode[1].crash()
        got = await world.run(TEXT)
        assert text_of(got.body) == wanted
        assert len(world.calls("prefill")) == 2
        with pytest.raises(EngineFailed) as caught:
            await world.engine.probe(world.decodes[1])
        assert caught.value.connecting
        await world.leaves_nothing()


@pytest.mark.parametrize(
    "fault", ["decode_fail@2", "decode_unavailable@2", "decode_cut@2", "decode_no_done@2", "decode_no_done"]
)
async def test_decode_fails_after_tokens(fault):
    """A reset of the connection throws away what was not read yet: then it came before the first token."""
    async with DisaggWorld(decode=2, timing=Timing(decode_ms=20)) as world:
        world.set(fault)
        failed = await world.run(TEXT)
        assert isinstance(failed.task.exception(), EngineFailed)
        assert failed.task.exception().side is Side.DECODE
        assert not failed.ends, "never an end that is made up"
        assert b"[DONE]" not in b"".join(failed.writes)
        assert len(world.calls("decode")) in ((1, 2) if fault == "decode_cut@2" else (1,))
        await world.leaves_nothing()


async def test_tokens_of_another_request():
    async with DisaggWorld(attempts=1) as world:
        world.set("decode_wrong_id")
        failed = await world.run(TEXT)
        assert failed.task.exception().reason == "bad_reply"
        await world.leaves_nothing()


@both
@pytest.mark.parametrize("fault", ["prefill_stall", "prefill_stall@2", "decode_stall", "decode_stall@2", "hang"])
async def test_a_client_that_leaves(fault, stream):
    async with DisaggWorld() as world:
        world.set(fault)
        client = world.start(TEXT, stream=stream)
        await until(lambda: any(each.live for each in world.fleet.instances))
        await asyncio.sleep(0.02)
        client.task.cancel()
        await world.ended(client)
        assert client.task.cancelled()
        await world.leaves_nothing()
        world.set()
        assert (await world.run(TEXT, stream=stream)).task.exception() is None


@both
async def test_clients_that_leave_at_any_time(stream):
    timing = Timing(prefill_ms=5, prefill_lanes=40, decode_ms=3)
    async with DisaggWorld(timing=timing) as world:
        clients = []
        for number in range(40):
            client = world.start(f"text {number}", stream=stream)
            asyncio.get_running_loop().call_later(number * 0.0008, client.task.cancel)
            clients.append(client)
        await world.ended(*clients)
        assert any(client.task.cancelled() for client in clients)
        await world.leaves_nothing()
        assert (await world.run("and one more", stream=stream)).task.exception() is None


async def test_sizes_above_grpcs_defaults():
    """The shape of Llama-3-8B: 64 tokens are 256 KiB for each layer, and a request of 8 MiB."""
    shape = {"layers": 32, "kv_heads": 8, "head_dim": 128}
    prompt = " ".join(["word"] * 64)
    async with DisaggWorld(**shape) as world:
        got = await world.run(prompt, path=COMPLETIONS)
        assert got.task.exception() is None
        assert LOST not in text_of(got.body)
        await world.leaves_nothing()
    async with DisaggWorld(max_message_bytes=4194304, **shape) as world:
        refused = await world.run(prompt, path=COMPLETIONS)
        assert isinstance(refused.task.exception(), KvTooLarge)
        assert world.members.charged == []
        short = await world.run("word", path=COMPLETIONS)
        assert short.task.exception() is None
        await world.leaves_nothing()


async def test_memory_is_shared_and_given_back():
    """More requests than the memory holds, some of which fail or leave."""
    per_token = 4 * 2 * 2 * 8 * 2 + 20
    engine = {"max_kv_bytes": 1 << 20, "max_total_kv_bytes": 2 << 20, "kv_bytes_per_token": per_token}
    async with DisaggWorld(prefill=2, decode=2, engine=engine, timing=Timing(prefill_ms=1, decode_ms=1)) as world:
        world.set("rate=0.1:prefill_fail", "rate=0.1:decode_fail", "rate=0.1:no_done")
        clients = [world.start(f"text {number}", stream=number % 2 == 0) for number in range(60)]
        for client in clients[::7]:
            asyncio.get_running_loop().call_later(0.01, client.task.cancel)
        await world.ended(*clients)
        failed = [client for client in clients if not client.task.cancelled() and client.task.exception()]
        assert all(isinstance(client.task.exception(), RequestError) for client in failed)
        assert len(failed) < 30
        await world.leaves_nothing()


async def test_many_at_once_get_their_own_answers():
    async with DisaggWorld(prefill=2, decode=2) as world:
        alone = [text_of((await world.run(f"say {number}")).body) for number in range(20)]
        started = [world.start(f"say {number}", stream=number % 2 == 0) for number in range(20)]
        await world.ended(*started)
        assert [text_of(client.body) for client in started] == alone
        await world.leaves_nothing()


@both
async def test_stop_strings_and_usage(stream):
    """What the wire has no field for is the coordinator's own work."""
    async with DisaggWorld() as world:
        words = text_of((await world.run(TEXT, tokens=20)).body).split()
        stopped = await world.run(TEXT, tokens=20, stream=stream, stop=[words[2]])
        assert stopped.task.exception() is None
        text = text_of(stopped.body)
        assert words[2] not in text
        assert words[1] in text
        await world.leaves_nothing()
