"""The engine against fake workers: what they are told, what clients get, and who is to blame."""

import asyncio
import time

import grpc
import pytest
from disagg_messages import KVBlockStream
from disagg_workers import END, FakeWorker, fails, hangs, kv_message, layers, says, sends, token_message
from disagg_world import COMPLETIONS, World, ended, tokens_of
from engine_world import GUARD_S, count, held, observed, until

from coordinator.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    EngineRefused,
    KvTooLarge,
    Side,
)
from coordinator.wire.disaggpb import varint

CODE = grpc.StatusCode
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
LOOKED_AT = {"finished_s": 60.0, "inter_token_s": 0.02}  # a deadline that is far, and judged again all the time


# --- answers


@both
async def test_ids_in_and_ids_out(stream):
    async with World() as world:
        world.script(layers(3, 10), says(0, 10, 2))
        client = await world.run((5, 6, 300), stream=stream, max_new_tokens=9, temperature=0.5)
        assert client.error is None
        assert client.whole
        assert tokens_of(client) == ([0, 10, 2], "stop")
        [(_, prefill)], [(_, decode)] = world.calls("Prefill"), world.calls("Decode")
        for call in (prefill.message, decode.message):
            assert list(call.token_ids) == [5, 6, 300]
            assert (call.max_new_tokens, call.temperature) == (9, 0.5)
        assert prefill.wire_id == decode.wire_id != ""
        assert [(b.request_id, b.layer_idx, b.block_idx, len(b.k_data)) for b in decode.message.kv_blocks] == [
            (prefill.wire_id, layer, 0, 10) for layer in range(3)
        ]


@both
@pytest.mark.parametrize(
    ("script", "limit", "tokens", "reason"),
    [
        (says(2), 9, [2], "stop"),
        (says(0, reason="length"), 1, [0], "length"),
        (says(0, 0, reason="length"), 2, [0, 0], "length"),
        (sends(lambda ident: token_message(ident, 5), b"\x10\x07\x18\x01"), 9, [5, 7], "stop"),
        (sends(lambda ident: token_message(ident, 5), b"\x10\x07\x18\x01"), 2, [5, 7], "length"),
        (sends(lambda ident: token_message(ident, 5, "odd")), 9, [5], "odd"),
        (says(*range(50), reason="length"), 9, list(range(9)), "length"),
    ],
    ids=["EOS first", "token 0 alone", "length", "no reason", "no reason at the limit", "odd", "a worker goes too far"],
)
async def test_ends(script, limit, tokens, reason, stream):
    async with World() as world:
        world.script(decode=script)
        client = await world.run(stream=stream, max_new_tokens=limit)
        assert client.error is None
        assert tokens_of(client) == (tokens, reason)
        assert client.whole


async def test_limits_and_temperature_may_be_left_out():
    async with World(settings={"max_new_tokens": 77}) as world:
        assert (await world.run(temperature=0)).error is None
        message = world.calls("Prefill")[0][1].message
        assert (message.max_new_tokens, message.temperature) == (77, 0.0)


async def test_stages_and_load():
    """Prefill's share ends with its KV, which it does not keep."""
    async with World() as world:
        world.script(decode=hangs())
        client = world.start()
        await until(lambda: world.calls("Decode"))
        assert held(world.scheduler) == {"d0": (1, 0)}
        client.task.cancel()
        await ended(client)
        world.script(decode=says(1, 2))
        assert (await world.run()).error is None
        stages = world.context.metrics.stages
        for stage in (stages.queue, stages.prefill, stages.handoff, stages.decode):
            assert observed(stage)[0] >= 1


async def test_what_comes_after_the_end_is_ignored(monkeypatch):
    """A block after `done`, a token after the last one; the workers may end their calls as they like."""
    monkeypatch.setattr("coordinator.engines.disaggpb.channel.PARTING_S", 0.05)
    async with World() as world:
        after = [lambda ident: kv_message(ident, 9), END]
        world.script(
            sends(lambda ident: kv_message(ident, 0), END, *after, then=(CODE.UNKNOWN, "too late")),
            sends(
                lambda ident: token_message(ident, 1), lambda ident: token_message(ident, 2, "stop"),
                lambda ident: token_message(ident, 3), then=(CODE.INTERNAL, "too late"),
            ),
        )  # fmt: skip
        client = await world.run()
        assert client.error is None
        assert tokens_of(client) == ([1, 2], "stop")
        assert len(world.calls("Decode")[0][1].message.kv_blocks) == 1


