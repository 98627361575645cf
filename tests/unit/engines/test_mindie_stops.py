"""Aborts that outlive their requests (MindIE protocol page §7)."""

import asyncio
import json
import types

import pytest
from engine_world import GUARD_S, context, instance, turns, until
from fake_instances import FakeInstance

from coordinator.engines.mindie import stops as stops_module
from coordinator.engines.mindie.stops import TRIES, Stops


@pytest.fixture
async def peers():
    fakes = [await FakeInstance().listen(), await FakeInstance().listen()]
    yield fakes
    for fake in fakes:
        await fake.aclose()


class Case:
    def __init__(self):
        self.given = context()
        self.results = []
        self.stops = Stops(self.given.client, self.given.log, on_result=self.results.append)


@pytest.fixture
async def case():
    case = Case()
    yield case
    await case.stops.aclose(0)
    await case.given.client.aclose()


@pytest.fixture
def pauses(monkeypatch):
    """Pauses between tries take no time."""
    seen = []

    async def sleep(seconds):
        seen.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(stops_module, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return seen


def both(peers, model="m"):
    return [(instance(name, fake.address), model) for name, fake in zip(("p0", "d0"), peers, strict=True)]


async def test_once_to_each(case, peers):
    case.stops.stop("77", both(peers))
    await until(lambda: len(case.results) == 2)
    await turns(20)
    assert case.results == ["sent", "sent"]
    assert [fake.stops for fake in peers] == [{"77": 1}, {"77": 1}]


async def test_what_goes_out(case, peers):
    seen = []

    async def look(call):
        seen.append(call)
        call.reply(call.body)

    peers[0].stopping = look
    case.stops.stop("77", [(instance("p0", peers[0].address), "org/a b")])
    await until(lambda: case.results)
    call = seen[0]
    assert (call.method, call.target) == ("POST", "/v2/models/org%2Fa%20b/stopInfer")
    assert json.loads(call.body) == {"id": "77"}
    assert (call.header("content-type"), call.header("accept")) == ("application/json", "*/*")


async def test_not_found_is_an_end(case, peers):
    async def unknown(call):
        call.reply(b'{"error":"RequestId is 77 not found.","error_type":"NotFoundError"}', 404)

    peers[0].stopping = unknown
    case.stops.stop("77", both(peers))
    await until(lambda: len(case.results) == 2)
    assert sorted(case.results) == ["not_found", "sent"]
    assert peers[0].stops["77"] == 1


@pytest.mark.parametrize("comes", [True, False])
async def test_it_is_said_again_to_a_decode_that_may_not_have_had_the_request_yet(case, peers, monkeypatch, comes):
    monkeypatch.setattr(stops_module, "OVERTAKEN_S", 0.01)

    async def late(call):
        found = comes and peers[1].stops["77"] == 2
        call.reply(call.body if found else b"{}", 200 if found else 404)

    peers[1].stopping = late
    case.stops.stop("77", [(instance("d0", peers[1].address), "m")])
    await until(lambda: case.results)
    assert case.results == ["sent" if comes else "not_found"]
    assert peers[1].stops["77"] == 2


async def test_closing_does_not_wait_for_what_may_come(case, peers, monkeypatch):
    monkeypatch.setattr(stops_module, "OVERTAKEN_S", 60.0)

    async def unknown(call):
        call.reply(b"{}", 404)

    peers[1].stopping = unknown
    case.stops.stop("77", [(instance("d0", peers[1].address), "m")])
    await until(lambda: peers[1].stops.get("77"))
    await case.stops.aclose(GUARD_S)
    assert case.results == ["not_found"]


async def test_it_is_said_again_to_an_instance_that_fails(case, peers, pauses):
    async def second_time(call):
        if peers[0].stops["77"] == 1:
            call.reply(b"{}", 500)
        else:
            call.reply(call.body)

    peers[0].stopping = second_time
    case.stops.stop("77", both(peers))
    await until(lambda: len(case.results) == 2)
    assert case.results == ["sent", "sent"]
    assert peers[0].stops["77"] == 2
    assert len(pauses) == 1


@pytest.mark.parametrize("way", ["status", "reset", "refused"])
async def test_it_is_given_up_in_the_end(case, peers, pauses, caplog, way):
    async def fail(call):
        if way == "status":
            call.reply(b"{}", 503)
        else:
            call.rst()

    peers[0].stopping = fail
    if way == "refused":
        await peers[0].refuse()
    case.stops.stop("77", both(peers))
    await until(lambda: len(case.results) == 2)
    assert sorted(case.results) == ["failed", "sent"]
    assert peers[1].stops["77"] == 1
    assert len(pauses) == TRIES - 1
    assert [record.getMessage() for record in caplog.records] == ["stop of request 77 at instance p0 failed"]


async def test_a_cancelled_request_does_not_lose_its_stop(case, peers):
    async def request():
        try:
            await asyncio.Event().wait()
        finally:
            case.stops.stop("77", both(peers))

    task = asyncio.create_task(request(), name="request")
    await turns()
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: len(case.results) == 2)
    assert [fake.stops["77"] for fake in peers] == [1, 1]


async def test_the_line_is_bounded(case, peers, monkeypatch):
    monkeypatch.setattr(stops_module, "MAX_PENDING", 3)
    gate = asyncio.Event()

    async def slow(call):
        await gate.wait()
        call.reply(call.body)

    for fake in peers:
        fake.stopping = slow
    case.stops.stop("1", both(peers))
    case.stops.stop("2", both(peers))
    assert case.results == ["dropped"]
    gate.set()
    await until(lambda: len(case.results) == 4 and not case.stops._tasks)
    case.stops.stop("3", both(peers))
    await until(lambda: len(case.results) == 6)
    assert sorted(case.results) == ["dropped"] + ["sent"] * 5


async def test_closing_waits_for_those_under_way(case, peers):
    gate = asyncio.Event()

    async def slow(call):
        await gate.wait()
        call.reply(call.body)

    peers[0].stopping = slow
    case.stops.stop("77", both(peers))
    closing = asyncio.create_task(case.stops.aclose(5.0), name="closing")
    await until(lambda: peers[0].stops)
    assert not closing.done()
    gate.set()
    await closing
    assert case.results == ["sent", "sent"]


async def test_closing_does_not_wait_for_ever(case, peers):
    async def mute(call):
        await call.left()

    peers[0].stopping = mute
    case.stops.stop("77", both(peers))
    await until(lambda: peers[0].stops and case.results)
    await case.stops.aclose(0.01)
    assert case.results == ["sent"]
    await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name().startswith("stop ")])


async def test_a_cancelled_close_passes_the_cancellation_on(case, peers):
    """Also where it has come to the point of giving up."""

    async def mute(call):
        await call.left()

    peers[0].stopping = mute
    case.stops.stop("77", both(peers))
    await until(lambda: peers[0].stops and case.results)

    async def close():
        await case.stops.aclose(0.0)
        return "closed"

    for steps in range(6):
        case.stops.stop("77", both(peers))
        task = asyncio.create_task(close(), name="closing")
        await turns(steps)
        if task.done():
            continue
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), f"the cancellation after {steps} turns was swallowed"
