"""Finds the outermost fields of a long JSON object, step by step, so that nobody waits for the whole of it.

Only the outermost level is held to the grammar. Of what lies below, strings must end and brackets must match; the rest
is for the engine to judge. All of it is done by searches that run in C over one piece of the text at a time.
"""

import re
from collections.abc import Generator

from msgspec import DecodeError, Raw, json

from coordinator.core.errors import BadRequest

STEP_BYTES = 32768
FIRST_STEP_BYTES = 256  # most nested values are short: look a little further each time
SHORT_BYTES = 64  # what is looked through mark by mark
MAX_DEPTH = 1000
MAX_FIELDS = 4096
MAX_NAME_BYTES = 4096
MAX_SCALAR_BYTES = 4096

Spans = dict[str, tuple[int, int]]
Steps = Generator[None, None, None]

_BLANK = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MARKS = re.compile(rb'["\[\]{}]')
_PAIRS = {ord("]"): ord("["), ord("}"): ord("{")}
_MASK = b"\x01"  # stands for what was escaped; outside of strings it is as wrong as a backslash
_KEPT = b"[]{}\\" + _MASK
_NOT_KEPT = bytes(set(range(256)) - set(_KEPT))
_WORTH = 0.94  # a pass that leaves more than this of the brackets costs more than going through them one by one
_NAME = json.Decoder(str)


def fields_of(text: bytes, spans: Spans) -> dict[str, Raw]:
    """The outermost fields, each as a view into the text."""
    view = memoryview(text)
    return {name: Raw(view[start:end]) for name, (start, end) in spans.items()}


def index(text: bytes, step_bytes: int = STEP_BYTES) -> Generator[None, None, Spans]:
    """Find the outermost fields of a JSON object: a generator that does a bounded amount of work between two yields.

    Args:
        text: the whole object.
        step_bytes: how far it looks at once.

    Returns:
        Where the value of each field is; of two equal names the last one counts.

    Raises:
        BadRequest: it is no object, the outermost level is broken, a string or bracket does not end, or one of the
            limits above is exceeded.
    """
    return (yield from _Scan(text, max(2, step_bytes)).run())


def elements(
    text: bytes, start: int, most: int, step_bytes: int = STEP_BYTES
) -> Generator[None, None, list[tuple[int, int]]]:
    """Find the elements of an array in an object that `index` has been through, in steps as there.

    Args:
        text: the whole object.
        start: where the array begins.
        most: how many elements are looked for, at most.
        step_bytes: how far it looks at once.

    Returns:
        Where each of them is.

    Raises:
        BadRequest: what stands between two of them is wrong.
    """
    return (yield from _Scan(text, max(2, step_bytes), start).elements(most))