async def test_calls_that_end_in_order_are_not_cancelled(monkeypatch):
    monkeypatch.setattr("coordinator.engines.disaggpb.channel.PARTING_S", GUARD_S)
    async with World() as world:
        assert (await world.run()).error is None
        await until(lambda: all(call.ended for _, call in world.calls()))


async def test_a_worker_that_does_not_end_its_call_is_left(monkeypatch):
    monkeypatch.setattr("coordinator.engines.disaggpb.channel.PARTING_S", 0.01)
    async with World() as world:
        world.script(hangs(lambda ident: kv_message(ident, 0), END))
        assert (await world.run()).error is None
        [(_, call)] = world.calls("Prefill")
        await call.left.wait()
        assert not call.ended


async def test_many_at_once_get_their_own():
    async def echo(ask):
        for token in ask.message.token_ids:
            yield token_message(ask.wire_id, token)
        assert {block.request_id for block in ask.message.kv_blocks} == {ask.wire_id}
        yield token_message(ask.wire_id, 2, "stop")

    async with World(2, 2) as world:
        world.script(layers(4, 100), echo)
        clients = [world.start((number, number + 1), stream=number % 2 == 0) for number in range(40)]
        for number, client in enumerate(clients):
            await ended(client)
            assert tokens_of(client) == ([number, number + 1, 2], "stop")
        ids = [call.wire_id for _, call in world.calls("Prefill")]
        assert len(set(ids)) == 40


# --- KV that is not whole


BROKEN_KV = {
    "no layer": [END],
    "nothing at all": [],
    "no end": [lambda ident: kv_message(ident, 0)],
    "another request's": [lambda ident: kv_message(f"{ident}0", 0), END],
    "out of order": [lambda ident: kv_message(ident, 1), END],
    "twice": [lambda ident: kv_message(ident, 0), lambda ident: kv_message(ident, 0), END],
    "odd length": [lambda ident: kv_message(ident, 0, k=b"abc"), END],
    "nonsense": [b"\xff\xff"],
}


@pytest.mark.parametrize("messages", BROKEN_KV.values(), ids=BROKEN_KV)
async def test_broken_kv_never_reaches_decode(messages):
    """Another prefill worker gets the request, and if there is none that does better, the client gets 502."""
    async with World(prefills=2) as world:
        world.worker("p0").prefill = sends(*messages)
        assert (await world.run()).error is None
        assert len(world.calls("Prefill")) == 2
        assert len(world.calls("Decode")) == 1
        reason = "bad_reply" if messages and messages != BROKEN_KV["no end"] else "ended_early"
        assert world.members.charged == [("p0", reason, False)]
        world.script(prefill=sends(*messages))
        failed = await world.run()
        assert isinstance(failed.error, EngineFailed)
        assert failed.status == 502
        assert failed.error.side is Side.PREFILL
        assert len(world.calls("Decode")) == 1


# --- failures of prefill


@pytest.mark.parametrize("messages", [[], [lambda ident: kv_message(ident, 0)]], ids=["at once", "in the middle"])
@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.UNKNOWN, CODE.INTERNAL, CODE.RESOURCE_EXHAUSTED])
async def test_another_prefill_takes_over(code, messages):
    async with World(prefills=2) as world:
        world.worker("p0").prefill = sends(*messages, then=(code, "so says the worker"))
        client = await world.run()
        assert (client.error, client.record.attempts) == (None, 2)
        assert world.members.charged == [("p0", "engine_error", False)]


async def test_a_prefill_that_nobody_listens_at():
    async with World(prefills=2) as world:
        await world.dies("p0")
        client = await world.run()
        assert (client.error, client.record.attempts) == (None, 2)
        ((charged, reason, connecting),) = world.members.charged
        assert (charged, connecting) == ("p0", True)
        assert reason in ("connect_refused", "connect_failed")  # gRPC's words depend on how the connection before ended


