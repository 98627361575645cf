"""A decode process dies: before the first byte, while it is away, and in the middle of an answer."""

import asyncio
import json

import pytest
from pair import CHAT, COMPLETIONS, question, read
from raw_client import Client, ask, eventually

BOTH = [(COMPLETIONS, True), (CHAT, False)]
LEASE_S = 30.0
RELEASES_S = 15.0  # then the coordinator has given up, in vain, on having the KV fetched
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture
def living_pair(pair):
    """The pair, decode alive again afterwards."""
    yield pair
    if not pair.decode.running:
        pair.restart_decode()
    pair.wait_ready()


def is_failure(client: Client) -> bool:
    error = json.loads(client.body)["error"]
    assert client.complete
    if client.status == 503:
        assert client.header("retry-after")
    return (client.status, error["code"]) in {(502, "engine_failed"), (503, "no_instance")}


async def test_decode_dies_before_the_first_byte_and_comes_back(living_pair):
    pair = living_pair
    expired = pair.prefill.books().expired
    pair.decode.freeze()
    asked = [asyncio.create_task(ask(pair.port, path, question(path, stream=stream))) for path, stream in BOTH]
    await eventually(lambda: pair.coordinator.loads()["kv_pinned_requests"] == len(asked), "KV is pinned")
    await asyncio.sleep(0.5)  # nothing tells from outside that both calls have reached decode's kernel
    assert not any(task.done() for task in asked)
    pair.decode.kill()
    for client in await asyncio.gather(*asked):
        assert is_failure(client), (client.status, client.body)
    late = await ask(pair.port, COMPLETIONS, question(COMPLETIONS))
    assert is_failure(late), (late.status, late.body)
    await eventually(lambda: pair.coordinator.states()["d0"] == "down", "decode is seen as down")
    away = await ask(pair.port, CHAT, question(CHAT))
    assert (away.status, is_failure(away)) == (503, True)
    assert not pair.coordinator.ready()
    await eventually(
        lambda: pair.coordinator.metric("pd_coordinator_aborts_total", result="failed") >= 2, "given up", RELEASES_S
    )
    # nobody has fetched the KV: the lease frees it, while a successor starts
    pair.restart_decode()
    await eventually(lambda: pair.prefill.books().idle, "prefill's lease has ended", LEASE_S + 15)
    assert pair.prefill.books().expired > expired


async def test_the_successor_serves(living_pair):
    pair = living_pair
    body = question(CHAT, stream=True)
    reference = await pair.alone(CHAT, body)
    async with pair.moving() as moved:
        answer = await pair.through(CHAT, body)
    assert answer.texts == reference.texts
    assert moved[0].decode.transfers == 1


async def test_decode_dies_in_the_middle_of_an_answer(pair):
    async with await Client.connect(pair.port) as client:
        await client.ask(CHAT, question(CHAT, **LONG))
        assert await client.head() == 200
        while client.body.count(b"data: ") < 5:
            assert await client.piece()
        pair.decode.kill()
        await client.rest()
    assert not client.complete
    assert b"[DONE]" not in client.body
    *chunks, last = [event for event in client.body.split(b"\n\n") if event]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert all(b'"error"' not in chunk for chunk in chunks)
    with pytest.raises(AssertionError):
        read(client)
