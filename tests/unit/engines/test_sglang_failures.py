"""The engine protocol `sglang` when a leg fails or the client leaves: who is charged, and that nothing stays open."""

import asyncio
import json

import pytest
from cycles import left_to_the_collector
from engine_world import Out, chat, held, instance, request, scheduler, turns, until
from fake_instances import GUARD_S
from sglang_world import DONE, World, event, token

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Address
from coordinator.engines.sglang import legs as legs_module
from coordinator.engines.sglang import pair
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError


@pytest.fixture
async def world():
    world = await World().listen()
    yield world
    await world.aclose()


async def hang(call):
    await asyncio.Event().wait()


def says(status, message="because", *headers):
    async def answer(call):
        call.reply(json.dumps({"error": {"message": message}}).encode(), status, *headers)

    return answer


async def reset(call):
    call.rst()


async def fails(world, asked=None, out=None):
    """Serve a request that fails; returns the error and the sink. Nothing is left in use afterwards."""
    out = out or Out()
    with pytest.raises(RequestError) as caught:
        await world.serve(asked or request(), out)
    await until(lambda: not world.in_use)
    return caught.value, out


def both(world):
    return world.prefill.calls + world.decode.calls


async def closed(fake):
    """Wait until the coordinator has closed its connections to an instance."""
    await until(lambda: not fake.peers)


# --- prefill fails


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_prefills_refusal_is_the_clients_at_once(world, status, stream, monkeypatch):
    for wait in ("BLAME_WAIT_S", "REFUSAL_WAIT_S"):
        monkeypatch.setattr(pair, wait, 60.0)
    world.prefill.script, world.decode.script = says(status, "because", ("Retry-After", "7")), hang
    error, out = await fails(world, request(stream=stream))
    assert isinstance(error, EngineRefused)
    assert (error.status, error.message, error.retry_after_s) == (status, "because", 7)
    assert not out.started
    await closed(world.decode)


@pytest.mark.parametrize(("script", "reason"), [(says(500), "http_5xx"), (says(302), "bad_reply")])
async def test_prefills_failure_is_prefills(world, script, reason):
    world.prefill.script, world.decode.script = script, hang
    error, out = await fails(world)
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", reason)
    assert not out.started


async def test_a_reset_is_prefills(world):
    async def late(call):
        await world.decode.arrived.wait()
        call.rst()

    world.prefill.script, world.decode.script = late, hang
    error, _ = await fails(world)
    assert (error.side, error.reason) == (Side.PREFILL, "reset")
    await closed(world.decode)


async def test_an_error_behind_prefills_200_is_prefills(world):
    async def late(call):
        await world.decode.arrived.wait()
        call.open_stream()
        call.chunk(event({"error": {"message": "no memory", "code": 500}}))
        call.chunk(DONE)
        call.end()

    world.prefill.script, world.decode.script = late, hang
    error, _ = await fails(world)
    assert (error.side, error.reason, error.detail) == (Side.PREFILL, "engine_error", "no memory")


async def test_a_refusal_without_an_end_does_not_keep_the_client(world, monkeypatch):
    monkeypatch.setattr(pair, "REFUSAL_WAIT_S", 0.01)

    async def dribble(call):
        await world.decode.arrived.wait()
        call.send(b"HTTP/1.1 400 X\r\nContent-Length: 1000\r\n\r\nnot so")
        await call.left()

    world.prefill.script, world.decode.script = dribble, hang
    error, _ = await fails(world)
    assert (error.status, error.message) == (400, "not so")
    await closed(world.prefill)
    await closed(world.decode)


async def test_decode_is_closed_by_the_head_of_a_refusal(world, monkeypatch):
    monkeypatch.setattr(pair, "REFUSAL_WAIT_S", 60.0)

    async def slowly(call):
        await world.decode.arrived.wait()
        call.send(b"HTTP/1.1 400 X\r\nContent-Length: 6\r\n\r\nnot")
        await closed(world.decode)
        call.send(b" so")

    world.prefill.script, world.decode.script = slowly, hang
    error, _ = await fails(world)
    assert (error.status, error.message) == (400, "not so")


