"""The microserving engine against the simulated instances, which die of what real engines die of and count every page.

The sections follow the edge cases and the defects of the reference router on the microserving protocol page (§12, §6).
Every scenario ends with counters, pages and connections back at nothing, and with every engine alive.
"""

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from engine_world import CHAT, GUARD_S, count, held, until
from microserving_on_simulators import MicroWorld
from microserving_pair import only_metrics_take_time
from pair_on_simulators import COMPLETIONS, payloads, text_of

from coordinator.core.errors import BadRequest, EngineFailed, EngineRefused, InternalError, NoInstance, RequestError
from coordinator.engines.microserving import engine as engine_module
from coordinator.sdk.loading import load_file
from instances import tokens
from instances.timing import Timing

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TEXT = "one two three four five six seven eight"
LOST = "<KV-LOST>"
SLOW = Timing(prefill_ms=15, transfer_ms=2, decode_ms=3)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(engine_module, "PAUSES_S", (0.0, 0.0, 0.005))


def chunks(client):
    if client.body.startswith(b"{"):
        return [json.loads(client.body)]
    return [json.loads(payload) for payload in payloads(client.body) if payload != b"[DONE]"]


def choices(client, index=0):
    return [choice for chunk in chunks(client) for choice in chunk["choices"] if choice["index"] == index]


def finish(client):
    return [choice["finish_reason"] for choice in choices(client)][-1]


def completes(world, text=TEXT, **more):
    return world.run(text, path=COMPLETIONS, **more)


def begins(world, text=TEXT, **more):
    return world.start(text, path=COMPLETIONS, **more)


async def wanted(text=TEXT, *, stream=True, tokens=8, **more):
    """What an engine alone says to this."""
    async with MicroWorld(prefill=0, decode=0, hybrids=1) as world:
        client = await completes(world, text, stream=stream, tokens=tokens, **more)
        assert client.task.exception() is None, client.task.exception()
        return text_of(client.body)


def fails(client, kind=RequestError):
    error = client.task.exception()
    assert isinstance(error, kind), error
    assert not client.ends or client.status >= 400, "never an end that is made up"
    return error


# --- windows (§12)


@both
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_pair_says_what_one_engine_says(path, stream):
    async with MicroWorld(hybrids=1, tokenizer=True) as world:
        [alone] = world.hybrids
        got = await world.run(TEXT, path=path, stream=stream)
        assert got.task.exception() is None, got.task.exception()
        assert got.whole
        assert text_of(got.body)
        assert LOST not in text_of(got.body)
        if path == COMPLETIONS:
            assert text_of(got.body) == await wanted(stream=stream)
        assert alone.id not in (got.record.prefill, got.record.decode)
        await world.leaves_nothing()


@both
async def test_a_prompt_of_one_token(stream):
    async with MicroWorld() as world:
        got = await completes(world, "stone", stream=stream)
        assert text_of(got.body) == await wanted("stone", stream=stream)
        assert world.bodies("remote_send") == []
        await world.leaves_nothing()


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_prompt_is_refused_before_it_kills_an_engine(prompt):
    async with MicroWorld() as world:
        fails(await completes(world, prompt), BadRequest)
        await world.leaves_nothing()


@both
async def test_a_prefix_that_is_matched_in_part_and_in_whole(stream):
    """Pages of 16 tokens: the second time all but the last token is there, the third time a part."""
    long = " ".join([TEXT] * 8)
    async with MicroWorld(options={"prefix_blocks": 500}) as world:
        first = await completes(world, long, stream=stream)
        again = await completes(world, long, stream=stream)
        more = await completes(world, f"{long} and more", stream=stream)
        assert text_of(first.body) == text_of(again.body) == await wanted(long, stream=stream)
        assert text_of(more.body) == await wanted(f"{long} and more", stream=stream)
        sent = world.bodies("remote_send")
        assert sent[0]["begin"] == 0
        assert all(body["begin"] > 0 for body in sent[1:])
        assert len(sent) in (2, 3), "what is there in whole is not sent"
        await world.leaves_nothing()