@both
async def test_refusals_of_prefill_are_the_clients(stream):
    async with World(prefills=2) as world:
        world.script(prefill=fails(CODE.INVALID_ARGUMENT, "token_ids too long"))
        client = await world.run(stream=stream)
        assert isinstance(client.error, EngineRefused)
        assert (client.status, client.error.message) == (400, "token_ids too long")
        assert client.record.attempts == 1
        assert world.members.charged == []


# --- failures of decode


@both
@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.UNKNOWN, CODE.INTERNAL, None])
async def test_decode_is_replayed_with_the_same_kv(code, stream):
    """Before the first token another decode worker gets the very same request; prefill is not asked again."""
    async with World(decodes=2) as world:
        world.script(layers(5, 1000, block=b"xy"), says(8, 9, 2))
        world.worker("d0").decode = sends() if code is None else fails(code, "so says the worker")
        client = await world.run(stream=stream)
        assert client.error is None
        assert tokens_of(client) == ([8, 9, 2], "stop")
        assert len(world.calls("Prefill")) == 1
        [(first, failed), (second, again)] = world.calls("Decode")
        assert (first, second) == ("d0", "d1")
        assert again.message == failed.message
        assert len(again.message.kv_blocks) == 5
        assert world.members.charged == [("d0", "ended_early" if code is None else "engine_error", False)]
        assert client.record.attempts == 2
        assert count(world.context.metrics.decode_replays) == 1


async def test_decode_is_replayed_where_nobody_listens():
    async with World(decodes=3) as world:
        await world.dies("d0")
        await world.dies("d1")
        client = await world.run()
        assert client.error is None
        assert client.record.decode == "d2"
        assert {name for name, *_ in world.members.charged} <= {"d0", "d1"}
        assert len(world.calls("Prefill")) == 1


async def test_where_no_other_decode_is_left_the_whole_request_is_tried_again():
    async with World(decodes=1) as world:
        outcomes = iter([fails(CODE.UNAVAILABLE, "busy"), says(1, 2)])

        async def decode(ask):
            async for message in next(outcomes)(ask):
                yield message

        world.script(decode=decode)
        client = await world.run()
        assert client.error is None
        assert len(world.calls("Prefill")) == 2
        assert len({call.wire_id for _, call in world.calls("Prefill")}) == 2
        assert count(world.context.metrics.decode_replays) == 0


async def test_not_more_often_than_configured():
    async with World(decodes=5, attempts=3) as world:
        world.script(decode=fails(CODE.UNAVAILABLE, "busy"))
        client = await world.run()
        assert isinstance(client.error, EngineFailed)
        assert client.status == 502
        assert len(world.calls("Decode")) == 3
        assert len({name for name, *_ in world.members.charged}) == 3


async def test_decode_fails_after_tokens():
    """The client gets an error event, and no end."""
    async with World(decodes=2) as world:
        world.script(decode=says(7, 8, then=(CODE.INTERNAL, "so says the worker")))
        client = await world.run()
        assert isinstance(client.error, EngineFailed)
        assert client.ends == ["torn"]
        assert tokens_of(client) == ([7, 8], None)
        assert client.body.endswith(b'event: error\ndata: {"error":"the decode instance failed (engine error)"}\n\n')
        assert len(world.calls("Decode")) == 1
        assert count(world.context.metrics.decode_replays) == 0


async def test_decode_ends_without_its_last_token():
    async with World() as world:
        world.script(decode=sends(lambda ident: token_message(ident, 7)))
        client = await world.run()
        assert (client.error.reason, client.error.side) == ("ended_early", Side.DECODE)
        assert not client.whole
        assert b'done":true' not in client.body


async def test_a_whole_answer_that_breaks_off_is_tried_again():
    """Nothing was sent yet; the KV is gone with the first token, so prefill is asked again."""
    async with World(decodes=2) as world:
        world.worker("d0").decode = says(7, then=(CODE.INTERNAL, ""))
        world.worker("d1").decode = says(7, 2)
        assert tokens_of(await world.run(stream=False)) == ([7, 2], "stop")
        assert len(world.calls("Prefill")) == 2


