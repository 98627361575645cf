"""A worker in the test's own process, between a made-up supervisor and fake instances."""

import asyncio
import json
import mmap

import aiohttp
import msgspec
import pytest
from engine_world import instance, turns, until
from fake_instances import FakeInstance

from coordinator import config
from coordinator.config import Settings
from coordinator.scheduler import LoadBoard, size_bytes
from coordinator.workers.messages import (
    AskMetrics,
    Charge,
    Credit,
    Drain,
    Failed,
    Requests,
    Serving,
    Snapshot,
    Start,
    Told,
    View,
)  # fmt: skip
from coordinator.workers.port import ReservedPort
from coordinator.workers.running import Inbox
from coordinator.workers.worker import Worker

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


def settings(**sections):
    given = {"server": {"port": 0, "workers": 2}, "cluster": {"engine": "hybrid", "model": "m"}} | sections
    return config.parse(json.dumps(given), "test")


def test_settings_travel_as_they_are():
    given = settings(
        limits={"max_requests": 7}, timeouts={"drain_s": 0, "request_s": 1.5}, scheduling={"policy": "round_robin"}
    )
    assert Settings.model_validate_json(given.model_dump_json()) == given
    assert Settings.model_validate_json(given.model_dump_json()).timeouts.effective == given.timeouts.effective


class Lines:
    """Takes the place of the access log."""

    def __init__(self):
        self.records = []

    def finished(self, record):
        self.records.append(record)


class World:
    """Worker 0 of two, on a port of its own; what it says is in `said`."""

    def __init__(self, **sections):
        self.reserved = ReservedPort("127.0.0.1", 0)
        self.memory = mmap.mmap(-1, size_bytes(2, 8))
        self.board = LoadBoard(self.memory, 2, 8)
        self.said, self.flushed = [], []
        self.lines = Lines()
        self.given = settings(**{"server": {"port": self.reserved.port, "workers": 2}, **sections})
        start = Start(0, 2, 8, self.given.model_dump_json(), 100, [])
        self.worker = Worker(
            start, self.memory, self.said.append, self.lines, lambda: self.flushed.append(len(self.said))
        )
        self.fake = FakeInstance()
        self.running = None

    async def __aenter__(self):
        await self.fake.listen()
        self.h0 = instance("h0", self.fake.address, engine="hybrid")
        self.running = asyncio.create_task(self.worker.run(), name="worker")
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        self.worker.drain(0.0)
        self.worker.drain(0.0)
        await asyncio.wait([self.running], timeout=10)
        await self.session.close()
        await self.fake.aclose()
        self.reserved.close()

    def view(self, *members, number=1):
        slots = [(member, slot) for slot, member in enumerate(members)]
        positions = list(range(len(members)))
        self.worker.take(View(number, slots, positions, [], ["m"], any_name=False, pair=bool(members), why="y"))

    def of(self, kind):
        return [message for message in self.said if isinstance(message, kind)]

    async def serves(self, *members):
        self.view(*(members or (self.h0,)))
        await until(lambda: self.of(Serving))

    async def call(self, body=BODY):
        url = f"http://127.0.0.1:{self.reserved.port}{CHAT}"
        async with self.session.post(url, data=body, timeout=aiohttp.ClientTimeout(10)) as reply:
            return reply.status, await reply.read()


async def test_it_listens_once_it_knows_the_cluster():
    async with World() as world:
        await turns(20)
        assert world.said == []
        world.worker.take(Told("nobody", b"x"))
        await world.serves()
        assert world.of(Serving) == [Serving(world.reserved.port)]
        assert await world.call() == (200, b"{}")
        assert [record.status for record in world.lines.records] == [200]
        assert world.board.view_of(0) == 1


async def test_it_tells_of_requests_metrics_and_life():
    async with World() as world:
        await world.serves()
        for _ in range(3):
            assert (await world.call())[0] == 200
        await until(lambda: sum(message.count for message in world.of(Requests)) == 3)
        assert sum(message.prompt_bytes for message in world.of(Requests)) > 0
        world.worker.take(AskMetrics(5))
        (snapshot,) = world.of(Snapshot)
        assert snapshot.number == 5
        values = msgspec.msgpack.decode(snapshot.data, type=dict[str, dict[tuple[str, ...], list[float]]])
        assert values["pd_coordinator_requests_total"]["openai", "ok"] == [3]
        assert world.board.beat_of(0) > 0


async def test_its_load_is_on_the_board_while_it_lasts():
    async with World() as world:
        gate = asyncio.Event()

        async def slow(call):
            await gate.wait()
            call.reply()

        world.fake.infer = slow
        await world.serves()
        asking = asyncio.create_task(world.call(), name="asking")
        await until(lambda: world.fake.calls)
        assert world.board.live() == 1
        assert world.board.total(0).requests == 1
        gate.set()
        await asking
        await until(lambda: world.board.live() == 0)
        assert world.board.total(0) == (0, 0, 0, 0)


async def test_requests_elsewhere_count_for_the_limit():
    async with World(limits={"max_requests": 3}) as world:
        await world.serves()
        other = LoadBoard(world.memory, 2, 8, 1)
        other.write_live(2)
        assert (await world.call())[0] == 200
        other.write_live(3)
        assert (await world.call())[0] == 429


async def test_faults_and_their_end_are_passed_on():
    async with World(retry={"max_attempts": 1}) as world:
        await world.serves()

        async def broken(call):
            call.reply(status=500)

        world.fake.infer = broken
        assert (await world.call())[0] == 502
        assert [message.instance for message in world.of(Charge)] == ["h0"]
        assert world.of(Credit) == []
        assert len(world.flushed) == 1, "the log does not lag behind the supervisor's"
        world.fake.infer = FakeInstance.infer.__get__(world.fake)
        for _ in range(2):
            assert (await world.call())[0] == 200
        assert [message.instance for message in world.of(Credit)] == ["h0"]


