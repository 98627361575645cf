"""Clients leave: the instances stop at once, and all load is given back."""

import asyncio
import contextlib

import pytest
from clusters import FAST, Starter
from dialects import CHAT, CHAT_STREAM, DIALECTS, Dialect
from raw_client import Client, ask, eventually
from traffic import open_streams

pytestmark = pytest.mark.xdist_group("disconnect")
ENDLESS = "[[fault:stall@4]]"
AGES_MS = 3_600_000.0


def in_prefill(cluster) -> bool:
    return cluster.prefill.state()["kv"]["allocated"] > 0


def in_handoff(cluster) -> bool:
    return cluster.prefill.state()["kv"]["pinned"] > 0 and bool(cluster.decode.state()["decoding"])


def decoding(cluster) -> bool:
    return bool(cluster.decode.state()["decoding"]) and not cluster.prefill.kv_blocks()


LASTING = {in_prefill: {"prefill_lanes": 64, "prefill_ms": AGES_MS}, in_handoff: {"transfer_ms": AGES_MS}, decoding: {}}


@pytest.fixture(scope="module", params=LASTING, ids=lambda phase: phase.__name__)
def held(request, tmp_path_factory):
    """One pair in which a phase of a request lasts until the client leaves, and that phase."""
    with contextlib.closing(Starter(tmp_path_factory.mktemp("cluster"))) as start:
        yield start.cluster(timing=FAST | LASTING[request.param]), request.param


async def leave(client: Client, how: str) -> None:
    await (client.reset() if how == "reset" else client.leave())


@pytest.mark.parametrize("dialect", [CHAT, CHAT_STREAM], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("how", ["reset", "close"])
async def test_leaving_in_any_phase_frees_both_instances(held, dialect: Dialect, how: str):
    cluster, phase = held
    client = await Client.connect(cluster.port)
    await client.ask(dialect.path, dialect.body(f"Story {ENDLESS}", 30))
    await eventually(lambda: phase(cluster), f"the request is {phase.__name__}")
    await leave(client, how)
    await eventually(lambda: not any(cluster.kv_blocks()), "the KV is free")
    cluster.coordinator.wait_idle()
    assert cluster.coordinator.states() == {"p0": "ready", "d0": "ready"}  # nobody but the client is to blame


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.stream], ids=lambda dialect: dialect.name)
async def test_leaving_in_mid_stream(cluster, dialect: Dialect):
    stopped = sum(instance.state()["stopped"] for instance in cluster.of("decode"))
    for how in ("reset", "close"):
        streams = await open_streams(cluster.port, dialect, [f"Story {ENDLESS}"] * 6)
        cluster.wait_handed_over()
        for stream in streams:
            await leave(stream, how)
    await eventually(lambda: not any(cluster.kv_blocks()), "the KV is free")
    cluster.coordinator.wait_idle()
    assert sum(instance.state()["stopped"] for instance in cluster.of("decode")) == stopped + 12


async def test_leaving_between_the_answers_of_the_two(cluster):
    """Decode works already, prefill's answer is still on its way."""
    client = await Client.connect(cluster.port)
    await client.ask(CHAT_STREAM.path, CHAT_STREAM.body(f"Story [[fault:reply_delay=3600]] {ENDLESS}", 30))
    await eventually(lambda: any(instance.state()["decoding"] for instance in cluster.of("decode")), "decode works")
    await client.reset()
    await eventually(lambda: not any(cluster.kv_blocks()), "the KV is free")
    cluster.coordinator.wait_idle()


async def test_leaving_the_queue(start):
    cluster = start.cluster(each={"max_requests": 1})
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS])
    coordinator, before = cluster.coordinator, cluster.prefill.state()["inference_requests"]
    waiting = [await Client.connect(cluster.port) for _ in range(4)]
    for client in waiting:
        await client.ask(CHAT.path, CHAT.body("Hello"))
    await eventually(lambda: coordinator.loads()["requests_queued"] == 4, "they wait")
    for client, how in zip(waiting, ("reset", "close") * 2, strict=True):
        await leave(client, how)
    await eventually(lambda: coordinator.loads()["requests_queued"] == 0, "nobody waits")
    await stream.reset()
    cluster.wait_idle()
    assert cluster.prefill.state()["inference_requests"] == before
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200


async def test_slots_of_clients_that_left_are_free_again(start):
    """Whole answers, which nobody would notice until the limit is full of ghosts."""
    cluster = start.cluster(limits={"max_requests": 8})
    for _ in range(3):
        clients = [await Client.connect(cluster.port) for _ in range(8)]
        for client in clients:
            await client.ask(CHAT.path, CHAT.body(ENDLESS, 30))
        await eventually(lambda: cluster.coordinator.loads()["requests_in_flight"] == 8, "all are there")
        for client in clients:
            await client.reset()
        cluster.coordinator.wait_idle()
    replies = await asyncio.gather(*(ask(cluster.port, CHAT.path, CHAT.body("Hello")) for _ in range(8)))
    assert {reply.status for reply in replies} == {200}
    assert cluster.coordinator.metric("pd_coordinator_requests_total", outcome="client_gone") == 24
    cluster.wait_idle()