@pytest.mark.parametrize(
    "message",
    [lambda ident: token_message(f"{ident}1", 5), lambda ident: token_message(ident, -1), b"\xff\xff"],
    ids=["another request's", "negative", "nonsense"],
)
async def test_tokens_that_cannot_be(message):
    async with World() as world:
        world.script(decode=sends(message, lambda ident: token_message(ident, 2, "stop")))
        client = await world.run()
        assert (client.error.reason, client.error.side) == ("bad_reply", Side.DECODE)


@both
async def test_refusals_of_decode_are_the_clients(stream):
    async with World(decodes=2) as world:
        world.script(decode=fails(CODE.INVALID_ARGUMENT, "no"))
        client = await world.run(stream=stream)
        assert (client.status, client.error.message) == (400, "no")
        assert len(world.calls("Decode")) == 1


# --- clients that leave, and deadlines


@both
@pytest.mark.parametrize("stage", ["Prefill", "Decode"])
async def test_a_client_that_leaves_cancels_the_call(stage, stream):
    async with World() as world:
        hanging = hangs(lambda ident: kv_message(ident, 0)) if stage == "Prefill" else hangs()
        world.script(**{stage.lower(): hanging})
        client = world.start(stream=stream)
        await until(lambda: world.calls(stage))
        client.task.cancel()
        await ended(client)
        assert client.error == "cancelled"
        [(_, call)] = world.calls(stage)
        await call.left.wait()
        assert not call.ended
        assert world.engine.budget.reserved_bytes == 0


async def test_a_client_that_leaves_in_the_middle_of_an_answer():
    async with World() as world:
        world.script(decode=hangs(lambda ident: token_message(ident, 5)))
        client = world.start()
        await until(lambda: client.writes)
        client.task.cancel()
        await ended(client)
        [(_, call)] = world.calls("Decode")
        await call.left.wait()


@pytest.mark.parametrize("stage", ["Prefill", "Decode"])
async def test_a_deadline_cancels_the_call(stage):
    async with World() as world:
        world.script(**{stage.lower(): hangs()})
        client = world.start(deadlines=LOOKED_AT)
        await until(lambda: world.calls(stage))
        world.ahead_s = LOOKED_AT["finished_s"]
        await ended(client)
        assert isinstance(client.error, DeadlineExceeded)
        assert client.status == 504
        [(_, call)] = world.calls(stage)
        await call.left.wait()


async def test_another_end_of_the_dispatcher_cancels_the_call():
    async with World() as world:
        world.script(decode=hangs())
        client = world.start()
        await until(lambda: world.calls("Decode"))
        world.dispatcher.interrupt_all(DeadlineExceeded("first_token"))
        await ended(client)
        assert isinstance(client.error, DeadlineExceeded)


@pytest.mark.parametrize("stage", ["Prefill", "Decode"])
async def test_an_instance_that_is_removed_fails_its_requests(stage):
    async with World(attempts=1) as world:
        world.script(**{stage.lower(): hangs()})
        client = world.start()
        await until(lambda: world.calls(stage))
        await world.engine.detach(world.instances["p0" if stage == "Prefill" else "d0"])
        await ended(client)
        assert (client.error.reason, client.error.side) == ("closed", Side(stage.lower()))
        failed = await world.run()
        assert failed.error.reason == "closed"


async def test_a_slow_client_slows_the_worker_down():
    async with World() as world:
        sent, padding = 0, b"\x7a" + varint(1 << 16) + bytes(1 << 16)  # a field of a later version

        async def decode(ask):
            nonlocal sent
            while True:
                sent += 1
                yield token_message(ask.wire_id, 5) + padding

        async def stands_still():
            """Wait until no more is sent, although not all of it was read."""
            last = -1
            while sent != last or client.relay.events == sent:
                last = sent
                await asyncio.sleep(0.1)

        world.script(decode=decode)
        client = world.start(max_new_tokens=10**9)
        client.exchange.congested = True
        async with asyncio.timeout(GUARD_S):
            await stands_still()
        first = sent
        assert client.relay.events < first, "not all that was sent was read"
        client.exchange.congested = False
        client.exchange.on_writable()
        await until(lambda: sent > first)
        client.task.cancel()
        await ended(client)