@both
@pytest.mark.parametrize("factor", [0.0, 0.3, 0.5, 0.999])
async def test_the_balance(factor, stream):
    async with MicroWorld(tokenizer=True, engine={"pd_balance_factor": factor}) as world:
        got = await completes(world, stream=stream)
        assert text_of(got.body) == await wanted(stream=stream)
        length = len(tokens.encode(TEXT))
        assert world.bodies("prep_recv")[0]["end"] == (int((1 - factor) * length) if factor else -1)
        await world.leaves_nothing()


async def test_a_balance_whose_window_ends_before_the_prefix_that_decode_has():
    async with MicroWorld(tokenizer=True, engine={"pd_balance_factor": 0.9}, options={"prefix_blocks": 500}) as world:
        long = " ".join([TEXT] * 8)
        for _ in range(2):
            got = await completes(world, long)
            assert text_of(got.body) == await wanted(long)
        await world.leaves_nothing()


# --- prompts


@both
async def test_text_and_token_ids_say_the_same(stream):
    async with MicroWorld() as world:
        by_text = await completes(world, stream=stream)
        by_ids = await completes(world, list(tokens.encode(TEXT)), stream=stream)
        assert text_of(by_text.body) == text_of(by_ids.body)
        await world.leaves_nothing()


@both
@pytest.mark.parametrize(("draft_models", "segments"), [(1, 1), (0, 3), (2, 4)])
async def test_metadata_of_several_segments_and_models(draft_models, segments, stream):
    async with MicroWorld(draft_models=draft_models, segments=segments) as world:
        got = await completes(world, " ".join([TEXT] * 6), stream=stream)
        assert LOST not in text_of(got.body)
        assert text_of(got.body)
        await world.leaves_nothing()


@both
@pytest.mark.parametrize("meta", ["!!!", "WzFd", "e30=", "W10=", "WzEsMCwtMV0="])
async def test_metadata_without_sense(meta, stream):
    async with MicroWorld(attempts=1) as world:
        world.fleet.decode[0].faults.replace([f"metadata={meta}"])
        error = fails(await completes(world, stream=stream), EngineFailed)
        assert (error.instance_id, error.reason) == ("d0", "bad_reply")
        assert world.bodies("remote_send") == []
        await world.leaves_nothing()


async def test_ranks_of_engines_with_unequal_gpus():
    """A wrong rank would write into another engine's memory, and the text would show it."""
    async with MicroWorld(prefill=2, decode=4) as world:
        ranks = [one.options["recv_rank"] for one in world.decodes]
        assert len(set(ranks)) == 4
        assert len({b - a for a, b in pairwise(ranks)}) > 1
        clients = [begins(world, f"{TEXT} {number}") for number in range(16)]
        await world.ended(*clients)
        assert not any(LOST in text_of(client.body) for client in clients)
        assert {body["recv_rank"] for body in world.bodies("remote_send")} == set(ranks)
        await world.leaves_nothing()


# --- waiting


@both
async def test_prep_recv_waits_for_room_and_then_goes_on(stream):
    """The pages of one are free only when it has ended: the next one waits in line."""
    settings = {"reserve_pages": 0}
    async with MicroWorld(timing=SLOW, options={"blocks": 5}, **settings) as world:
        clients = [begins(world, f"{TEXT} {number}", stream=stream, tokens=20) for number in range(4)]
        await world.ended(*clients)
        assert [client.task.exception() for client in clients] == [None] * 4
        assert not any(LOST in text_of(client.body) for client in clients)
        await world.leaves_nothing()


@both
async def test_a_reservation_that_comes_after_its_deadline_is_freed(stream):
    async with MicroWorld(attempts=1, engine={"prep_recv_s": 0.05}) as world:
        world.fleet.decode[0].faults.replace(["#1:prep_late=0.3"])
        error = fails(await completes(world, stream=stream), EngineFailed)
        assert (error.instance_id, error.reason) == ("d0", "timeout")
        await world.leaves_nothing()
        assert count(world.context.metrics.aborts, "sent") == 1
        assert text_of((await completes(world, stream=stream)).body) == await wanted(stream=stream)
        await world.leaves_nothing()


# --- failures