async def test_engines_are_told_who_comes_and_goes(monkeypatch):
    async with World() as world:
        engine = world.worker._engines["hybrid"]
        came, went = [], []
        monkeypatch.setattr(engine, "attach", lambda found, watcher: (came.append(found.id), watcher.linked()))

        async def detach(found):
            went.append(found.id)

        monkeypatch.setattr(engine, "detach", detach)
        h1 = instance("h1", engine="hybrid")
        world.view(world.h0)
        world.view(world.h0, h1, instance("h2", engine="nobody speaks this"), number=2)
        assert came == ["h0", "h1"]
        world.worker._metrics.engine_failures.labels("h1", "decode", "timeout").inc()
        world.view(world.h0, number=3)
        await until(lambda: went == ["h1"])
        assert world.worker._metrics.engine_failures.snapshot() == {}


async def test_kv_that_is_still_to_be_released_is_told(monkeypatch):
    async with World() as world:
        engine = world.worker._engines["vllm"]
        monkeypatch.setattr(engine, "pinned", lambda: {"p0": 3, "gone": 1})
        world.view(instance("p0", engine="vllm"))
        world.worker.take(AskMetrics(1))
        values = msgspec.msgpack.decode(world.of(Snapshot)[0].data, type=dict[str, dict[tuple[str, ...], list[float]]])
        assert values["pd_coordinator_kv_pinned_requests"] == {("p0",): [3]}


async def test_an_engine_that_fails_there_hurts_nobody(monkeypatch, caplog):
    async with World() as world:
        engine = world.worker._engines["hybrid"]

        def fail(*_):
            raise ValueError("odd")

        monkeypatch.setattr(engine, "attach", fail)
        monkeypatch.setattr(engine, "detach", fail)
        await world.serves()
        assert (await world.call())[0] == 200
        world.view(number=2)
        await until(lambda: len(caplog.records) == 2)
        assert {record.getMessage() for record in caplog.records} == {
            "instance h0 could not be attached", "instance h0 could not be detached",
        }  # fmt: skip


class TestEnd:
    async def test_what_runs_may_end(self):
        async with World() as world:
            gate = asyncio.Event()

            async def slow(call):
                await gate.wait()
                call.reply()

            world.fake.infer = slow
            await world.serves()
            asking = asyncio.create_task(world.call(), name="asking")
            await until(lambda: world.fake.calls)
            world.worker.take(Drain(30.0))
            await turns(20)
            assert not world.running.done()
            gate.set()
            assert (await asking)[0] == 200
            assert await world.running == 0
            assert sum(message.count for message in world.of(Requests)) == 1, "nothing is left untold"
            assert isinstance(world.said[-1], Snapshot)

    async def test_a_second_word_ends_it_at_once(self):
        async with World() as world:

            async def mute(call):
                await call.left()

            world.fake.infer = mute
            await world.serves()
            asking = asyncio.create_task(world.call(), name="asking")
            await until(lambda: world.fake.calls)
            world.worker.take(Drain(float("inf")))
            await turns(20)
            world.worker.take(Drain(0.0))
            assert (await asking)[0] == 503
            async with asyncio.timeout(5):
                assert await world.running == 0

    async def test_alone_it_leaves_the_port_to_the_others(self):
        async with World() as world:
            gate = asyncio.Event()

            async def slow(call):
                await gate.wait()
                call.reply()

            world.fake.infer = slow
            await world.serves()
            asking = asyncio.create_task(world.call(), name="asking")
            await until(lambda: world.fake.calls)
            world.worker.leave_alone(30.0)
            with pytest.raises(aiohttp.ClientConnectorError):
                await world.call()
            gate.set()
            assert (await asking)[0] == 200
            assert await world.running == 0

    async def test_before_it_has_begun(self):
        async with World() as world:
            world.worker.take(Drain(5.0))
            assert await world.running == 0
            assert world.said == []

    async def test_a_port_that_cannot_be_had(self):
        async with World(server={"port": 0, "host": "203.0.113.7", "workers": 2}) as world:
            world.view(world.h0)
            assert await world.running == 1
            assert len(world.of(Failed)) == 1


class Heard:
    """Stands for a worker."""

    def __init__(self):
        self.taken = []
        self.left = []
        self.take = self.taken.append
        self.leave_alone = self.left.append


START = Start(0, 1, 1, "{}", 1, [])


class TestInbox:
    async def test_nothing_is_lost_before_the_worker_is_there(self):
        inbox, heard = Inbox(), Heard()
        for message in (START, Told("a", b"1"), Told("a", b"2")):
            inbox.take(message)
        assert await inbox.start == START
        inbox.hand_to(heard)
        inbox.take(Drain(1.0))
        assert heard.taken == [Told("a", b"1"), Told("a", b"2"), Drain(1.0)]
        assert heard.left == []

    async def test_a_supervisor_that_is_gone_before_it_said_a_word(self):
        inbox = Inbox()
        inbox.ended()
        assert await inbox.start is None

    @pytest.mark.parametrize("early", [True, False])
    async def test_a_supervisor_that_is_gone_later(self, early):
        inbox, heard = Inbox(), Heard()
        inbox.take(START)
        if early:
            inbox.ended()
        inbox.hand_to(heard)
        if not early:
            inbox.ended()
        assert heard.left == [0.0]
