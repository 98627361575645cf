import asyncio
import io
import logging
import threading

import pytest

from coordinator.observability.writer import FLUSH_AFTER_S, FLUSH_CHARS, LineHandler, LineWriter


class Stream(io.StringIO):
    """Remembers each write and flush."""

    def __init__(self):
        super().__init__()
        self.writes: list[str] = []
        self.flushes = 0

    def write(self, text):
        self.writes.append(text)
        return len(text)

    def flush(self):
        self.flushes += 1


class Loop:
    """As much of an event loop as the writer uses; timers fire by hand."""

    def __init__(self):
        self.timers: list[tuple[float, object, tuple]] = []

    def call_later(self, delay_s, call, *args):
        self.timers.append((delay_s, call, args))
        return object()

    def fire(self):
        timers, self.timers = self.timers, []
        for _, call, args in timers:
            call(*args)


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def loop(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.fixture
def clock():
    class Clock:
        now_s = 100.0

        def __call__(self):
            return self.now_s

    return Clock()


@pytest.fixture
def writer(stream, clock):
    return LineWriter(stream, clock=clock)


def test_without_a_loop_each_line_goes_out_at_once(writer, stream):
    writer.write("a")
    writer.write("b")
    assert stream.writes == ["a\n", "b\n"]
    assert stream.flushes == 2


def test_lines_of_a_loop_go_out_together(writer, stream, loop):
    for line in ("a", "b", "c"):
        writer.write(line)
    assert stream.writes == []
    assert [delay_s for delay_s, _, _ in loop.timers] == [FLUSH_AFTER_S]
    loop.fire()
    assert stream.writes == ["a\nb\nc\n"]
    assert stream.flushes == 1
    writer.write("d")
    loop.fire()
    assert stream.writes[1:] == ["d\n"]


def test_many_characters_go_out_before_the_timer(writer, stream, loop):
    writer.write("x" * (FLUSH_CHARS - 1))
    assert stream.writes == []
    writer.write("y")
    assert stream.writes == ["x" * (FLUSH_CHARS - 1) + "\ny\n"]
    writer.write("z")
    assert len(loop.timers) == 1
    loop.fire()
    assert stream.writes[1:] == ["z\n"]


def test_a_timer_with_nothing_to_write_writes_nothing(writer, stream, loop):
    writer.write("a")
    writer.flush()
    loop.fire()
    assert stream.writes == ["a\n"]


def test_a_loop_that_does_not_get_to_its_timer(writer, stream, loop, clock):
    writer.write("a")
    clock.now_s += FLUSH_AFTER_S * 2.5
    writer.write("b")
    assert stream.writes == ["a\nb\n"]


def test_the_next_loop_has_its_own_timer(writer, stream, loop, monkeypatch):
    writer.write("a")
    writer.flush()
    second = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: second)
    writer.write("b")
    assert len(second.timers) == 1
    loop.fire()
    writer.write("c")
    second.fire()
    assert "".join(stream.writes) == "a\nb\nc\n"


async def test_real_loop(stream, writer):
    done = asyncio.Event()
    flush = stream.flush
    stream.flush = lambda: (flush(), done.set())
    writer.write("a")
    writer.write("b")
    assert stream.writes == []
    async with asyncio.timeout(5):
        await done.wait()
    assert stream.writes == ["a\nb\n"]


async def test_a_line_of_another_thread_is_not_lost(stream):
    writer = LineWriter(stream)
    writer.write("a")
    thread = threading.Thread(target=writer.write, args=("b",))
    thread.start()
    thread.join()
    writer.flush()
    assert "".join(stream.writes) == "a\nb\n"


async def test_lines_of_many_threads_at_once_are_all_written_once(stream):
    writer = LineWriter(stream)
    names = [f"thread {thread} line {line}" for thread in range(4) for line in range(300)]
    threads = [
        threading.Thread(target=lambda part=names[at::4]: [writer.add(name) for name in part], daemon=True)
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        writer.add("mine")
        writer.flush()
    writer.flush()
    lines = "".join(stream.writes).splitlines()
    assert sorted(line for line in lines if line != "mine") == sorted(names)


def test_a_line_that_comes_while_others_are_written_is_not_lost(writer, stream, loop):
    flush = stream.flush

    def interrupted():
        stream.flush = flush
        writer.add("b")
        flush()

    stream.flush = interrupted
    writer.add("a")
    loop.fire()
    loop.fire()
    assert stream.writes == ["a\n", "b\n"]


def test_writing_from_within_a_write_does_not_lock_up(writer, stream):
    write = stream.write

    def again(text):
        stream.write = write
        writer.write("inner")
        return write(text)

    stream.write = again
    thread = threading.Thread(target=writer.write, args=("outer",), daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert sorted(stream.writes) == ["inner\n", "outer\n"]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "no space"), ValueError("closed file")])
def test_a_stream_that_takes_nothing_costs_its_lines_only(writer, stream, error):
    def broken(text):
        raise error

    stream.write = broken
    writer.write("a")
    writer.write("b")
    assert writer.lost == 2


def test_what_a_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    writer = LineWriter(io.TextIOWrapper(raw, encoding="ascii"))
    writer.write("model 模")
    assert raw.getvalue() == b"model \\u6a21\n"
    assert writer.lost == 0


def record(level, message="m", args=()):
    return logging.LogRecord("pd_coordinator.x", level, "x.py", 7, message, args, None)


def test_a_warning_takes_all_before_it_along(writer, stream, loop):
    handler = LineHandler(writer, logging.Formatter("%(levelname)s"))
    handler.handle(record(logging.INFO))
    assert stream.writes == []
    handler.handle(record(logging.WARNING))
    assert stream.writes == ["INFO\nWARNING\n"]


def test_a_record_that_cannot_be_formatted_fails_nobody_and_shows_nothing(writer, stream):
    handler = LineHandler(writer, logging.Formatter())
    handler.handle(record(logging.INFO, "%d", ("secret",)))
    assert stream.writes == ["log record of pd_coordinator.x line 7 is unreadable: TypeError\n"]


def test_handler_flush_writes(writer, stream, loop):
    handler = LineHandler(writer, logging.Formatter())
    handler.handle(record(logging.INFO))
    handler.flush()
    assert stream.writes == ["m\n"]