@pytest.mark.uncompiled
async def test_decode_is_closed_before_the_task_is_woken(world, monkeypatch):
    opened, seen = [], []
    connect = HttpClient.open_stream

    async def open_stream(*args, **kwargs):
        opened.append((await connect(world.client, *args, **kwargs), kwargs["sink"]))
        return opened[-1][0]

    class First(Out):
        def piece(self, *args, **kwargs):
            super().piece(*args, **kwargs)
            asyncio.get_running_loop().call_soon(self.fail)

        def fail(self):
            (_, prefill), (decode, _) = opened
            prefill.lost(TransportError("reset", "x"))
            seen.append(decode.closed)

    async def one(call):
        call.open_stream()
        call.chunk(token("a"))
        await call.left()

    monkeypatch.setattr(world.client, "open_stream", open_stream)
    world.prefill.script, world.decode.script = hang, one
    error, _ = await fails(world, out=First())
    assert error.side is Side.PREFILL
    assert seen == [True]


@pytest.mark.parametrize("failure", ["reset", "error"])
async def test_nothing_of_decodes_is_relayed_once_prefill_has_failed(world, failure):
    garbage = asyncio.Event()

    async def decode(call):
        world.decode.come(call)
        call.open_stream()
        call.chunk(token("a"))
        await garbage.wait()
        for _ in range(200):
            call.chunk(token("garbage"))
            await asyncio.sleep(0)

    async def prefill(call):
        await until(lambda: out.events)
        garbage.set()
        if failure == "reset":
            call.rst()
        else:
            call.reply(b"{}", 500)

    out = Out()
    world.prefill.script, world.decode.script = prefill, decode
    error, _ = await fails(world, out=out)
    assert (error.side, out.started) == (Side.PREFILL, True)
    said = len(out.events)
    await turns(50)
    assert len(out.events) == said


async def test_a_prefill_that_refuses_connections_never_troubles_decode(world):
    await world.prefill.refuse()
    error, _ = await fails(world)
    assert (error.side, error.reason, error.connecting) == (Side.PREFILL, "connect_refused", True)
    assert not world.decode.calls


@pytest.mark.uncompiled
async def test_a_prefill_that_fails_just_after_the_answer_does_not_undo_it(world):
    """Its failure comes when decode's answer is out and the task has not been woken yet."""
    legs = []
    made = pair.PrefillLeg

    class Noted(made):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            legs.append(self)

    class Late(Out):
        def finish(self, *args, **kwargs):
            super().finish(*args, **kwargs)
            lost = TransportError("reset", "late")
            asyncio.get_running_loop().call_soon(legs[0].lost, lost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "PrefillLeg", Noted)
        world.prefill.answer = hang
        out = await world.serve(request(), Late())
    assert out.over
    assert legs[0].over


# --- decode fails


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("script", "reason"), [(says(500), "http_5xx"), (says(503), "http_5xx"), (reset, "reset")])
async def test_decodes_failure_is_decodes(world, script, reason, stream):
    world.prefill.script, world.decode.script = hang, script
    error, out = await fails(world, request(stream=stream))
    assert (error.side, error.instance_id, error.reason) == (Side.DECODE, "d0", reason)
    assert not out.started
    await closed(world.prefill)


async def test_decodes_refusal_is_the_clients(world):
    world.prefill.script, world.decode.script = hang, says(422)
    error, _ = await fails(world)
    assert isinstance(error, EngineRefused)
    assert error.status == 422
    await closed(world.prefill)


async def test_a_decode_that_refuses_connections_does_not_leave_prefill_alone(world):
    world.prefill.script = hang
    await world.decode.refuse()
    error, _ = await fails(world)
    assert (error.side, error.reason, error.connecting) == (Side.DECODE, "connect_refused", True)
    await closed(world.prefill)


async def test_a_break_after_tokens_is_no_end(world):
    async def cut(call):
        call.open_stream()
        call.chunk(token("a"))
        await until(lambda: out.events)
        call.rst()

    world.decode.answer = cut
    out = Out()
    error, _ = await fails(world, out=out)
    assert (error.side, error.reason) == (Side.DECODE, "reset")
    assert out.body == token("a")
    assert not out.over


@pytest.mark.uncompiled
async def test_prefill_is_told_from_while_decode_is_being_connected(world):
    """Decode's address swallows connection attempts; prefill's refusal does not wait for them."""
    reached = asyncio.Event()
    connect = HttpClient.open_stream

    async def open_stream(self, address, *args, **kwargs):
        if address == world.decode.address:
            reached.set()
            await asyncio.Event().wait()
        return await connect(self, address, *args, **kwargs)

    async def late(call):
        await reached.wait()
        call.reply(b'{"message":"no"}', 400)

    world.client.open_stream = open_stream.__get__(world.client)
    world.prefill.script = late
    error, _ = await fails(world)
    assert (error.status, error.message) == (400, "no")


