"""KV that no decode came for."""

import asyncio
import logging

import pytest
from vllm_pair import event, reply

from coordinator.core.errors import EngineFailed, EngineRefused
from coordinator.engines.vllm.releases import KvReleases, Orphan
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply

REFUSED = TransportError("connect_refused", connecting=True, unsent=True)
RESET = TransportError("reset")
TIMEOUT = TransportError("timeout")
NO_TIME = TransportError("timeout", unsent=True)


class Client:
    """Answers one call after the other by script; a None hangs."""

    def __init__(self, *script):
        self.script = list(script)
        self.calls = []

    async def fetch(self, address, method, target, headers, body, *, deadline_s):
        self.calls.append((address.port, target, headers, body))
        step = self.script.pop(0)
        if step is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(step, TransportError):
            raise step
        return Reply(step, (), b"")


def orphan(world, *decodes):
    return Orphan(world.prefill, decodes, "77", "/v1/completions", ((b"x-request-id", b"77"),), b"{}")


@pytest.mark.parametrize(
    ("script", "results", "asked"),
    [
        ((200,), ["sent"], 1),
        ((REFUSED, 200), ["sent"], 2),
        ((503, RESET, 200), ["sent"], 3),
        ((TIMEOUT,), ["sent"], 1),
        ((NO_TIME, 200), ["sent"], 2),
        ((400,), ["failed"], 1),
        ((REFUSED, 500, RESET), ["failed"], 3),
    ],
)
async def test_tries(world, script, results, asked, caplog):
    caplog.set_level(logging.WARNING, "test.vllm")
    client, found = Client(*script), []
    releases = KvReleases(client, world.log, on_result=found.append, pauses_s=(0.0, 0.0, 0.0))
    releases.release(orphan(world, world.decode, world.other))
    assert releases.pinned() == {"p0": 1}
    await world.until(lambda: not releases.pinned())
    assert found == results
    assert len(client.calls) == asked
    ports = [port for port, *_ in client.calls]
    assert ports == [world.d.port, world.d1.port, world.d.port][:asked]
    assert client.calls[0][1:] == ("/v1/completions", ((b"x-request-id", b"77"),), b"{}")
    assert len(caplog.records) == results.count("failed")


async def test_nobody_to_ask(world):
    found = []
    releases = KvReleases(Client(), world.log, on_result=found.append)
    releases.release(orphan(world))
    await world.until(lambda: not releases.pinned())
    assert found == ["failed"]


async def test_what_waits_is_bounded_and_ends_with_the_engine(world, monkeypatch):
    monkeypatch.setattr("coordinator.engines.vllm.releases.MAX_PENDING", 2)
    found = []
    releases = KvReleases(Client(None, None), world.log, on_result=found.append)
    for _ in range(3):
        releases.release(orphan(world, world.decode))
    assert found == ["dropped"]
    assert releases.pinned() == {"p0": 2}
    await releases.aclose(0.01)
    assert found == ["dropped", "failed", "failed"]
    assert not releases.pinned()


# --- when the engine asks for one


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_that_cannot_be_reached_leaves_it_to_another(world, stream):
    world.engine.attach(world.other, world.watcher)
    world.d.close()
    with pytest.raises(EngineFailed, match="connect refused"):
        await world.serve(world.request(stream=stream, max_tokens=9, min_tokens=3))
    await world.settled()
    assert not world.pinned
    [(headers, body)] = world.d1.seen
    assert headers["x-request-id"] == world.p.seen[0][0]["x-request-id"]
    assert (body["max_tokens"], body["min_tokens"], body.get("stream", False)) == (1, 1, False)
    assert body["kv_transfer_params"]["s"] == 2**62
    assert world.count("aborts", "sent") == 1
    assert world.count("handoffs_abandoned") == 0


async def test_without_another_it_is_given_up_and_told(world):
    world.d.close()
    with pytest.raises(EngineFailed):
        await world.serve(world.request())
    await world.settled()
    assert world.count("aborts", "failed") == 1
    assert world.count("handoffs_abandoned") == 1


async def test_a_decode_of_another_group_is_not_asked(world):
    world.group = "g2"
    world.engine.attach(world.d1.instance(), world.watcher)
    world.d.close()
    with pytest.raises(EngineFailed):
        await world.serve(world.request())
    await world.settled()
    assert not world.d1.seen


async def test_an_ailing_decode_is_asked_last(world):
    world.engine.attach(world.other, world.watcher)
    third = world.d.instance()
    world.d1.health = 503
    with pytest.raises(EngineFailed):
        await world.engine.probe(world.other)
    assert world.engine._fetchers(world.prefill, world.decode) == [third, world.other]
    world.d1.health = 200
    await world.engine.probe(world.other)
    world.d.health = 503
    with pytest.raises(EngineFailed):
        await world.engine.probe(world.decode)
    assert world.engine._fetchers(world.prefill, world.decode) == [world.other, third]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "error"), [(422, EngineRefused), (503, EngineFailed)])
async def test_a_decode_that_refuses_has_not_read_it(world, stream, status, error):
    world.engine.attach(world.other, world.watcher)
    world.d.status = status
    with pytest.raises(error):
        await world.serve(world.request(stream=stream))
    await world.settled()
    assert not world.pinned
    assert len(world.d1.seen) == 1


async def test_after_the_first_token_there_is_nothing_to_release(world):
    world.d.events = [event({"content": "A"})]
    with pytest.raises(EngineFailed, match="ended early"):
        await world.serve(world.request(stream=True))
    assert not world.engine.pinned()


async def test_a_failure_of_prefill_has_nothing_to_release(world):
    async def failing(headers, body, writer):
        await reply(writer, {}, 500)

    world.p.answer = failing
    with pytest.raises(EngineFailed):
        await world.serve(world.request())
    assert not world.engine.pinned()
