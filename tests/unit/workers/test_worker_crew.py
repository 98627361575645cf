"""Workers that end, hang or do not start, as the supervisor handles them; the processes are made up."""

import asyncio
import logging
import mmap

import pytest
from engine_world import turns, until

from coordinator.scheduler import LoadBoard, size_bytes
from coordinator.workers import crew as crews
from coordinator.workers.crew import SILENT_LOOKS, Crew
from coordinator.workers.messages import AskMetrics, Drain, Failed, Serving, Start


class Fake:
    """Stands for a WorkerProcess."""

    made: "list[Fake]"
    refusals: int
    answer = Serving(1)

    def __init__(self, number, take):
        self.number, self.take = number, take
        self.serving, self.snapshot = False, None
        self.pid = 1000 + len(Fake.made)
        self.said = []
        self.end = asyncio.get_running_loop().create_future()
        self.mute = self.stubborn = False
        self.killed = 0
        Fake.made.append(self)

    async def start(self, start, board_fd):
        if Fake.refusals:
            Fake.refusals -= 1
            Fake.made.remove(self)
            raise OSError(11, "Resource temporarily unavailable")
        self.start_message = start()
        self.serving = True

    async def started(self):
        return self.answer

    async def ended(self):
        return await asyncio.shield(self.end)

    def say(self, message):
        self.said.append(message)

    def drain(self, within_s):
        self.say(Drain(within_s))
        if not self.stubborn:
            self.die(0)

    def kill(self):
        self.killed += 1
        self.die(-9)

    def die(self, status):
        if not self.end.done():
            self.serving = False
            self.end.set_result(status)

    async def refresh_snapshot(self):
        if self.mute:
            await asyncio.Event().wait()
        self.snapshot = b"fresh %d" % self.number


class World:
    """A crew of such workers."""

    def __init__(self):
        Fake.made, Fake.refusals = [], 0
        self.memory = mmap.mmap(-1, size_bytes(3, 4))
        self.board = LoadBoard(self.memory, 3, 4)
        self.greeted, self.heard, self.buried = [], [], []
        self.crew = Crew(
            -1,
            self.board,
            lambda number: Start(number, 3, 4, "{}", 10, []),
            self.greeted.append,
            heard=self.heard.append,
            bury=self.buried.append,
        )

    def row(self, number):
        return LoadBoard(self.memory, 3, 4, number)


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(crews, "WorkerProcess", Fake)
    monkeypatch.setattr(crews, "HURRY_S", 0.01)
    monkeypatch.setattr(crews, "FIRST_PAUSE_S", 0.001)
    made = World()
    yield made
    await made.crew.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(("worker", "end of", "metrics"))]


async def test_all_are_started_and_greeted(world):
    await world.crew.start(3)
    assert [fake.start_message.worker for fake in Fake.made] == [0, 1, 2]
    assert world.greeted == [0, 1, 2]
    assert world.crew.pids == {0: 1000, 1: 1001, 2: 1002}
    assert world.crew.serving


async def test_one_that_cannot_serve_stops_the_start(world, monkeypatch):
    monkeypatch.setattr(Fake, "answer", Failed("Address already in use"))
    with pytest.raises(OSError, match="Address already in use"):
        await world.crew.start(2)
    await world.crew.aclose()
    assert all(fake.end.done() for fake in Fake.made)


async def test_messages_for_one_and_for_all(world):
    await world.crew.start(2)
    world.crew.tell(1, "one")
    world.crew.tell(None, "all")
    world.crew.tell(7, "nobody")
    assert [fake.said for fake in Fake.made] == [["all"], ["one", "all"]]


async def test_a_worker_that_ends_is_replaced(world, caplog):
    caplog.set_level(logging.INFO)
    await world.crew.start(2)
    row = world.row(1)
    row.write(2, (3, 0, 0, 0))
    row.write_live(3)
    Fake.made[1].snapshot = b"last"
    Fake.made[1].die(-9)
    await until(lambda: len(Fake.made) == 3)
    await turns()
    assert world.greeted == [0, 1, 1]
    assert world.buried == [b"last"]
    assert world.board.total(2).requests == 0
    assert world.crew.pids == {0: 1000, 1: 1002}
    assert [r.getMessage() for r in caplog.records] == [
        "worker 1 was killed by signal 9 with 3 live requests; it is started again"
    ]
    world.crew.tell(1, "hello")
    assert Fake.made[2].said == ["hello"]
    assert Fake.made[1].said == []


async def test_one_that_ended_as_it_should_is_no_warning(world, caplog):
    caplog.set_level(logging.INFO)
    await world.crew.start(1)
    Fake.made[0].die(0)
    await until(lambda: len(Fake.made) == 2)
    assert [record.levelname for record in caplog.records] == ["INFO"]


