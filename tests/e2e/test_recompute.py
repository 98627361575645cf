"""Decode takes the KV of a request away and gives the request back: its client must not notice."""

import asyncio

import pytest
from dialects import CHAT_STREAM, DIALECTS, Dialect
from raw_client import ask, eventually
from traffic import HELD, open_streams

PROMPT = "Tell me about ancient paper [[length:20]]"
TOKENS_OF_DECODE = 3  # events of a held stream of which the last ones are decode's


@pytest.mark.parametrize("token", [1, 9])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_the_text_is_that_of_an_uninterrupted_answer(cluster, dialect: Dialect, token: int):
    right = await ask(cluster.port, dialect.path, dialect.body(PROMPT, 20))
    before = preempted(cluster)
    recomputes = cluster.coordinator.metric("pd_coordinator_recomputes_total")
    for instance in cluster.of("decode"):
        instance.fault(f"preempt@{token}")
    reply = await ask(cluster.port, dialect.path, dialect.body(PROMPT, 20))
    assert reply.status == 200, reply.body
    assert reply.complete
    assert dialect.text(reply.body, PROMPT) == dialect.text(right.body, PROMPT) != ""
    assert preempted(cluster) == before + 1
    assert cluster.coordinator.metric("pd_coordinator_recomputes_total") == recomputes + 1


def preempted(cluster) -> int:
    """Requests that decode has given back so far."""
    return sum(instance.state()["preempted"] for instance in cluster.of("decode"))


def stands(instance) -> bool:
    """Whether decode makes no tokens."""
    return not any(instance.state()["batch"].values())


async def test_many_at_once(cluster):
    prompts = [f"Story {number} {HELD}" for number in range(12)]
    uninterrupted = await open_streams(cluster.port, CHAT_STREAM, prompts[:3], 25)
    cluster.go_on()
    right = [await stream.rest() for stream in uninterrupted]
    streams = await open_streams(cluster.port, CHAT_STREAM, prompts, 25)
    for stream in streams:
        while stream.body.count(b"data: ") < TOKENS_OF_DECODE:
            assert await stream.piece()
    # a request that is given back before its stall would stand there when it has been computed again
    await eventually(lambda: all(stands(instance) for instance in cluster.of("decode")), "all stand in their stalls")
    before = preempted(cluster)
    for instance in cluster.of("decode"):
        instance.act("preempt")
    assert preempted(cluster) == before + 12
    bodies = await asyncio.gather(*(stream.rest() for stream in streams))
    assert all(stream.complete for stream in streams)
    texts = [CHAT_STREAM.text(body, "") for body in bodies]
    assert texts[:3] == [CHAT_STREAM.text(body, "") for body in right]
    assert len(set(texts)) == 12
    for stream in (*uninterrupted, *streams):
        await stream.leave()


async def test_given_back_too_often_ends_visibly(start):
    cluster = start.cluster(retry={"max_recomputes": 0})
    cluster.decode.fault("preempt@5")
    reply = await ask(cluster.port, CHAT_STREAM.path, CHAT_STREAM.body(PROMPT, 20))
    assert not reply.complete
    assert b'"code":"engine_failed"' in reply.body
    cluster.wait_idle()
