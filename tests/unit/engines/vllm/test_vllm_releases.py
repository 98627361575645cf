"""KV that no decode came for."""

import asyncio
import logging
from dataclasses import replace

import pytest
from vllm_pair import Placement, event, reply, sse

from coordinator.core.errors import EngineFailed, EngineRefused
from coordinator.engines.vllm.releases import KvReleases, Orphan
from coordinator.transport.errors import TransportError

pytestmark = pytest.mark.uncompiled  # a client of its own

REFUSED = TransportError("connect_refused", connecting=True, unsent=True)
RESET = TransportError("reset")
GOOD = (200, b'data: {"choices":[]}\n\n')
BAD = (200, b'data: {"error":{"message":"no KV","code":500}}\n\ndata: [DONE]\n\n')
HALF = (200, b'data: {"cho', RESET)
HANGS = ()
OPEN = (200,)


class Client:
    """Answers one call after the other by script: a failure to connect, or (status, body, loss).

    Without a loss the reply ends; a script without a body leaves it open, an empty one never says a thing.
    `expect` is told each step before its call.
    """

    def __init__(self, *script, expect=lambda step: None):
        self.script = list(script)
        self.calls = []
        self.closed = 0
        self.expect = expect
        self.look_ahead()

    def look_ahead(self):
        if self.script:
            self.expect(self.script[0])

    async def open_stream(self, address, method, target, headers, body, *, sink):
        self.calls.append((address.port, target, headers, body))
        step = self.script.pop(0)
        self.look_ahead()
        if isinstance(step, TransportError):
            raise step
        asyncio.get_running_loop().call_soon(self.answer, step, sink)
        return self

    def answer(self, step, sink):
        for at, said in enumerate(step):
            if isinstance(said, TransportError):
                sink.lost(said)
            elif at:
                sink.data(said, 1.0)
            else:
                sink.head(said, ())
        if len(step) == 2:
            sink.end(1.0)

    def close(self):
        self.closed += 1


@pytest.fixture
def hasty(monkeypatch):
    """Has a call that hangs given up soon; any other may take its time on a slow machine."""
    monkeypatch.setattr("coordinator.engines.vllm.releases.LINGER_S", 0.02)

    def expect(step):
        monkeypatch.setattr("coordinator.engines.vllm.releases.TRY_S", 0.02 if step == HANGS else 60.0)

    return expect


def orphan(world, *decodes, **more):
    return Orphan(world.prefill, decodes, "77", "/v1/completions", ((b"x-request-id", b"77"),), b"{}", **more)


@pytest.mark.parametrize(
    ("script", "results", "asked"),
    [
        ((GOOD,), ["sent"], 1),
        ((OPEN,), ["sent"], 1),  # taken on, and left
        ((REFUSED, GOOD), ["sent"], 2),
        (((503, b""), HALF, GOOD), ["sent"], 3),
        (((500, b""), (429, b""), GOOD), ["sent"], 3),
        ((HANGS, GOOD), ["sent"], 2),
        ((HANGS, HANGS, HANGS), ["failed"], 3),
        (((400, b""),), ["failed"], 1),
        ((BAD,), ["failed"], 1),
        ((REFUSED, BAD), ["failed"], 2),
        ((REFUSED, (500, b""), HALF), ["failed"], 3),
    ],
)
async def test_tries(world, script, results, asked, caplog, hasty):
    caplog.set_level(logging.WARNING, "test.vllm")
    client, found = Client(*script, expect=hasty), []
    releases = KvReleases(client, world.log, on_result=found.append, pauses_s=(0.0, 0.0, 0.0))
    releases.release(orphan(world, world.decode, world.other))
    assert releases.pinned() == {"p0": 1}
    await world.until(lambda: not releases.pinned())
    assert found == results
    assert len(client.calls) == asked
    assert client.closed == asked - script.count(REFUSED)
    ports = [port for port, *_ in client.calls]
    assert ports == [world.d.port, world.d1.port, world.d.port][:asked]
    assert client.calls[0][1:] == ("/v1/completions", ((b"x-request-id", b"77"),), b"{}")
    assert len(caplog.records) == results.count("failed")