# --- sizes


async def test_layers_and_requests_above_four_mebibytes():
    async with World() as world:
        world.script(layers(3, 3 << 20))
        assert (await world.run()).error is None
        [(_, call)] = world.calls("Decode")
        assert call.size_bytes > 18 << 20
        assert {len(block.v_data) for block in call.message.kv_blocks} == {3 << 20}


async def test_a_decode_worker_with_grpcs_own_limit():
    """Nobody can take such a request: the client gets 413, and nobody is charged."""
    async with World(decodes=2, workers={f"d{i}": FakeWorker(options=()) for i in range(2)}) as world:
        world.script(layers(3, 1 << 20))
        client = await world.run()
        assert isinstance(client.error, KvTooLarge)
        assert (client.status, world.members.charged) == (413, [])
        world.script(layers(3, 1 << 10))
        assert (await world.run()).error is None


async def test_a_limit_of_decode_that_is_known():
    async with World(options={"d0": {"max_message_bytes": 4096}}) as world:
        world.script(layers(2, 2000))
        client = await world.run()
        assert client.status == 413
        assert world.calls("Decode") == []
        assert (await world.run()).status == 413
        world.script(layers(2, 900))
        assert (await world.run()).error is None


async def test_a_limit_of_our_own_for_messages():
    async with World(settings={"max_message_bytes": 4096}) as world:
        world.script(layers(1, 3000))
        client = await world.run()
        assert client.status == 413
        assert world.calls("Decode") == []