@both
@pytest.mark.parametrize("fault", ["send_error", "send_close", "send_lost", "status=500", "reset"])
async def test_prefill_fails_and_another_serves(fault, stream):
    async with MicroWorld(prefill=2) as world:
        world.fleet.prefill[0].faults.replace([fault])
        got = [await completes(world, stream=stream) for _ in range(2)]
        assert [client.task.exception() for client in got] == [None, None]
        assert all(text_of(client.body) == text_of(got[0].body) for client in got)
        assert {name for name, _ in world.members.charged} == {"p0"}
        await world.leaves_nothing()


@both
async def test_prefill_that_takes_too_long_is_left_and_its_reservation_freed(stream):
    async with MicroWorld(attempts=1, engine={"remote_send_s": 0.05}) as world:
        world.engine._means.errands.sending_s = 0.05
        world.fleet.prefill[0].faults.replace(["#1:send_hang"])
        error = fails(await completes(world, stream=stream), EngineFailed)
        assert (error.instance_id, error.reason) == ("p0", "timeout")
        await world.leaves_nothing()


@both
async def test_prefill_cannot_be_reached(stream):
    async with MicroWorld(attempts=1) as world:
        world.fleet.prefill[0].faults.replace(["crash"])
        first = await completes(world, stream=stream)
        fails(first, EngineFailed)
        error = fails(await completes(world, stream=stream), EngineFailed)
        assert error.instance_id == "p0"
        await world.leaves_nothing()


@both
async def test_an_answer_of_prefill_is_no_proof_that_anything_was_sent(stream):
    """Nobody can tell; the text shows it, and nothing is left behind."""
    async with MicroWorld() as world:
        world.fleet.prefill[0].faults.replace(["send_nothing"])
        got = await completes(world, stream=stream)
        assert LOST in text_of(got.body)
        await world.leaves_nothing()


@both
async def test_decode_dies_behind_its_http_after_prep_recv(stream):
    async with MicroWorld(attempts=1, engine={"cleanup_s": 0.2}) as world:
        world.engine._means.errands.sending_s = 0.1
        world.fleet.decode[0].faults.replace(["#1:prep_die"])
        client = begins(world, stream=stream)
        await until(lambda: world.fleet.decode[0].engine.loop.dead)
        world.dispatcher.interrupt_all(NoInstance("enough"))
        await world.ended(client)
        fails(client)
        await until(lambda: not world.engine.pinned())
        await until(lambda: not world.engine._means.errands._tasks)
        with pytest.raises(EngineFailed):
            await probe(world, world.decodes[0])


async def probe(world, instance, within_s=0.2):
    object.__setattr__(world.context, "health_timeout_s", within_s)
    return await world.engine.probe(instance)


@both
@pytest.mark.parametrize("fault", ["prep_error", "prep_close", "generate_error", "generate_close"])
async def test_decode_fails_and_another_serves(fault, stream):
    async with MicroWorld(decode=2) as world:
        world.fleet.decode[0].faults.replace([f"#1:{fault}", f"#2:{fault}"] if fault.startswith("prep") else [fault])
        got = [await completes(world, stream=stream) for _ in range(2)]
        assert [client.task.exception() for client in got] == [None, None]
        assert text_of(got[0].body) == text_of(got[1].body)
        await until(lambda: not world.engine._means.errands._tasks)
        assert world.dead == []


@both
async def test_an_answer_without_any_output_is_decodes_failure(stream):
    """A stream is a 500 then; one that is none has no finish reason, and would be taken for a whole one."""
    async with MicroWorld(decode=2) as world:
        world.fleet.decode[0].faults.replace(["zero_chunks"])
        got = [await completes(world, stream=stream) for _ in range(2)]
        assert [text_of(client.body) for client in got] == [await wanted()] * 2
        assert {name for name, _ in world.members.charged} == {"d0"}
        await world.leaves_nothing()


@both
async def test_refusals_in_the_engines_own_words(stream):
    async with MicroWorld() as world:
        for more, status in (({"best_of": 2}, 400), ({"n": "two"}, 422), ({"temperature": "hot"}, 422)):
            error = fails(await completes(world, stream=stream, **more), EngineRefused)
            assert error.status == status
            assert error.message
            assert not error.message.startswith(("{", '"', "[")), "the engine's JSON is unwrapped"
        assert world.members.charged == []
        await world.leaves_nothing()


