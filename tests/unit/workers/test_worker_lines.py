"""Log lines of several processes in one stream."""

import logging
import os
import threading

import pytest

from coordinator.observability.logs import configure
from coordinator.workers.lines import ONE_WRITE_BYTES, WholeLines


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_all(end, size):
    data = b""
    while len(data) < size:
        data += os.read(end, 65536)
    return data


def test_pieces_end_at_line_ends(pipe, monkeypatch):
    pieces = []
    monkeypatch.setattr(os, "write", lambda fd, data: (pieces.append(bytes(data)), len(data))[1])
    lines = [f"{number} " + "x" * (number * 37 % 900) for number in range(300)]
    text = "\n".join(lines) + "\n"
    assert WholeLines(pipe[1]).write(text) == len(text)
    assert b"".join(pieces).decode() == text
    assert all(piece.endswith(b"\n") and len(piece) <= ONE_WRITE_BYTES for piece in pieces)
    assert len(pieces) < 60


@pytest.mark.parametrize("length", [ONE_WRITE_BYTES - 1, ONE_WRITE_BYTES, ONE_WRITE_BYTES + 1, 5 * ONE_WRITE_BYTES])
def test_a_long_line_goes_alone(pipe, monkeypatch, length):
    pieces = []
    monkeypatch.setattr(os, "write", lambda fd, data: (pieces.append(bytes(data)), len(data))[1])
    WholeLines(pipe[1]).write("a\n" + "b" * length + "\nc\n")
    assert b"".join(pieces) == b"a\n" + b"b" * length + b"\nc\n"
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"b" * length + b"\n" in b"".join(piece for piece in pieces if b"b" in piece)


def test_a_short_write_goes_on(pipe, monkeypatch):
    taken = []
    monkeypatch.setattr(os, "write", lambda fd, data: (taken.append(bytes(data[:3])), min(3, len(data)))[1])
    WholeLines(pipe[1]).write("some words\n")
    assert b"".join(taken) == b"some words\n"


def test_any_text_can_be_written(pipe):
    WholeLines(pipe[1]).write("täxt \ud800\n")
    assert os.read(pipe[0], 100) == "täxt \\ud800\n".encode()


def test_two_writers_do_not_break_each_others_lines(pipe):
    logs = [configure("info", "text", WholeLines(pipe[1])) for _ in range(2)]
    lines = [f"{name}{number} " + name * (number % 700) for name in "ab" for number in range(400)]
    size = sum(len(line) + 1 for line in lines)

    def put(name):
        WholeLines(pipe[1]).write("".join(f"{line}\n" for line in lines if line[0] == name))

    writers = [threading.Thread(target=put, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    found = read_all(pipe[0], size).decode().splitlines()
    for writer in writers:
        writer.join()
    assert sorted(found) == sorted(lines)
    for log in reversed(logs):
        log.close()


def test_a_reader_that_is_gone(monkeypatch):
    """The log never fails a request: lines are counted as lost."""
    read, write = os.pipe()
    os.close(read)
    logs = configure("info", "text", WholeLines(write))
    logging.getLogger("pd_coordinator").warning("hello")
    assert logs.lost == 1
    logs.close()
    os.close(write)