@pytest.mark.parametrize("number", [1, 3], ids=["in one message", "in all"])
async def test_a_limit_for_the_kv_of_one_request(number):
    """Refused as soon as it is known, and before decode."""
    async with World(settings={"max_kv_bytes": 20_000, "max_total_kv_bytes": 50_000}) as world:
        world.script(layers(3, 12_000 // number))
        client = await world.run()
        assert isinstance(client.error, KvTooLarge)
        assert client.status == 413
        assert world.calls("Decode") == []
        [(_, call)] = world.calls("Prefill")
        await call.left.wait()


async def test_a_configured_size_of_a_token_refuses_before_prefill():
    async with World(settings={"max_kv_bytes": 10_000, "kv_bytes_per_token": 1000}) as world:
        client = await world.run(range(11))
        assert client.status == 413
        assert world.calls() == []


async def test_memory_for_all_together():
    """Those for whom there is none wait, and nothing is lost."""
    settings = {"max_kv_bytes": 100_000, "max_total_kv_bytes": 250_000, "kv_bytes_per_token": 30_000}
    async with World(settings=settings) as world:
        gate = asyncio.Event()
        most = 0

        async def decode(ask):
            nonlocal most
            most = max(most, world.engine.budget.buffered_bytes)
            await gate.wait()
            yield token_message(ask.wire_id, 2, "stop")

        world.script(layers(2, 20_000), decode)
        clients = [world.start() for _ in range(10)]
        await until(lambda: len(world.calls("Decode")) == 2)
        gauges = world.context.metrics.snapshot()
        assert gauges["pd_coordinator_kv_buffered_bytes"][()][0] > 160_000
        assert gauges["pd_coordinator_kv_waiting_requests"] == {(): [8]}
        assert len(world.calls("Prefill")) == 2
        gate.set()
        for client in clients:
            await ended(client)
            assert client.error is None
        assert most <= 250_000


async def test_memory_that_does_not_become_free():
    settings = {"max_kv_bytes": 100_000, "max_total_kv_bytes": 100_000, "kv_wait_s": 0.05}
    async with World(settings=settings) as world:
        world.script(hangs())
        first = world.start()
        await until(lambda: world.calls("Prefill"))
        second = await world.run()
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        assert second.record.attempts == 1
        first.task.cancel()
        await ended(first)


@pytest.mark.parametrize("how", ["leaves", "deadline"])
async def test_a_wait_for_memory_ends_with_its_request(how):
    settings = {"max_kv_bytes": 100_000, "max_total_kv_bytes": 100_000}
    async with World(settings=settings) as world:
        world.script(hangs())
        first = world.start()
        await until(lambda: world.calls("Prefill"))
        second = world.start(deadlines=LOOKED_AT)
        await until(lambda: world.engine.budget.waiting == 1)
        if how == "leaves":
            second.task.cancel()
        else:
            world.ahead_s = LOOKED_AT["finished_s"]
        await ended(second)
        assert world.engine.budget.waiting == 0
        assert second.error == "cancelled" if how == "leaves" else isinstance(second.error, DeadlineExceeded)
        assert len(world.calls("Prefill")) == 1
        first.task.cancel()
        await ended(first)


async def test_memory_is_free_again_with_the_first_token():
    async with World() as world:
        world.script(layers(2, 5000), hangs(lambda ident: token_message(ident, 5)))
        client = world.start()
        await until(lambda: client.writes)
        assert world.engine.budget.buffered_bytes == 0
        client.task.cancel()
        await ended(client)


# --- one worker for both


@both
async def test_a_hybrid_worker_gets_both_calls(stream):
    async with World(0, 0, hybrids=1) as world:
        client = await world.run(stream=stream)
        assert client.error is None
        assert tokens_of(client) == ([2], "stop")
        assert [(name, call.method) for name, call in world.calls()] == [("h0", "Prefill"), ("h0", "Decode")]
        world.script(decode=fails(CODE.UNAVAILABLE, "busy"))
        failed = await world.run(stream=stream)
        assert isinstance(failed.error, EngineFailed)
        assert failed.status == 502


# --- what is asked for


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_refused_of_the_own_api(fields, word):
    async with World() as world:
        client = await world.run(**fields)
        assert isinstance(client.error, BadRequest)
        assert f"`{word}`" in client.error.message
        assert world.calls() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.5}, {"top_k": 5}, {"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1},
        {"ignore_eos": True}, {"logprobs": 1}, {"n": 2}, {"best_of": 2}, {"max_tokens": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
async def test_what_is_refused_of_openais(fields):
    async with World() as world:
        client = await world.run(api="openai", body={"prompt": [1, 2], **fields})
        assert client.status == 400
        assert f"`{next(iter(fields))}`" in client.error.message
        assert world.calls() == []


async def test_what_may_be_ignored():
    async with World(settings={"unsupported": "ignore"}) as world:
        body = {"prompt": [1, 2], "top_p": 0.5, "top_k": 5, "ignore_eos": True}
        assert (await world.run(api="openai", body=body)).error is None
        assert (await world.run(api="openai", body={**body, "n": 2})).status == 400


async def test_what_means_nothing_is_no_harm():
    async with World() as world:
        body = {"prompt": [1, 2], "top_p": 1, "top_k": -1, "seed": 4, "presence_penalty": 0, "n": 1, "best_of": 1}
        client = await world.run(api="openai", body=body)
        assert client.error is None
        assert client.body.count(b'"token_ids"') == 1


async def test_text_needs_a_tokenizer():
    async with World() as world:
        client = await world.run(api="openai", body={"prompt": "text"})
        assert client.status == 400
        assert "tokenizer" in client.error.message


async def test_other_apis_are_refused():
    async with World() as world:
        client = await world.run(api="mindie", path="/infer", body={"inputs": "text"})
        assert client.status == 400
        assert world.calls() == []


async def test_calls_that_are_no_inference():
    async with World() as world:
        with pytest.raises(BadRequest):
            await world.engine.call(None, world.instances["p0"])


async def test_a_long_prompt_lets_the_loop_turn():
    async with World() as world:
        worst = 0.0

        async def watch():
            nonlocal worst
            while True:
                before = time.monotonic()
                await asyncio.sleep(0)
                worst = max(worst, time.monotonic() - before)

        ids = list(range(100_000))
        watching = asyncio.create_task(watch())
        client = await world.run(ids)
        watching.cancel()
        assert client.error is None
        assert list(world.calls("Decode")[0][1].message.token_ids) == ids


def test_the_marker_of_the_end_is_the_pages():
    assert END == b"\x10\x01"
    assert KVBlockStream.FromString(END).done
    assert COMPLETIONS == "/v1/completions"