# --- preempt


@both
@pytest.mark.parametrize("decodes", [1, 2])
async def test_preempted_as_its_first_chunk(decodes, stream):
    async with MicroWorld(decode=decodes) as world:
        world.fleet.decode[0].faults.replace(["#1:preempt@0"])
        got = [await completes(world, stream=stream) for _ in range(2)]
        assert all(text_of(client.body) == text_of(got[0].body) for client in got)
        assert text_of(got[0].body) == await wanted(stream=stream)
        assert world.members.charged == []
        asked = [sum(record.path.endswith("start_generate") for record in each.records) for each in world.fleet.decode]
        assert asked == ([3] if decodes == 1 else [2, 1]), "another decode first"
        await world.leaves_nothing()


@both
@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokenizer", "no-tokenizer"])
@pytest.mark.parametrize("decodes", [1, 3])
@pytest.mark.parametrize("after", [1, 3, 6])
async def test_preempted_after_k_chunks(after, decodes, tokenizer, stream):
    """No piece twice, none lost, what is left of max_tokens, the usage of one answer."""
    options = {"include_usage": True} if stream else None
    async with MicroWorld(decode=decodes, tokenizer=tokenizer) as world:
        for each in world.fleet.decode:
            each.faults.replace([f"#1:preempt@{after}"])
        got = await completes(world, stream=stream, tokens=10, stream_options=options)
        assert got.task.exception() is None, got.task.exception()
        assert text_of(got.body) == await wanted(stream=stream, tokens=10)
        assert finish(got) == "length"
        assert chunks(got)[-1]["usage"] == {
            "prompt_tokens": len(tokens.encode(TEXT)),
            "completion_tokens": 10,
            "total_tokens": len(tokens.encode(TEXT)) + 10,
        }
        assert len({chunk["id"] for chunk in chunks(got)}) == 1
        assert got.record.recomputes >= 1
        assert b"token_logprobs" not in got.body
        await world.leaves_nothing()


async def test_preempted_twice_and_on_every_decode():
    async with MicroWorld(decode=2) as world:
        for each in world.fleet.decode:
            each.faults.replace(["preempt@2=2"])
        got = await completes(world, tokens=12)
        assert got.task.exception() is None, got.task.exception()
        assert text_of(got.body) == await wanted(tokens=12)
        assert got.record.recomputes >= 4
        await world.leaves_nothing()


@both
async def test_preempted_for_ever_comes_to_an_end(stream):
    async with MicroWorld(engine={"max_preempts": 3}) as world:
        world.fleet.decode[0].faults.replace(["preempt@0"])
        error = fails(await completes(world, stream=stream), NoInstance)
        assert error.retry_after_s
        assert len(world.bodies("start_generate")) == 4
        await world.leaves_nothing()


async def test_preempted_by_want_of_pages_all_come_through():
    """Real pages run out while many generate: the newest are preempted, and every answer is whole."""
    alone = {f"{TEXT} {n} [[length:40]]": await wanted(f"{TEXT} {n} [[length:40]]", tokens=40) for n in range(6)}
    async with MicroWorld(
        decode=2,
        timing=Timing(decode_ms=1),
        options={"blocks": 6},
        reserve_pages=0,
        engine={"max_preempts": 50},
        recomputes=60,
    ) as world:
        clients = {text: begins(world, text, tokens=40) for text in alone}
        await world.ended(*clients.values())
        for text, client in clients.items():
            assert client.task.exception() is None, client.task.exception()
            assert text_of(client.body) == alone[text]
        assert sum(client.record.recomputes for client in clients.values()) > 0, "pages did not run out"
        await world.leaves_nothing()


async def test_preempted_with_log_probabilities():
    async with MicroWorld() as world:
        world.fleet.decode[0].faults.replace(["#1:preempt@3"])
        got = await completes(world, tokens=8, logprobs=2)
        said = [token for choice in choices(got) for token in (choice["logprobs"] or {}).get("tokens", [])]
        assert text_of(got.body) == await wanted()
        assert "".join(said) == text_of(got.body)
        await world.leaves_nothing()