# --- who is guilty


@pytest.mark.parametrize("status", [400, 500])
async def test_a_decode_that_blames_prefill_is_not_charged_for_it(world, status, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)
    seen = asyncio.Event()

    async def decode(call):
        call.reply(json.dumps({"error": {"message": "KVTransferError: it might be dead"}}).encode(), status)
        seen.set()

    async def prefill(call):
        await seen.wait()
        await until(lambda: world.client.idle_connections == 1)
        call.rst()

    world.prefill.script, world.decode.script = prefill, decode
    error, _ = await fails(world)
    assert (error.side, error.reason) == (Side.PREFILL, "reset")


@pytest.mark.parametrize("opened", [True, False])
async def test_a_decode_that_is_quicker_to_tell_of_prefills_failure_is_not_guilty(world, opened, monkeypatch):
    """It may pass prefill's own words on, which name nobody."""
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)
    seen = asyncio.Event()

    async def decode(call):
        await until(lambda: len(both(world)) == 2)
        if opened:
            call.open_stream()
            call.chunk(event({"error": {"message": "Prefill failed.", "code": 500}}))
            call.end()
        else:
            call.reply(b'{"message":"Prefill failed."}', 500)
        seen.set()

    async def prefill(call):
        await seen.wait()
        await until(lambda: world.client.idle_connections == 1)
        call.reply(b'{"message":"Prefill failed."}', 500)

    world.prefill.script, world.decode.script = prefill, decode
    error, out = await fails(world)
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "http_5xx")
    assert not out.started


async def test_a_decode_with_a_failure_of_its_own_is_guilty_if_prefill_then_says_that_it_waited(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)

    async def prefill(call):
        await until(lambda: world.client.idle_connections == 1)
        call.reply(b'{"message":"Decode instance could be dead"}', 500)

    world.prefill.script, world.decode.script = prefill, says(500, "out of memory")
    error, _ = await fails(world)
    assert (error.side, error.instance_id) == (Side.DECODE, "d0")
    assert "out of memory" in error.detail


@pytest.mark.parametrize("begun", [True, False])
async def test_once_prefill_has_answered_or_decode_begun_its_failure_waits_for_nothing(world, begun, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)

    async def decode(call):
        await until(lambda: begun or world.client.idle_connections == 1)
        call.open_stream()
        if begun:
            call.chunk(token("a"))
            await until(lambda: out.started)
        call.chunk(event({"error": {"message": "out of memory", "code": 500}}))
        call.end()

    async def prefill(call):
        if begun:
            await hang(call)
        await world.prefill.answer(call)

    out = Out()
    world.prefill.script, world.decode.script = prefill, decode
    error, _ = await fails(world, out=out)
    assert (error.side, error.detail) == (Side.DECODE, "out of memory")


@pytest.mark.parametrize("status", [400, 500])
async def test_a_decode_that_blames_a_sound_prefill_is_guilty_itself(world, status, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 0.01)
    world.prefill.script, world.decode.script = hang, says(status, "Aborted by AbortReq.")
    error, _ = await fails(world)
    assert isinstance(error, EngineFailed)
    assert (error.side, error.instance_id) == (Side.DECODE, "d0")
    assert "AbortReq" in error.detail


async def test_a_prefill_that_waited_in_vain_accuses_decode(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 0.01)
    world.prefill.script, world.decode.script = says(500, "Aborted by AbortReq."), hang
    error, _ = await fails(world)
    assert (error.side, error.instance_id, error.reason) == (Side.DECODE, "d0", "timeout")


async def test_when_both_blame_each_other_the_first_to_fail_is_guilty(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)

    async def decode(call):
        await until(lambda: world.prefill.calls and world.client.idle_connections == 1)
        call.reply(b'{"message":"KVTransferError"}', 500)

    world.prefill.script, world.decode.script = says(500, "Decode instance could be dead"), decode
    error, _ = await fails(world)
    assert (error.side, error.reason) == (Side.PREFILL, "http_5xx")


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("says_why", [True, False])
async def test_when_both_give_up_at_once_it_was_prefill_that_had_not_finished(world, first, says_why, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)
    text = "KVTransferError: Request 7 timed out after 300s in KVPoll.WaitingForInput" if says_why else "AbortReq."

    async def late(call):
        await until(lambda: len(both(world)) == 2 and world.client.idle_connections == 1)
        call.reply(json.dumps({"message": text}).encode(), 500)

    async def early(call):
        await until(lambda: len(both(world)) == 2)
        call.reply(json.dumps({"message": text}).encode(), 500)

    world.prefill.script, world.decode.script = (early, late) if first == "prefill" else (late, early)
    error, _ = await fails(world)
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "http_5xx")


