"""Commands whose output goes into a pipe that nobody reads any more, as behind `| head`."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from coordinator.cli import main

FULL = str(Path(__file__).parents[3] / "configs" / "full.yaml")
LONG_NAME = "d" * 300  # that the report is longer than what a buffer holds


@contextlib.contextmanager
def unread(*, buffered):
    """Stdout that nobody reads, with or without the buffer that Python puts before a pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    raw = os.fdopen(writer, "wb", buffering=0)
    out = io.TextIOWrapper(io.BufferedWriter(raw)) if buffered else UnbufferedText(raw)
    # closing is what Python does at its end, and must have no reason to complain
    with contextlib.closing(out), contextlib.redirect_stdout(out):
        yield


class UnbufferedText:
    """Text that is written at once."""

    def __init__(self, raw):
        self._raw = raw
        self.fileno = raw.fileno
        self.close = raw.close

    def write(self, text):
        return self._raw.write(text.encode())

    def flush(self):
        pass

    def isatty(self):
        return False


both = pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])


@both
@pytest.mark.parametrize("arguments", [["check", "--config", FULL], ["schema"], ["key", "new"],
                                       ["instance", "--role", "hybrid", "--port", "0"]])  # fmt: skip
def test_it_ends_quietly(arguments, buffered, capsys):
    with unread(buffered=buffered):
        assert main(arguments) == 0
    assert "Broken pipe" not in capsys.readouterr().err


@both
@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--help"]])
def test_what_the_parser_prints(arguments, buffered):
    with unread(buffered=buffered), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


@both
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_doctor_keeps_its_exit_status(more, buffered, tmp_path):
    rows = [{"id": f"{n}-{LONG_NAME}", "role": "decode", "url": f"http://127.0.0.1:{n}"} for n in range(1, 31)]
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"server": {"port": 0, "management_port": 0}, "cluster": {"instances": rows}}))
    with unread(buffered=buffered):
        assert main(["doctor", "--no-handover", "--config", str(path), *more]) == 2


def test_an_interrupt_has_its_own_exit_status(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("coordinator.config.schema", interrupted)
    assert main(["schema"]) == 130
