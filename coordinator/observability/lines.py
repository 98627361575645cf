"""How anything becomes part of one log line: escaped, cut, stamped."""

import os
import re
import time
from math import trunc

VALUE_LIMIT = 200
LINE_LIMIT_BYTES = 4000
CUT = "..."

_MARKS = '"\\'

_MILLIS = tuple(f"{millis:03d}Z" for millis in range(1000))

_plain = re.compile(r"[!#-<>-\[\]-~]{1,200}").fullmatch


def printable(text: str, limit: int = VALUE_LIMIT) -> str:
    """`text` in one line of `limit` characters (and the mark of a cut): what cannot be seen as a backslash escape.

    That covers line breaks of every kind, terminal controls, marks that change the direction of writing, and lone
    surrogates, which no stream could encode.
    """
    if len(text) <= limit and text.isprintable():
        return text
    return _escaped(text, limit, "")


def quoted(text: str, limit: int = VALUE_LIMIT) -> str:
    """The value of a `key=value` field: as it is where nothing could be mistaken, else in double quotes."""
    if _plain(text):
        return text
    if len(text) <= limit and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return f'"{_escaped(text, limit, _MARKS)}"'


def _escaped(text: str, limit: int, marks: str) -> str:
    parts: list[str] = []
    room = limit
    for c in text[: limit + 1]:
        part = f"\\{c}" if c in marks else c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        room -= len(part)
        if room < 0:
            parts.append(CUT)
            break
        parts.append(part)
    return "".join(parts)


def scalar(value: object) -> str | int | float | bool | None:
    """A log field as plain data.

    Only values whose text is known to be their own pass; of anything else, bytes and exceptions included, only the
    type is named: its text could quote a request.
    """
    match value:
        case str() | bool() | int() | float() | None:
            return value
        case os.PathLike():
            return os.fsdecode(value)
        case tuple() | list() | set() | frozenset():
            return ",".join(str(scalar(item)) for item in value)
        case _:
            return f"<{type(value).__name__}>"


def field(value: object) -> str:
    """A log field as text: yes and no, short floats, quoted where needed."""
    plain = scalar(value)
    match plain:
        case bool():
            return "yes" if plain else "no"
        case float():
            return f"{plain:.6g}"
        case str():
            return quoted(plain)
        case _:
            return str(plain)


def cut_line(line: str) -> str:
    """A line of at most `LINE_LIMIT_BYTES` in UTF-8."""
    if len(line) * 4 <= LINE_LIMIT_BYTES:
        return line
    raw = line.encode("utf-8", "backslashreplace")
    if len(raw) <= LINE_LIMIT_BYTES:
        return line
    return raw[: LINE_LIMIT_BYTES - len(CUT)].decode("utf-8", "ignore") + CUT


class Stamper:
    """ISO 8601 time stamps in UTC with milliseconds; the part down to the second is made once a second.

    Args:
        before: what stands before each stamp.
    """

    __slots__ = ("_before", "_prefix", "_second_s")

    def __init__(self, before: str = "") -> None:
        self._before = before
        self._second_s = -1.0
        self._prefix = ""

    def __call__(self, now_s: float) -> str:
        """The stamp of a wall-clock time, in seconds since the epoch."""
        return self.at(now_s)

    def at(self, now_s: float) -> str:
        """The same; hot: calling a method is cheaper than calling an object."""
        part_s = now_s - self._second_s
        if not 0.0 <= part_s < 1.0:
            second = int(now_s)
            self._prefix = self._before + time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second))
            self._second_s = float(second)
            part_s = now_s - second
        return self._prefix + _MILLIS[trunc(part_s * 1000)]