@pytest.mark.parametrize("opened", [True, False])
async def test_a_decode_that_failed_for_a_reason_of_its_own_is_guilty_although_prefill_spoke_first(
    world, opened, monkeypatch
):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)

    async def decode(call):
        if opened:
            call.open_stream()
        await until(lambda: len(both(world)) == 2 and world.client.idle_connections == 1)
        if opened:
            call.chunk(event({"error": {"message": "out of memory", "code": 500}}))
            call.end()
        else:
            call.reply(b'{"message":"out of memory"}', 500)

    async def prefill(call):
        await until(lambda: len(both(world)) == 2)
        call.reply(b'{"message":"Decode instance could be dead"}', 500)

    world.prefill.script, world.decode.script = prefill, decode
    error, out = await fails(world)
    assert (error.side, error.instance_id) == (Side.DECODE, "d0")
    assert "out of memory" in error.detail
    assert not out.started


async def test_tokens_after_the_head_of_prefills_failure_are_not_relayed_and_clear_decode(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 0.02)
    told = asyncio.Event()

    async def decode(call):
        world.decode.come(call)
        await told.wait()
        call.open_stream()
        call.chunk(token("garbage"))
        await call.left()

    async def prefill(call):
        await world.decode.arrived.wait()
        call.send(b"HTTP/1.1 500 X\r\nContent-Length: 20\r\n\r\n")
        await turns(20)
        told.set()
        await turns(20)
        call.send(b"Aborted by AbortReq.")

    world.prefill.script, world.decode.script = prefill, decode
    error, out = await fails(world)
    assert (error.side, error.reason) == (Side.PREFILL, "http_5xx")
    assert not out.started
    await closed(world.decode)


@pytest.mark.uncompiled
async def test_a_prefill_that_gives_up_before_decode_is_connected_keeps_decode_silent(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 60.0)
    given_up = asyncio.Event()
    connect = HttpClient.open_stream

    async def open_stream(self, address, *args, **kwargs):
        if address == world.decode.address:
            await given_up.wait()
            await until(lambda: self.idle_connections == 1)
        return await connect(self, address, *args, **kwargs)

    async def prefill(call):
        call.reply(b'{"message":"Aborted by AbortReq."}', 500)
        given_up.set()

    async def garbage(call):
        call.open_stream()
        call.chunk(token("garbage"))
        call.end()

    world.client.open_stream = open_stream.__get__(world.client)
    world.prefill.script, world.decode.script = prefill, garbage
    error, out = await fails(world)
    assert error.side is Side.PREFILL
    assert not out.started


async def test_a_decode_whose_time_ran_out_accuses_a_prefill_that_is_still_silent(world, monkeypatch):
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 0.01)
    text = "KVTransferError: Request 7 timed out after 300s in KVPoll.WaitingForInput"
    world.prefill.script, world.decode.script = hang, says(500, text)
    error, _ = await fails(world)
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "timeout")
    assert text in error.detail


async def test_a_prefill_that_has_answered_is_not_late(world):
    async def decode(call):
        world.decode.come(call)
        await until(lambda: world.client.idle_connections == 1)
        call.reply(b'{"message":"KVTransferError: timed out"}', 500)

    world.decode.script = decode
    error, _ = await fails(world)
    assert (error.side, error.reason) == (Side.DECODE, "http_5xx")


async def test_a_decode_that_streams_while_prefill_is_aborted_is_not_guilty(world):
    async def decode(call):
        world.decode.come(call)
        call.open_stream()
        call.chunk(token("a"))
        await call.left()

    async def prefill(call):
        await until(lambda: out.events)
        call.reply(b'{"message":"Aborted by AbortReq."}', 500)

    out = Out()
    world.prefill.script, world.decode.script = prefill, decode
    error, _ = await fails(world, out=out)
    assert error.side is Side.PREFILL


