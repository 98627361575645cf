import json
import logging
import sys

import pytest

from coordinator.core.errors import EngineFailed, InternalError, Side
from coordinator.observability.formats import JsonFormatter, TextFormatter, exception_text, trace_text
from coordinator.observability.lines import LINE_LIMIT_BYTES

SECRET = "canary-4711"


def record(message="instance is down", *args, name="pd_coordinator.cluster", exc_info=None, **extra):
    made = logging.makeLogRecord(
        {"name": name, "levelno": 30, "levelname": "WARNING", "msg": message, "args": args, "exc_info": exc_info}
    )
    made.created = 1_700_000_000.25
    made.__dict__.update(extra)
    return made


def caught(error):
    try:
        raise error
    except type(error):
        return sys.exc_info()


def text(*args, **kwargs):
    return TextFormatter().format(record(*args, **kwargs))


def data(*args, **kwargs):
    return json.loads(JsonFormatter().format(record(*args, **kwargs)))


def test_text():
    assert text("instance %s is down", "p0", instance="p0", after_s=0.25, again=True, reason="no answer") == (
        "2023-11-14T22:13:20.250Z WARNING pd_coordinator.cluster instance p0 is down"
        ' instance=p0 after_s=0.25 again=yes reason="no answer"'
    )


def test_json():
    assert data("instance %s is down", "p0", instance="p0", after_s=0.25, again=True, reason="no answer") == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "pd_coordinator.cluster",
        "message": "instance p0 is down",
        "instance": "p0",
        "after_s": 0.25,
        "again": True,
        "reason": "no answer",
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("bad", ["\n", "\r", "\x85", "\u2028", "\x0b", "\x1b[2J", "\ud800", '"'])
def test_a_record_is_one_line(formatter, bad):
    line = formatter.format(record(f"a{bad}b %s", bad, value=f"c{bad}d", **{f"key{bad}": 1}))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("fill", ["x", "模", "\n", "\ud800", '"'])
def test_a_record_is_short(formatter, fill):
    fields = {f"key{i}": fill * 5000 for i in range(50)}
    line = formatter.format(record(fill * 100_000, exc_info=caught(OSError(fill * 100_000)), **fields))
    assert len(line.encode()) <= LINE_LIMIT_BYTES + 20


def test_json_says_that_fields_were_left_out():
    line = data("m", **{f"key{i}": "x" * 500 for i in range(50)})
    assert line["cut"] is True
    assert line["key0"].startswith("xxx")
    assert "key49" not in line


def test_fields_that_are_not_known_are_left_out():
    assert text(instance=None).endswith("instance is down")
    assert "instance" not in data(instance=None)


def test_json_fields_do_not_hide_the_head():
    assert data("m", level="fake", time="fake", logger="fake")["level"] == "WARNING"


def test_values_that_could_quote_a_request_are_named_only():
    line = text(body=SECRET.encode(), error=ValueError(SECRET), ask={"prompt": SECRET})
    assert SECRET not in line
    assert "body=<bytes> error=<ValueError> ask=<dict>" in line.replace('"', "")


def test_exception_with_its_place():
    line = text(exc_info=caught(ConnectionResetError(104, "Connection reset by peer")))
    assert 'exception="ConnectionResetError: [Errno 104] Connection reset by peer"' in line
    assert f'trace="{__name__}.py:' in line
    assert " caught" in line


@pytest.mark.parametrize("error", [ValueError(SECRET), KeyError(SECRET), RuntimeError(SECRET), Exception(SECRET)])
def test_texts_of_exceptions_that_may_quote_a_request_are_left_out(error):
    for line in (text(exc_info=caught(error)), JsonFormatter().format(record(exc_info=caught(error)))):
        assert SECRET not in line
        assert type(error).__name__ in line


def test_causes_are_named_too():
    error = InternalError("policy gave no instance")
    error.__cause__ = KeyError(SECRET)
    error.__cause__.__context__ = OSError("closed")
    assert exception_text(error) == "InternalError: policy gave no instance < KeyError < OSError: closed"


def test_suppressed_context_is_not_named():
    error = OSError("a")
    error.__context__ = OSError("b")
    error.__suppress_context__ = True
    assert exception_text(error) == "OSError: a"


def test_ring_of_causes_ends():
    first, second = OSError("a"), OSError("b")
    first.__cause__, second.__cause__ = second, first
    assert exception_text(first).count("OSError") == 5


def test_the_public_message_of_an_engine_error_is_not_its_log_text():
    error = EngineFailed(Side.DECODE, "d0", "status", detail="500 after 3 events")
    assert exception_text(error) == "EngineFailed: 500 after 3 events"


def test_trace_is_bounded_and_has_the_innermost_call_first():
    def deep(n):
        if n == 0:
            raise OSError
        deep(n - 1)

    try:
        deep(50)
    except OSError as error:
        trace = trace_text(error.__traceback__)
    assert trace.count(" < ") == 11
    assert trace.split(" < ")[0].endswith(" deep")
    assert trace_text(None) == ""


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"Exception in callback Proto.data_received(b'{SECRET}')\nhandle: <Handle {SECRET}>", "Exception in callback"),
        (f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{SECRET}')>", "never retrieved"),
        (f"Executing <Handle f({SECRET})> took 0.3 seconds", "Executing"),
        (f"odd input '{SECRET}'", "odd input"),
    ],
)
def test_of_libraries_only_the_words_before_the_first_value(said, kept):
    line = text(said, name="asyncio")
    assert SECRET not in line
    assert kept in line
