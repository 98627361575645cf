"""Warnings that come by the hundred, levels of single loggers, and what else may change while lines are written."""

import asyncio
import io
import logging

import pytest

from coordinator.observability.logs import configure
from coordinator.observability.repeats import BURST, MESSAGES, WINDOW_S, Repeats
from coordinator.observability.writer import LineHandler, LineWriter

LOG = logging.getLogger("pd_coordinator.tested")


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class World:
    def __init__(self):
        self.clock, self.told = Clock(), []
        self.repeats = Repeats(self.told.append, clock=self.clock)

    def says(self, message, *args, level=logging.WARNING, name="pd_coordinator.x"):
        record = logging.LogRecord(name, level, "", 1, message, args, None)
        return self.repeats.passes(record)

    @property
    def texts(self):
        return [record.getMessage() for record in self.told]


@pytest.fixture
def world():
    return World()


def test_each_text_once_and_then_how_many_there_were(world):
    assert world.says("instance %s is down", "d0")
    for _ in range(9):
        assert not world.says("instance %s is down", "d0")
    assert world.texts == []
    world.clock.now_s += WINDOW_S
    assert world.says("another thing")
    assert world.texts == ["instance d0 is down ... repeated 9 times in 10 s"]
    assert world.says("instance %s is down", "d0")


def test_different_texts_of_one_message_are_written_up_to_a_bound(world):
    written = [world.says("instance %s is down", f"d{number}") for number in range(BURST + 30)]
    assert written == [True] * BURST + [False] * 30
    world.clock.now_s += WINDOW_S + 2
    world.repeats.flush()
    assert world.texts == [f"instance d{BURST + 29} is down ... repeated 30 times in 12 s"]


def test_messages_and_loggers_are_counted_for_themselves(world):
    assert world.says("one")
    assert world.says("two")
    assert world.says("one", name="pd_coordinator.y")
    assert not world.says("one")


def test_what_is_no_warning_is_not_looked_at(world):
    assert all(world.says("one", level=logging.INFO) for _ in range(100))
    world.repeats.flush()
    assert world.told == []


def test_errors_are_counted_too(world):
    assert world.says("one", level=logging.ERROR)
    assert not world.says("one", level=logging.ERROR)
    world.repeats.flush()
    assert world.told[0].levelno == logging.ERROR
    assert world.texts == ["one ... repeated once in 1 s"]


def test_percent_signs_in_texts_stay(world):
    for _ in range(2):
        world.says("load is %s", "99 %s")
    world.repeats.flush()
    assert world.texts == ["load is 99 %s ... repeated once in 1 s"]


def test_nothing_grows_without_bound(world):
    assert all(world.says(f"made up {number}") for number in range(MESSAGES * 3))
    assert len(world.repeats._windows) == MESSAGES
    world.clock.now_s += WINDOW_S
    world.says("one")
    assert len(world.repeats._windows) == 1


async def test_the_count_is_told_even_if_nothing_else_comes(world, monkeypatch):
    later = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay_s, work: later.append((delay_s, work)))
    for _ in range(5):
        world.says("one")
    ((delay_s, work),) = later
    assert delay_s == WINDOW_S
    world.clock.now_s += WINDOW_S
    work()
    assert world.texts == ["one ... repeated 4 times in 10 s"]
    monkeypatch.undo()


@pytest.fixture
def stream():
    return io.StringIO()


def lines(stream):
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_in_the_log(stream):
    logs = configure("info", stream=stream)
    logs._handler._repeats._clock = Clock()
    for number in range(50):
        LOG.warning("instance %s is down", f"d{number}", extra={"n": number})
    LOG.info("fine")
    logs.close()
    assert len(lines(stream)) == BURST + 2
    assert lines(stream)[-1] == ("WARNING pd_coordinator.tested instance d49 is down ... repeated 30 times in 1 s n=49")


def test_a_record_that_cannot_be_read_does_not_fail_its_caller(stream):
    handler = LineHandler(LineWriter(stream), logging.Formatter())
    handler.handle(logging.LogRecord("pd_coordinator.x", logging.WARNING, "", 7, "%d", ("no number",), None))
    handler.flush()
    assert "unreadable" in stream.getvalue()


class TestLevels:
    def test_of_single_loggers(self, stream):
        logs = configure("warning", stream=stream, levels={"pd_coordinator.tested": "debug"})
        LOG.debug("seen")
        logging.getLogger("pd_coordinator.tested.deep").debug("seen, too")
        logging.getLogger("pd_coordinator.other").info("not seen")
        logs.close()
        assert lines(stream) == [
            "DEBUG pd_coordinator.tested seen", "DEBUG pd_coordinator.tested.deep seen, too"
        ]  # fmt: skip
        assert LOG.level == logging.NOTSET

    def test_changed_and_taken_back(self, stream):
        logs = configure("info", stream=stream)
        logs.apply("error", "text", {"pd_coordinator.tested": "debug"})
        LOG.debug("one")
        logs.apply("error", "text", {})
        LOG.warning("two")
        logs.apply("debug", "text", {"pd_coordinator.access": "error", "aiohttp": "info"})
        LOG.debug("three")
        assert not logging.getLogger("pd_coordinator.access").isEnabledFor(logging.INFO)
        assert logging.getLogger("aiohttp").isEnabledFor(logging.INFO)
        logs.close()
        assert [line.split()[-1] for line in lines(stream)] == ["one", "three"]
        assert LOG.level == logging.getLogger("pd_coordinator.access").level == logging.NOTSET

    def test_of_the_whole_tree_as_a_single_one(self, stream):
        logs = configure("error", stream=stream, levels={"pd_coordinator": "debug"})
        LOG.debug("one")
        logs.apply("error", "text", {})
        LOG.warning("two")
        logs.close()
        assert [line.split()[-1] for line in lines(stream)] == ["one"]

    def test_another_format(self, stream):
        logs = configure("info", stream=stream)
        logs.apply("info", "json", {})
        LOG.info("one")
        assert logs.access.as_json
        logs.apply("info", "text", {})
        LOG.info("two")
        logs.close()
        first, second = stream.getvalue().splitlines()
        assert first.startswith("{")
        assert "message" in first
        assert second.endswith("pd_coordinator.tested two")

    @pytest.mark.parametrize("given", [("loud", "text", {}), ("info", "xml", {}), ("info", "text", {"a": "loud"})])
    def test_what_is_none_changes_nothing(self, stream, given):
        logs = configure("info", stream=stream)
        with pytest.raises(ValueError, match="no such log"):
            logs.apply(*given)
        LOG.info("one")
        logs.close()
        assert len(lines(stream)) == 1


class TestRequests:
    def test_lines_carry_the_request_that_is_worked_on(self, stream):
        logs = configure("info", stream=stream)
        asked = []

        def find():
            asked.append(1)
            return {"request": "r1", "trace_id": "ab"}

        logs.belongs_to(find)
        LOG.warning("one")
        LOG.debug("not written, so nobody is asked")
        LOG.warning("two", extra={"request": "own"})
        logs.close()
        assert [line.partition("pd_coordinator.tested ")[2] for line in lines(stream)] == [
            "one request=r1 trace_id=ab", "two request=own"
        ]  # fmt: skip
        assert len(asked) == 1

    def test_one_that_breaks_costs_the_line_and_nothing_else(self, stream):
        logs = configure("info", stream=stream)
        logs.belongs_to(lambda: 1 / 0)
        LOG.warning("one")
        logs.close()
        assert "unreadable: ZeroDivisionError" in stream.getvalue()