async def test_preempted_with_token_ids():
    ids = list(tokens.encode(TEXT))
    async with MicroWorld(tokenizer=True) as world:
        world.fleet.decode[0].faults.replace(["#1:preempt@3"])
        assert text_of((await completes(world, ids)).body) == await wanted()
        await world.leaves_nothing()
    async with MicroWorld() as world:
        world.fleet.decode[0].faults.replace(["#1:preempt@3"])
        client = await completes(world, ids)
        assert isinstance(client.task.exception(), NoInstance)
        assert not client.ends
        await world.leaves_nothing()


async def test_preempted_chat_goes_on_in_the_shapes_of_chat():
    async with MicroWorld(tokenizer=True) as world:
        plain = await world.run(TEXT, tokens=8)
        world.fleet.decode[0].faults.replace(["#2:preempt@3"])
        got = await world.run(TEXT, tokens=8)
        assert got.record.recomputes == 1
        assert text_of(got.body) == text_of(plain.body)
        roles = [choice for choice in choices(got) if "role" in choice["delta"]]
        assert len(roles) == 1
        await world.leaves_nothing()


# --- clients


@both
@pytest.mark.parametrize("stage", ["prep_recv", "remote_send", "start_generate"])
async def test_a_client_that_leaves_in_each_stage(stage, stream):
    faults = {"prep_recv": "#1:prep_late=0.2", "remote_send": "#1:send_late=0.2", "start_generate": "#1:slow=0.05"}
    async with MicroWorld() as world:
        for each in world.fleet.instances:
            each.faults.replace([faults[stage]] if "send" in faults[stage] or each in world.fleet.decode else [])
        client = begins(world, stream=stream)
        await until(lambda: world.bodies(stage))
        client.task.cancel()
        await world.ended(client)
        assert client.task.cancelled()
        await world.leaves_nothing()
        assert (await completes(world)).task.exception() is None


@both
async def test_clients_that_leave_at_any_time(stream):
    async with MicroWorld(prefill=2, decode=2, timing=SLOW) as world:
        clients = []
        for number in range(40):
            client = begins(world, f"{TEXT} {number}", stream=stream)
            asyncio.get_running_loop().call_later(number * 0.002, client.task.cancel)
            clients.append(client)
        await world.ended(*clients)
        assert any(client.task.cancelled() for client in clients)
        await world.leaves_nothing()
        assert (await completes(world)).task.exception() is None


@both
async def test_clients_with_the_same_user(stream):
    async with MicroWorld(timing=SLOW) as world:
        clients = [begins(world, f"{TEXT} {number}", stream=stream, user="me") for number in range(8)]
        await world.ended(*clients)
        assert [client.task.exception() for client in clients] == [None] * 8
        assert all(fleet.engine.loop.counts["duplicates"] == 0 for fleet in world.fleet.instances)
        await world.leaves_nothing()


@both
async def test_two_choices(stream):
    async with MicroWorld(hybrids=1) as world:
        got = await completes(world, stream=stream, n=2)
        assert got.task.exception() is None
        by_index = {index: "".join(choice["text"] for choice in choices(got, index)) for index in (0, 1)}
        assert all(by_index.values())
        assert not any(LOST in text for text in by_index.values())
        await world.leaves_nothing()


@both
async def test_echo_and_suffix(stream):
    async with MicroWorld() as world:
        got = await completes(world, stream=stream, echo=True, suffix=" the end")
        text = text_of(got.body)
        assert text.startswith(TEXT)
        assert text.endswith(" the end")
        assert text == await wanted(stream=stream, echo=True, suffix=" the end")
        await world.leaves_nothing()


@both
async def test_log_probabilities(stream):
    async with MicroWorld() as world:
        got = await completes(world, stream=stream, logprobs=2)
        said = [choice["logprobs"] for choice in choices(got) if choice["logprobs"]]
        assert sum(len(one["token_logprobs"]) for one in said) >= 1
        assert any(one["top_logprobs"] for one in said)
        await world.leaves_nothing()