async def test_short_lives_come_ever_more_slowly(world, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def slept(delay_s):
        pauses.append(delay_s)
        await sleep(0)

    await world.crew.start(1)
    monkeypatch.setattr(crews.asyncio, "sleep", slept)
    for count in range(1, 16):
        Fake.made[-1].die(1)
        await until_made(count + 1, sleep)
    monkeypatch.undo()
    assert pauses[:5] == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert max(pauses) <= crews.LONGEST_PAUSE_S


async def until_made(count, sleep):
    for _ in range(1000):
        if len(Fake.made) >= count:
            return
        await sleep(0)
    raise AssertionError("it was not started again")


async def test_a_long_life_is_followed_by_a_start_at_once(world, monkeypatch):
    monkeypatch.setattr(crews, "SHORT_LIFE_S", 0.0)
    monkeypatch.setattr(crews, "FIRST_PAUSE_S", 60.0)
    await world.crew.start(1)
    Fake.made[0].die(-11)
    await until(lambda: len(Fake.made) == 2)


async def test_what_cannot_be_started_is_tried_again(world, caplog):
    await world.crew.start(2)
    Fake.refusals = 3
    Fake.made[0].die(-9)
    await until(lambda: len(Fake.made) == 3)
    assert world.crew.pids[0] == 1002
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told == ["worker 0 cannot be started: Resource temporarily unavailable"] * 3


class TestLook:
    async def test_one_that_does_not_move_is_killed_once(self, world):
        await world.crew.start(2)
        row = world.row(1)
        for _ in range(SILENT_LOOKS + 1):
            row.beat()
            world.crew.look()
        assert [fake.killed for fake in Fake.made[:2]] == [1, 0]

    async def test_one_that_has_not_begun_is_waited_for(self, world):
        await world.crew.start(1)
        Fake.made[0].serving = False
        for _ in range(2 * SILENT_LOOKS):
            world.crew.look()
        assert Fake.made[0].killed == 0

    async def test_metrics_are_asked_for_now_and_then(self, world):
        await world.crew.start(1)
        for _ in range(3 * crews.LOOKS_PER_SNAPSHOT):
            world.crew.look()
        assert Fake.made[0].said == [AskMetrics(0)] * 3


async def test_the_oldest_picture_that_somebody_goes_by(world):
    assert world.crew.acknowledged == float("inf")
    await world.crew.start(2)
    assert world.crew.acknowledged == 0
    world.row(0).write_view(5)
    world.row(1).write_view(3)
    assert world.crew.acknowledged == 3
    Fake.made[1].die(-9)
    await until(lambda: world.buried)
    assert world.crew.acknowledged in (5, 0), "the dead one goes by nothing, its successor by nothing yet"


class TestSnapshots:
    async def test_of_all(self, world):
        await world.crew.start(2)
        assert list(await world.crew.snapshots()) == [b"fresh 0", b"fresh 1"]

    async def test_one_that_does_not_answer_counts_as_it_did(self, world, monkeypatch):
        monkeypatch.setattr(crews, "SNAPSHOT_S", 0.01)
        await world.crew.start(3)
        Fake.made[1].mute = Fake.made[2].mute = True
        Fake.made[1].snapshot = b"old"
        assert list(await world.crew.snapshots()) == [b"fresh 0", b"old"]

    async def test_without_workers(self, world):
        assert list(await world.crew.snapshots()) == []


class TestEnd:
    async def test_a_drain_is_told_to_all_and_waited_for(self, world, caplog):
        await world.crew.start(2)
        await world.crew.drain(5.0)
        assert [fake.said for fake in Fake.made] == [[Drain(5.0)]] * 2
        assert not any(fake.killed for fake in Fake.made)
        assert len(Fake.made) == 2, "nobody is started again"
        assert not caplog.records

    async def test_one_that_stays_is_killed_and_told_of(self, world, monkeypatch, caplog):
        monkeypatch.setattr(crews, "LAST_WORDS_S", 0.01)
        await world.crew.start(2)
        Fake.made[1].stubborn = True
        await world.crew.drain(0.0)
        assert [record.getMessage() for record in caplog.records] == ["worker 1 does not come to its end and is killed"]
        await world.crew.aclose()
        assert Fake.made[1].killed
        assert Fake.made[1].end.result() == -9

    async def test_an_end_at_once(self, world):
        await world.crew.start(2)
        draining = asyncio.create_task(world.crew.drain(float("inf")), name="drain")
        for fake in Fake.made:
            fake.stubborn = True
        await turns()
        draining.cancel()
        await asyncio.wait([draining])
        await world.crew.aclose()
        assert [fake.said for fake in Fake.made] == [[Drain(float("inf")), Drain(0.0)]] * 2
        assert all(fake.killed for fake in Fake.made)

    async def test_nobody_is_started_again_meanwhile(self, world, monkeypatch):
        await world.crew.start(2)
        monkeypatch.setattr(crews, "FIRST_PAUSE_S", 0.01)
        Fake.made[1].die(1)
        await until(lambda: world.buried)
        await world.crew.drain(1.0)
        await asyncio.sleep(0.02)
        assert len(Fake.made) == 2

    async def test_twice(self, world):
        await world.crew.start(1)
        await world.crew.aclose()
        await world.crew.aclose()
