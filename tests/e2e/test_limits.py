"""What is above a limit is turned away at once, and nobody else notices."""

import asyncio
import json
from functools import partial

import pytest
from dialects import BY_NAME, CHAT, CHAT_STREAM
from processes import until
from raw_client import Client, ask, eventually
from traffic import open_streams

pytestmark = pytest.mark.xdist_group("limits")
ENDLESS = "[[fault:stall@4]]"


async def test_too_many_requests(start):
    cluster = start.cluster(limits={"max_requests": 3})
    streams = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS] * 3)
    before = cluster.prefill.state()["inference_requests"]
    for name in ("chat", "tgi", "triton", "vllm", "mindie"):
        dialect = BY_NAME[name]
        reply = await ask(cluster.port, dialect.path, dialect.body("Hello"))
        assert reply.status == 429
        assert 1 <= int(reply.header("retry-after")) <= 120
        assert json.loads(reply.body)["error"]
    assert cluster.prefill.state()["inference_requests"] == before
    until(lambda: cluster.coordinator.metric("pd_coordinator_requests_total", outcome="rejected") == 5, "five counted")
    await streams.pop().reset()
    await eventually(lambda: cluster.coordinator.loads()["requests_in_flight"] == 2, "one has left")
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200
    for stream in streams:
        await stream.reset()
    cluster.wait_idle()


async def test_the_queue(start):
    cluster = start.cluster(limits={"max_queue": 2}, each={"max_requests": 1})
    coordinator = cluster.coordinator
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS])
    waiting = [await Client.connect(cluster.port) for _ in range(2)]
    for client in waiting:
        await client.ask(CHAT.path, CHAT.body("Hello"))
    await eventually(lambda: coordinator.loads()["requests_queued"] == 2, "two wait")
    reply = await ask(cluster.port, CHAT.path, CHAT.body("Hello"))
    assert reply.status == 429
    assert int(reply.header("retry-after")) >= 1
    await stream.reset()
    for client in waiting:
        assert CHAT.text(await client.rest(), "")
        await client.leave()
    cluster.wait_idle()


async def test_sizes(start):
    cluster = start.cluster(limits={"max_body_bytes": 4000, "max_header_bytes": 2000})
    large = CHAT.body("x" * 5000)
    reply = await ask(cluster.port, CHAT.path, large)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (413, "body_too_large")
    reply = await ask(cluster.port, "/generate", {"inputs": "x" * 5000})
    assert (reply.status, json.loads(reply.body)["error_type"]) == (413, "validation")
    reply = await ask(cluster.port, CHAT.path, CHAT.body("Hello"), {"X-Long": "y" * 3000})
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (431, "headers_too_large")
    async with await Client.connect(cluster.port) as client:
        head = f"POST {CHAT.path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head.encode() + b"1388\r\n" + b"x" * 5000)
        assert await client.head() == 413
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200
    assert cluster.prefill.state()["inference_requests"] == 1


async def test_a_slow_client_is_cut_off_alone(start):
    cluster = start.cluster(limits={"stream_buffer_bytes": 1 << 20})
    coordinator = cluster.coordinator
    slow = await Client.connect(cluster.port, receive_buffer=4096)
    # a piece of 1 MiB beside every token, which the slow one does not read
    await slow.ask(CHAT_STREAM.path, CHAT_STREAM.body("Story [[fault:huge=1]] [[fault:slow=0.05]] [[length:40]]", 40))
    prompt = "Story [[fault:slow=0.05]] [[length:40]]"
    others = await open_streams(cluster.port, CHAT_STREAM, [prompt] * 3, 40)
    bodies = await asyncio.gather(*(other.rest() for other in others))
    assert all(CHAT_STREAM.text(body, prompt) for body in bodies)
    assert all(other.complete for other in others)
    counted = partial(coordinator.metric, "pd_coordinator_requests_total")
    until(lambda: (counted(outcome="slow_client"), counted(outcome="ok")) == (1, 3), "one is cut off, three are served")
    until(lambda: cluster.decode.state()["stopped"] == 1, "decode is told")
    cluster.wait_idle()
    await slow.rest()
    assert not slow.complete
    for client in (*others, slow):
        await client.leave()