async def test_the_schema_reaches_the_engine_under_its_name():
    given = {"type": "json_object", "schema": '{"type": "object"}'}
    async with MicroWorld() as world:
        assert (await completes(world, response_format=given)).task.exception() is None
        for call in ("prep_recv", "remote_send", "start_generate"):
            assert [body["response_format"] for body in world.bodies(call)] == [given]
        await world.leaves_nothing()


# --- streams


@pytest.mark.parametrize(
    "fault", ["crlf", "split", "split_bytes", "join@3", "no_space", "comments", "no_done", "huge@2=0.6"]
)
async def test_streams_of_any_shape(fault):
    async with MicroWorld() as world:
        plain = text_of((await completes(world)).body)
        for each in world.fleet.decode:
            each.faults.replace([f"#2:{fault}"])
        got = await completes(world)
        assert got.task.exception() is None, got.task.exception()
        assert got.whole
        assert got.body.count(b"[DONE]") == 1
        if not fault.startswith("huge"):
            assert text_of(got.body) == plain
        else:
            assert len(got.body) > 512 * 1024
        await world.leaves_nothing()


@pytest.mark.parametrize("fault", ["stream_end@0", "stream_end@3", "stream_close@3", "stream_reset@3"])
async def test_torn_streams(fault):
    async with MicroWorld(attempts=1) as world:
        world.fleet.decode[0].faults.replace([fault])
        client = await completes(world)
        assert isinstance(client.task.exception(), EngineFailed)
        assert not client.ends
        await until(lambda: not world.engine._means.errands._tasks)
        assert world.dead == []


# --- health


async def test_an_engine_whose_loop_is_dead_behind_its_http(monkeypatch):
    only_metrics_take_time(monkeypatch)
    async with MicroWorld() as world:
        world.fleet.decode[0].engine.act("die", "")
        with pytest.raises(EngineFailed) as caught:
            await probe(world, world.decodes[0])
        assert "loop" in caught.value.detail
        assert await probe(world, world.prefills[0], GUARD_S) == "m"


# --- defects of the reference router (§6), as far as they are not above


async def test_defect_1_and_2_counters_come_back_after_anything():
    async with MicroWorld(prefill=2, decode=2, hybrids=0, attempts=1) as world:
        for fault in ("preempt@0", "preempt@2", "send_error", "prep_error", "generate_error", "stream_close@2"):
            world.set()
            for each in world.fleet.instances:
                each.faults.replace([fault])
            await completes(world)
        await until(lambda: not world.engine._means.errands._tasks)
        assert held(world.scheduler) == {}


@both
async def test_defect_2_round_robin_serves_gives_back_and_survives_failures(stream):
    async with MicroWorld(prefill=0, decode=0, hybrids=2, engine={"mode": "round-robin"}) as world:
        for number in range(4):
            got = await completes(world, stream=stream, user="me")
            assert got.task.exception() is None, number
        assert Counter(len([r for r in each.records if r.path == COMPLETIONS]) for each in world.fleet.hybrid) == {2: 2}
        world.set("status=500")
        fails(await completes(world, stream=stream), EngineFailed)
        world.set()
        chat = await world.run(TEXT, path=CHAT, stream=stream, user="me")
        assert chat.task.exception() is None
        assert all(body["user"] != "me" for body in world.bodies("completions"))
        await world.leaves_nothing()


async def test_defect_5_several_prefill_engines_and_their_load():
    async with MicroWorld(prefill=3, decode=1, timing=SLOW) as world:
        clients = [begins(world, f"{TEXT} {number}") for number in range(9)]
        await world.ended(*clients)
        served = [sum(r.path.endswith("remote_send") for r in each.records) for each in world.fleet.prefill]
        assert served == [3, 3, 3]
        await world.leaves_nothing()


async def test_defect_6_connections_are_used_again():
    async with MicroWorld() as world:
        for number in range(10):
            await completes(world, f"{TEXT} {number}")
        connections = {r.connection for each in world.fleet.instances for r in each.records}
        assert len(connections) <= 2 * len(world.fleet.instances)
        await world.leaves_nothing()


