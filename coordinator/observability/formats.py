"""Log records as one line of text or JSON.

What libraries and exceptions say is trimmed: their texts may quote a request (asyncio prints the arguments of a failed
callback, `int()` and pydantic the input), and no prompt, output or credential may get into a log.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import PurePath
from traceback import walk_tb
from types import TracebackType

import msgspec

from coordinator.core.errors import RequestError

from .lines import LINE_LIMIT_BYTES, Stamper, cut_line, field, printable, quoted, scalar

ROOT = "pd_coordinator"
MESSAGE_LIMIT = 1000
FRAMES = 12

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_RESERVED = frozenset({"time", "level", "logger", "message"})
_before_values = re.compile(r"[^\n(<{\[='\"]*").match

# exceptions whose text is about code, files and sockets, never about data
_SPEAKING = (OSError, AttributeError, NameError, ImportError, TypeError, AssertionError)


def record_message(record: logging.LogRecord) -> str:
    """The message in one line; of a library's, only the words before the first value."""
    if record.name == ROOT or record.name.startswith(f"{ROOT}."):
        return printable(record.getMessage(), MESSAGE_LIMIT)
    words = _before_values(record.getMessage())
    return printable(words[0].strip() if words else "", MESSAGE_LIMIT)


def record_fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """What was given as `extra`, then the exception, if there is one."""
    for key, value in record.__dict__.items():
        if key not in _STANDARD and value is not None:
            yield key, value
    if record.exc_info and record.exc_info[1] is not None:
        yield "exception", exception_text(record.exc_info[1])
        yield "trace", trace_text(record.exc_info[2])


def exception_text(error: BaseException) -> str:
    """An exception's type, and its text where that cannot be a client's data; then the same of its causes."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 5:  # a chain of causes may be a ring
        name = type(current).__name__
        text = current.detail if isinstance(current, RequestError) else str(current)
        parts.append(f"{name}: {text}" if text and isinstance(current, (*_SPEAKING, RequestError)) else name)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " < ".join(parts)


def trace_text(trace: TracebackType | None) -> str:
    """Where it happened, the innermost call first: `file:line function` for at most `FRAMES` calls."""
    calls = [f"{PurePath(f.f_code.co_filename).name}:{line} {f.f_code.co_name}" for f, line in walk_tb(trace)]
    return " < ".join(reversed(calls[-FRAMES:]))


class TextFormatter(logging.Formatter):
    """`time level logger message key=value ...`."""

    def __init__(self) -> None:
        super().__init__()
        self._stamp = Stamper()

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        head = f"{self._stamp(record.created)} {record.levelname} {record.name} {record_message(record)}"
        fields = "".join(f" {printable(key)}={_text(key, value)}" for key, value in record_fields(record))
        return cut_line(head + fields)


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, logger, message, then the fields."""

    def __init__(self) -> None:
        super().__init__()
        self._stamp = Stamper()

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end; fields that would make it too long are left out, and `cut` says so."""
        head: dict[str, object] = {
            "time": self._stamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record_message(record),
        }
        fields = {printable(key): _data(key, value) for key, value in record_fields(record) if key not in _RESERVED}
        return json_line(head, fields)


def json_line(head: dict[str, object], fields: dict[str, object]) -> str:
    """A JSON object in one line of at most `LINE_LIMIT_BYTES`."""
    line = msgspec.json.encode(head | fields)
    while len(line) > LINE_LIMIT_BYTES and fields:
        fields.popitem()
        line = msgspec.json.encode(head | fields | {"cut": True})
    return line.decode()


def _text(key: str, value: object) -> str:
    return quoted(str(value), MESSAGE_LIMIT) if key in ("trace", "exception") else field(value)


def _data(key: str, value: object) -> object:
    plain = scalar(value)
    if not isinstance(plain, str):
        return plain
    return printable(plain, MESSAGE_LIMIT if key in ("trace", "exception") else 200)
