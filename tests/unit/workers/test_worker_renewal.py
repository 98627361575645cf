"""Another configuration in all processes or in none: both halves, and a whole worker."""

import asyncio
import json

import pytest
from engine_world import turns, until
from test_worker_serving import BODY, World

from coordinator import config
from coordinator.config import ConfigError
from coordinator.workers import renewing
from coordinator.workers.messages import Commit, Prepare, Prepared
from coordinator.workers.renewing import CrewRenewal, WorkerRenewal

SETTINGS = config.parse(json.dumps({"cluster": {"engine": "hybrid"}, "limits": {"max_requests": 7}}), "f")


class Crew:
    """Keeps what each worker is told."""

    def __init__(self, *numbers):
        self.pids = {number: 1000 + number for number in numbers}
        self.told = {number: [] for number in numbers}

    def add(self, number):
        self.pids[number] = 2000 + number
        self.told[number] = []

    def tell(self, number, message):
        for each in self.pids if number is None else [number]:
            self.told[each].append(message)


def kinds(messages):
    return [(type(message).__name__, message.number) for message in messages]


async def begun(crew):
    renewal = CrewRenewal(crew)
    asking = asyncio.create_task(renewal.prepare(SETTINGS), name="prepare")
    await turns()
    return renewal, asking


class TestSupervisor:
    async def test_all_build_it_before_any_goes_by_it(self):
        crew = Crew(0, 1)
        renewal, asking = await begun(crew)
        renewal.heard(Prepared(0, 1, ""))
        await turns()
        assert not asking.done()
        renewal.heard(Prepared(1, 1, ""))
        await asking
        assert [kinds(told) for told in crew.told.values()] == [[("Prepare", 1)]] * 2
        renewal.commit()
        assert [kinds(told) for told in crew.told.values()] == [[("Prepare", 1), ("Commit", 1)]] * 2

    async def test_one_that_cannot_is_the_reason(self):
        renewal, asking = await begun(Crew(0, 1))
        renewal.heard(Prepared(0, 1, ""))
        renewal.heard(Prepared(1, 1, "no such tokenizer"))
        with pytest.raises(ConfigError, match="worker 1 cannot take it: no such tokenizer"):
            await asking

    async def test_one_that_takes_too_long(self, monkeypatch):
        monkeypatch.setattr(renewing, "ANSWERS_S", 0.01)
        crew = Crew(0, 1)
        renewal = CrewRenewal(crew)
        crew.tell = lambda _, message: renewal.heard(Prepared(0, message.number, ""))  # before the time begins
        with pytest.raises(ConfigError, match="worker 1 cannot take it: it takes too long"):
            await renewal.prepare(SETTINGS)

    async def test_forgotten_everywhere(self):
        crew = Crew(0)
        renewal, asking = await begun(crew)
        renewal.heard(Prepared(0, 1, ""))
        await asking
        renewal.drop()
        assert kinds(crew.told[0]) == [("Prepare", 1), ("Commit", 0)]
        renewal.commit()
        assert kinds(crew.told[0]) == [("Prepare", 1), ("Commit", 0)]

    async def test_a_worker_that_ends_is_not_waited_for_and_its_successor_is_told(self):
        crew = Crew(0, 1)
        renewal, asking = await begun(crew)
        renewal.heard(Prepared(0, 1, ""))
        renewal.ended(1)
        crew.add(1)
        await asking
        renewal.commit()
        assert kinds(crew.told[1]) == [("Prepare", 1), ("Commit", 1)]
        assert kinds(crew.told[0]) == [("Prepare", 1), ("Commit", 1)]

    async def test_an_answer_to_an_earlier_question_does_not_count(self):
        crew = Crew(0)
        renewal, asking = await begun(crew)
        renewal.heard(Prepared(0, 1, ""))
        await asking
        renewal.drop()
        again = asyncio.create_task(renewal.prepare(SETTINGS), name="prepare")
        await turns()
        renewal.heard(Prepared(0, 1, ""))
        await turns()
        assert not again.done()
        renewal.heard(Prepared(0, 2, ""))
        await again

    async def test_nobody_there(self):
        renewal = CrewRenewal(Crew())
        await renewal.prepare(SETTINGS)
        renewal.commit()


class Renewal:
    """Builds as fast as it is told to."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.error = None
        self.applied = []

    async def prepare(self, settings):
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return lambda: self.applied.append(settings.limits.max_requests)


class Half:
    """A worker's half over such a renewal."""

    def __init__(self):
        self.renewal, self.said, self.left = Renewal(), [], []
        self.half = WorkerRenewal(3, self.renewal, self.said.append, lambda: self.left.append(1))
        self.text = SETTINGS.model_dump_json()


@pytest.fixture
async def own():
    made = Half()
    yield made
    await made.half.aclose()
    assert not [task for task in asyncio.all_tasks() if "configuration" in task.get_name()]


class TestWorker:
    async def test_it_builds_says_so_and_waits_for_the_word(self, own):
        own.half.take(Prepare(5, own.text))
        own.renewal.gate.set()
        await until(lambda: own.said)
        assert own.said == [Prepared(3, 5, "")]
        assert own.renewal.applied == []
        own.half.take(Commit(5))
        assert own.renewal.applied == [7]
        own.half.take(Commit(5))
        assert own.renewal.applied == [7]

    async def test_the_word_comes_before_it_is_built(self, own):
        own.half.take(Prepare(5, own.text))
        own.half.take(Commit(5))
        assert own.renewal.applied == []
        own.renewal.gate.set()
        await until(lambda: own.renewal.applied)
        assert own.renewal.applied == [7]
        assert not own.left

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ConfigError("f", [config.Problem("a", None, "b")]), "f: a: b"),
            (ValueError("odd"), "odd"),
            (TimeoutError(), "TimeoutError"),
            (ZeroDivisionError("x"), "ZeroDivisionError"),
        ],
    )
    async def test_it_cannot(self, own, error, reason):
        own.renewal.error = error
        own.renewal.gate.set()
        own.half.take(Prepare(5, own.text))
        await until(lambda: own.said)
        assert own.said == [Prepared(3, 5, reason)]
        assert not own.left

    async def test_one_that_cannot_follow_the_others_gives_its_place_away(self, own):
        own.renewal.error = ValueError("odd")
        own.half.take(Prepare(5, own.text))
        own.half.take(Commit(5))
        own.renewal.gate.set()
        await until(lambda: own.left)

    async def test_forgotten(self, own):
        own.half.take(Prepare(5, own.text))
        own.half.take(Commit(0))
        own.renewal.gate.set()
        await turns()
        own.half.take(Commit(5))
        assert own.renewal.applied == []

    async def test_a_later_one_takes_the_place_of_an_earlier_one(self, own):
        own.half.take(Prepare(5, own.text))
        own.half.take(Prepare(6, own.text.replace('"max_requests":7', '"max_requests":8')))
        own.renewal.gate.set()
        await until(lambda: own.said)
        own.half.take(Commit(6))
        assert own.said == [Prepared(3, 6, "")]
        assert own.renewal.applied == [8]


async def test_a_worker_goes_by_it_from_the_word_on():
    async with World() as world:
        await world.serves()
        given = world.given.model_copy(update={"limits": world.given.limits.model_copy(update={"max_body_bytes": 9})})
        world.worker.take(Prepare(1, given.model_dump_json()))
        await until(lambda: world.of(Prepared))
        assert world.of(Prepared) == [Prepared(0, 1, "")]
        assert (await world.call())[0] == 200
        world.worker.take(Commit(1))
        assert (await world.call(BODY))[0] == 413