@both
async def test_defect_11_errors_keep_their_status_and_streams_never_end_falsely(stream):
    async with MicroWorld() as world:
        client = await completes(world, stream=stream, best_of=3)
        assert client.task.exception().status == 400
        await world.leaves_nothing()


async def test_defect_12_a_whole_answer_has_its_usage_and_all_log_probabilities():
    async with MicroWorld() as world:
        got = await completes(world, stream=False, logprobs=1, tokens=6)
        [answer] = chunks(got)
        assert answer["usage"]["completion_tokens"] == 6
        assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) > 1
        await world.leaves_nothing()


# --- patterns


PATTERNS = Path(__file__).parents[2] / "configs/patterns"
ROUTERS = {"tutorial": "CustomRouter", "balanced": "BalancedRouter", "longest_prefix": "LongestPrefixRouter"}
each_pattern = pytest.mark.parametrize("name", ROUTERS)


def router(name):
    return getattr(load_file(PATTERNS / f"{name}.py"), ROUTERS[name])


@both
@each_pattern
async def test_patterns_say_what_one_engine_says(name, stream):
    async with MicroWorld(prefill=2, decode=2, tokenizer=True, router=router(name)) as world:
        got = [await completes(world, stream=stream, user="me") for _ in range(4)]
        assert [client.task.exception() for client in got] == [None] * 4
        assert {text_of(client.body) for client in got} == {await wanted(stream=stream)}
        assert all(client.whole for client in got)
        await world.leaves_nothing()


@each_pattern
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_patterns_go_on_after_a_preempt(name, after):
    async with MicroWorld(decode=2, tokenizer=True, router=router(name)) as world:
        for each in world.fleet.decode:
            each.faults.replace([f"#1:preempt@{after}"])
        got = await completes(world, tokens=9, stream_options={"include_usage": True})
        assert got.task.exception() is None, got.task.exception()
        assert text_of(got.body) == await wanted(tokens=9)
        assert chunks(got)[-1]["usage"]["completion_tokens"] == 9
        await world.leaves_nothing()


@both
@each_pattern
async def test_clients_that_leave_patterns_at_any_time(name, stream):
    async with MicroWorld(prefill=2, decode=2, timing=SLOW, tokenizer=True, router=router(name)) as world:
        clients = []
        for number in range(25):
            client = begins(world, f"{TEXT} {number}", stream=stream)
            asyncio.get_running_loop().call_later(number * 0.003, client.task.cancel)
            clients.append(client)
        await world.ended(*clients)
        await world.leaves_nothing()
        assert (await completes(world)).task.exception() is None


@each_pattern
async def test_failures_of_engines_under_patterns(name):
    async with MicroWorld(prefill=2, decode=2, tokenizer=True, router=router(name)) as world:
        world.fleet.prefill[0].faults.replace(["send_error"])
        got = [await completes(world) for _ in range(3)]
        assert [client.task.exception() for client in got] == [None] * 3
        assert {name for name, _ in world.members.charged} <= {"p0"}
        await world.leaves_nothing()


async def test_a_fault_in_a_pattern_is_one_requests_own(tmp_path, caplog):
    path = tmp_path / "faulty.py"
    path.write_text(
        "from coordinator.sdk import Router\n"
        "class Faulty(Router):\n"
        "    async def translate_request(self, request, request_id):\n"
        "        if len(request.prompt) % 2:\n"
        "            raise RuntimeError('a secret')\n"
        "        async for response in super().translate_request(request, request_id):\n"
        "            yield response\n"
    )
    async with MicroWorld(tokenizer=True, router=load_file(path).Faulty) as world:
        assert [len(tokens.encode(text)) % 2 for text in ("one two three", "one two three four")] == [1, 0]
        clients = [begins(world, text) for text in ("one two three", "one two three four")]
        await world.ended(*clients)
        kinds = [type(client.task.exception()) for client in clients]
        assert kinds == [InternalError, type(None)]
        assert f"RuntimeError in {path}, line 5" in caplog.text
        assert "secret" not in caplog.text
        await world.leaves_nothing()