@pytest.mark.parametrize(("said", "results"), [(BAD, ["not_found"]), ((400, b""), ["not_found"]), (HANGS, ["failed"])])
async def test_a_refusal_of_what_may_be_gone_means_that_it_is(world, said, results, caplog, hasty):
    client, found = Client(said, expect=hasty), []
    releases = KvReleases(client, world.log, on_result=found.append, pauses_s=(0.0,))
    releases.release(orphan(world, world.decode, wait_s=0.001, doubtful=True))
    assert not client.calls
    await world.until(lambda: not releases.pinned())
    assert found == results
    assert len(caplog.records) == results.count("failed")


async def test_time_runs_out(world):
    """However many tries there are, none begins after the engine's own lease has ended."""
    now_s = [0.0]

    def clock():
        now_s[0] += 20.0
        return now_s[0]

    client, found = Client(*[REFUSED] * 6), []
    releases = KvReleases(client, world.log, on_result=found.append, pauses_s=(0.0,) * 6, clock=clock)
    releases.release(orphan(world, world.decode))
    await world.until(lambda: not releases.pinned())
    assert found == ["failed"]
    assert len(client.calls) == 1


async def test_nobody_to_ask(world):
    found = []
    releases = KvReleases(Client(), world.log, on_result=found.append)
    releases.release(orphan(world))
    await world.until(lambda: not releases.pinned())
    assert found == ["failed"]


async def test_what_waits_is_bounded_and_ends_with_the_engine(world, monkeypatch):
    monkeypatch.setattr("coordinator.engines.vllm.releases.MAX_PENDING", 2)
    found = []
    releases = KvReleases(Client(HANGS, HANGS), world.log, on_result=found.append)
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
    assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (1, 1, True)
    assert body["cache_salt"] == headers["x-request-id"]
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


@pytest.mark.parametrize("told_by", ["probe", "serve"])
async def test_a_reload_that_moves_a_decode_to_another_group_counts(world, told_by):
    """The engine is not told of what changes about an attached instance; it learns it as it comes to know it."""
    world.engine.attach(world.other, world.watcher)
    assert world.other in world.engine._fetchers(world.prefill, world.decode)
    moved = replace(world.other, group="g2")
    if told_by == "probe":
        await world.engine.probe(moved)
    else:
        await world.serve(world.request(), placement=Placement(replace(world.prefill, group="g2"), moved))
    assert world.engine._fetchers(world.prefill, world.decode) == [world.decode]
    assert world.engine._fetchers(replace(world.prefill, group="g2"), world.decode) == [moved]
    await world.engine.detach(moved)
    assert world.engine._fetchers(replace(world.prefill, group="g2"), world.decode) == []


async def test_a_namesake_at_another_address_is_not_taken_for_the_attached_one(world):
    namesake = replace(world.other, id="d0")
    await world.engine.probe(namesake)
    assert world.engine._fetchers(world.prefill, world.decode) == [world.decode]
    await world.engine.detach(namesake)
    assert world.engine._fetchers(world.prefill, world.decode) == [world.decode]


async def test_an_ailing_decode_is_asked_last(world):
    world.engine.attach(world.other, world.watcher)
    third = world.decode
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_record_that_nobody_can_use_is_tried_once(world, stream):
    """Decode tells by an error behind its head that it has looked at the record."""
    world.engine.attach(world.other, world.watcher)
    seen = []

    async def fail(headers, body, writer):
        seen.append(body)
        if not body.get("stream"):
            await reply(writer, {"error": {"message": "Internal server error"}}, 500)
            return
        error = sse({"error": {"message": "Internal server error", "code": 500}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(error))
        writer.write(error)

    world.d.answer = world.d1.answer = fail
    with pytest.raises(EngineFailed):
        await world.serve(world.request(stream=stream))
    await world.settled()
    assert len(seen) == 2
    assert world.count("aborts", "not_found") == 1
    assert world.count("handoffs_abandoned") == 0


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