# --- kept connections


async def test_a_stale_connection_costs_a_new_room_and_no_failure(world, monkeypatch):
    monkeypatch.setattr(legs_module, "STALE_WITHIN_S", 60.0)
    for stale in (world.prefill, world.decode):
        await world.serve(request())
        await until(lambda: world.client.idle_connections == 2)
        before = len(both(world))

        async def once(call, stale=stale):
            stale.script = None
            call.fin()

        stale.script = once
        placement = world.placed()
        out = Out()
        await world.serve(request(), out, placement)
        assert out.over
        assert placement.names.count("sent") == 2
        rooms = [json.loads(call.body)["bootstrap_room"] for call in both(world)[before:]]
        assert len(set(rooms)) >= 2
        await until(lambda: not world.in_use)


async def test_a_connection_that_keeps_breaking_is_a_failure_in_the_end(world):
    for _ in range(4):
        await world.serve(request())
    await until(lambda: not world.in_use)
    world.decode.script = hang
    calls = len(world.prefill.calls)
    world.prefill.script = reset
    error, _ = await fails(world)
    assert error.side is Side.PREFILL
    assert len(world.prefill.calls) - calls <= 1 + 2


GIVES_UP = says(500, "Aborted by AbortReq.")  # for the other leg's sake


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(GIVES_UP, hang), (GIVES_UP, GIVES_UP), (hang, GIVES_UP), (says(500), says(500)), (reset, hang), (hang, reset)],
)
async def test_whoever_is_guilty_the_request_is_freed_with_the_error(world, prefill, decode, monkeypatch):
    """Both legs' errors are kept until the guilty one is known; none must wait for the garbage collector."""
    monkeypatch.setattr(pair, "BLAME_WAIT_S", 0.02)
    for _ in range(2):
        await world.serve(request())  # connections are there, so that a reset looks stale at first
    world.prefill.script, world.decode.script = prefill, decode
    with left_to_the_collector() as found:
        assert await fails_quietly(world)
        await until(lambda: not world.in_use)
        await turns(10)
    assert not found


async def fails_quietly(world):
    """Whether a request fails; nobody keeps its error."""
    try:
        await world.serve(request())
    except EngineFailed:
        return True
    return False


# --- the client leaves


async def test_a_client_that_leaves_closes_both(world):
    world.prefill.script = world.decode.script = hang
    work = asyncio.create_task(world.serve(request()))
    await until(lambda: world.decode.calls)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    for call in both(world):
        await call.left()


@pytest.mark.parametrize("kind", ["stream", "whole", "logprobs"])
async def test_leaving_at_any_moment_leaves_nothing_open_and_no_load(world, kind):
    """The request is cancelled after 0, 1, 2, ... rounds of the loop, until it is over before."""
    body, api, path = chat(stream=kind == "stream"), "openai", "/v1/chat/completions"
    if kind == "logprobs":
        body, api, path = b'{"text":"a","return_logprob":true}', "sglang", "/generate"
    made = scheduler(world.p0, world.d0)
    for rounds in range(1, 400):
        asked = request(stream=kind == "stream", body=body, api=api, path=path)
        out = Out(api)
        lease = await made.place(asked)

        async def attempt(asked=asked, out=out, lease=lease):
            with lease:
                await world.engine.serve(asked, lease, out)

        work = asyncio.create_task(attempt())
        await turns(rounds)
        whole = work.done()
        work.cancel()
        await asyncio.wait((work,))
        assert held(made) == {}
        world.engine._drains.close()
        await until(lambda: not world.in_use)
        if whole:
            assert out.over
            break
        if rounds % 3 == 0:  # with cold connections too
            for address in (world.p0.address, world.d0.address):
                world.client.close_address(address)
    else:
        pytest.fail("the request never ended")
    assert rounds > 5


@pytest.mark.uncompiled
async def test_a_connect_without_an_answer_can_be_cancelled(world):
    world.d0 = instance("d0", Address("192.0.2.1", 9), engine="sglang")
    opened = asyncio.Event()
    connect = world.client._connect

    async def slow(address, *args):
        if address == world.d0.address:
            opened.set()
            await asyncio.Event().wait()
        return await connect(address, *args)

    world.client._connect = slow
    world.prefill.script = hang
    work = asyncio.create_task(world.serve(request()))
    async with asyncio.timeout(GUARD_S):
        await opened.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await closed(world.prefill)