class _Scan:
    """Where a scan is."""

    __slots__ = ("_at", "_step_bytes", "_text")

    def __init__(self, text: bytes, step_bytes: int, at: int = 0) -> None:
        self._text = text
        self._at = at
        self._step_bytes = step_bytes

    def run(self) -> Generator[None, None, Spans]:
        spans: Spans = {}
        yield from self._blank()
        if self._text[self._at : self._at + 1] != b"{":
            raise BadRequest("the body must be a JSON object")
        self._at += 1
        yield from self._blank()
        if self._text[self._at : self._at + 1] == b"}":
            self._at += 1
        else:
            yield from self._fields(spans)
        yield from self._blank()
        if self._at != len(self._text):
            raise _broken()
        return spans

    def elements(self, most: int) -> Generator[None, None, list[tuple[int, int]]]:
        spans: list[tuple[int, int]] = []
        self._take(b"[")
        yield from self._blank()
        if self._text[self._at : self._at + 1] == b"]":
            return spans
        while True:
            start = self._at
            yield from self._value()
            spans.append((start, self._at))
            yield from self._blank()
            if len(spans) == most or self._text[self._at : self._at + 1] == b"]":
                return spans
            self._take(b",")
            yield from self._blank()
            yield

    def _fields(self, spans: Spans) -> Steps:
        for _ in range(MAX_FIELDS):
            start = self._at
            self._take(b'"')
            yield from self._string()
            name = self._name(start)
            yield from self._blank()
            self._take(b":")
            yield from self._blank()
            start = self._at
            yield from self._value()
            spans[name] = (start, self._at)
            yield from self._blank()
            if self._text[self._at : self._at + 1] == b"}":
                self._at += 1
                return
            self._take(b",")
            yield from self._blank()
            yield
        raise BadRequest(f"the body has more than {MAX_FIELDS} fields")

    def _take(self, mark: bytes) -> None:
        if self._text[self._at : self._at + 1] != mark:
            raise _broken()
        self._at += 1

    def _name(self, start: int) -> str:
        if self._at - start > MAX_NAME_BYTES:
            raise BadRequest("the name of a field is too long")
        try:
            return _NAME.decode(self._text[start : self._at])
        except (DecodeError, UnicodeDecodeError):
            raise _broken() from None

    def _blank(self) -> Steps:
        while True:
            limit = self._at + self._step_bytes
            found = _BLANK.match(self._text, self._at, limit)
            assert found is not None, "nothing is blank enough"
            self._at = found.end()
            if self._at < limit:
                return
            yield

    def _value(self) -> Steps:
        mark = self._text[self._at : self._at + 1]
        if mark == b'"':
            self._at += 1
            yield from self._string()
        elif mark in (b"[", b"{"):
            self._at += 1
            yield from self._nested(mark)
        else:
            found = _SCALAR.match(self._text, self._at, self._at + MAX_SCALAR_BYTES)
            if found is None:
                raise _broken()
            self._at = found.end()

    def _string(self) -> Steps:
        """Go behind the closing quote of a string; its opening one is passed."""
        text = self._text
        while True:
            end = self._at + self._step_bytes
            quote = text.find(b'"', self._at, end)
            escape = text.find(b"\\", self._at, end if quote < 0 else quote)
            if escape >= 0:
                piece = _masked(text[escape:end])
                quote = piece.find(b'"')
                quote += escape if quote >= 0 else 0
                end -= piece.endswith(b"\\")  # what it escapes is not seen yet
            if quote >= 0:
                self._at = quote + 1
                return
            if end >= len(text):
                raise BadRequest("the body is not valid JSON: a string does not end")
            self._at = end
            yield

    def _nested(self, opening: bytes) -> Steps:
        """Go behind the closing bracket of an array or object; its opening one is passed."""
        step_bytes = min(FIRST_STEP_BYTES, self._step_bytes)
        opened, quoted = bytearray(opening), False
        while True:
            end = self._at + step_bytes
            piece = _masked(self._text[self._at : end])
            found = _look(piece, opened, quoted=quoted)
            if found is not None:
                opened, quoted = found
                if end >= len(self._text):
                    raise BadRequest("the body is not valid JSON: a string or bracket is not closed")
                self._at = end - piece.endswith(b"\\")  # what it escapes is not seen yet
                step_bytes = min(step_bytes * 4, self._step_bytes)
                yield
            elif len(piece) > SHORT_BYTES:
                step_bytes = max(step_bytes // 4, SHORT_BYTES)
            else:
                self._at += _end_in(piece, opened, quoted=quoted)
                return


def _broken() -> BadRequest:
    return BadRequest("the body is not valid JSON")


def _masked(piece: bytes) -> bytes:
    """The same piece, as long, in which every quote is one that opens or closes a string.

    It must not begin behind a backslash. One at its very end is left alone.
    """
    if b"\\" not in piece:
        return piece
    return piece.replace(b"\\\\", _MASK * 2).replace(b'\\"', _MASK * 2)


def _look(piece: bytes, opened: bytearray, *, quoted: bool) -> tuple[bytearray, bool] | None:
    """Go through a masked piece of a nested value.

    Args:
        piece: what to go through.
        opened: the brackets that are open before it, the value's own first.
        quoted: whether it begins inside a string.

    Returns:
        The two as they are after it; None where the value ends in it.

    Raises:
        BadRequest: brackets that do not match, too many of them, or an escape outside of a string.
    """
    parts = piece.split(b'"')
    marks = b"".join(parts[quoted::2]).translate(None, _NOT_KEPT)
    if b"\\" in marks or _MASK in marks:
        raise _broken()
    many = len(marks) + 1
    while marks and len(marks) < many:
        many = int(len(marks) * _WORTH)
        marks = marks.replace(b"[]", b"").replace(b"{}", b"")
    opened = opened.copy()
    for mark in marks:
        opening = _PAIRS.get(mark)
        if opening is None:
            opened.append(mark)
        elif opened.pop() != opening:
            raise _broken()
        elif not opened:
            return None
    if len(opened) > MAX_DEPTH:
        raise BadRequest("the body is nested too deeply")
    return opened, quoted != (len(parts) % 2 == 0)


def _end_in(piece: bytes, opened: bytearray, *, quoted: bool) -> int:
    """How many bytes of a masked piece belong to the value that ends in it; arguments as for `_look`."""
    depth = len(opened)
    for found in _MARKS.finditer(piece):
        mark = found[0]
        if mark == b'"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if mark in b"[{" else -1
            if not depth:
                return found.end()
    raise AssertionError("the value ends in this piece")
