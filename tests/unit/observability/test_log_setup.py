import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest

from coordinator.observability.logs import LimitedLog, configure


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def logs(stream):
    logs = configure("info", "text", stream)
    yield logs
    logs.close()


def lines(stream):
    return stream.getvalue().splitlines()


def test_tree_goes_to_the_stream_and_nowhere_else(logs, stream, monkeypatch):
    elsewhere = []
    handler = logging.Handler()
    handler.emit = elsewhere.append
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logging.getLogger("another").warning("to the root")
    logging.getLogger("pd_coordinator.cluster").info("one", extra={"instance": "p0"})
    logging.getLogger("pd_coordinator.cluster").debug("two")
    (line,) = lines(stream)
    assert line.endswith(" INFO pd_coordinator.cluster one instance=p0")
    assert [record.msg for record in elsewhere] == ["to the root"]


def test_libraries_report_warnings_there(logs, stream):
    logging.getLogger("asyncio").info("using selector")
    logging.getLogger("aiohttp.server").error("Error handling request", exc_info=ValueError("secret"))
    (line,) = lines(stream)
    assert "ERROR aiohttp.server Error handling request exception=ValueError" in line
    assert "secret" not in line


def test_close_gives_the_loggers_back(stream):
    log = logging.getLogger("pd_coordinator")
    before = {
        name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in ("asyncio", log.name)
    }
    logs = configure("debug", "text", stream)
    assert log.level == logging.DEBUG
    logs.close()
    logs.close()
    assert log.handlers == []
    assert before == {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in before}


async def test_close_writes_what_is_buffered(stream):
    logs = configure("info", "text", stream)
    logs._writer._clock = lambda: 0.0
    logging.getLogger("pd_coordinator.x").info("last words")
    assert stream.getvalue() == ""
    logs.close()
    assert len(lines(stream)) == 1


async def test_flush_writes_what_is_buffered(logs, stream):
    logging.getLogger("pd_coordinator.x").info("words")
    logs.flush()
    assert len(lines(stream)) == 1


def test_json(stream):
    logs = configure("INFO", "json", stream)
    logging.getLogger("pd_coordinator.x").warning("one", extra={"n": 3})
    logs.close()
    assert json.loads(stream.getvalue())["n"] == 3


def test_default_is_standard_error(capsys):
    logs = configure("warning")
    logging.getLogger("pd_coordinator.x").warning("one")
    logs.close()
    assert "pd_coordinator.x one" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["loud", "", "notset"])
def test_unknown_level(level):
    with pytest.raises(ValueError, match="log level"):
        configure(level)


def test_unknown_style():
    with pytest.raises(ValueError, match="log format"):
        configure("info", "xml")  # type: ignore[arg-type]


def test_lines_that_the_stream_did_not_take_are_counted():
    stream = io.StringIO()
    logs = configure("info", "text", stream)
    stream.close()
    logging.getLogger("pd_coordinator.x").warning("one")
    logs.close()
    assert logs.lost == 1


def test_an_exit_writes_what_is_buffered():
    code = (
        "import asyncio, logging\n"
        "from coordinator.observability.logs import configure\n"
        "async def main():\n"
        "    configure('info')\n"
        "    logging.getLogger('pd_coordinator.x').info('last words')\n"
        "    raise SystemExit(3)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "last words" in done.stderr


async def test_a_task_that_failed_unseen_is_logged_without_its_text(logs, stream):
    async def fail():
        raise ValueError("secret prompt")

    task = asyncio.get_running_loop().create_task(fail(), name="fails")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    (line,) = lines(stream)
    assert "ERROR asyncio Task exception was never retrieved exception=ValueError" in line
    assert "secret" not in line


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limited(clock, logs):
    return LimitedLog(logging.getLogger("pd_coordinator.x"), 10.0, clock=clock)


def test_first_is_logged_then_one_per_interval(limited, clock, stream):
    assert limited.warning("late frame of %s", "d0", instance="d0")
    for _ in range(999):
        assert not limited.warning("late frame of %s", "d0", instance="d0")
    clock.now_s += 10
    assert limited.warning("late frame of %s", "d1", instance="d1")
    clock.now_s += 10
    assert limited.warning("late frame of %s", "d2", instance="d2")
    assert [line.partition(" pd_coordinator.x ")[2] for line in lines(stream)] == [
        "late frame of d0 instance=d0",
        "late frame of d1 instance=d1 left_out=999",
        "late frame of d2 instance=d2",
    ]


def test_messages_are_counted_for_themselves(limited, stream):
    assert limited.warning("one")
    assert limited.info("two")
    assert not limited.warning("one")
    assert not limited.info("two")
    assert ["WARNING" in line for line in lines(stream)] == [True, False]


def test_what_the_level_hides_takes_no_turn(limited, stream):
    assert not limited.log(logging.DEBUG, "one")
    assert limited.warning("one")
    assert "left_out" not in stream.getvalue()


def test_messages_without_end_share_a_count(limited, stream):
    for i in range(LimitedLog.MESSAGES + 1000):
        limited.warning(f"made up {i}")
    assert len(lines(stream)) == LimitedLog.MESSAGES + 1
