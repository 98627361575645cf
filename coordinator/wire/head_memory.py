"""The last head on a connection, known again by its bytes: most of them differ in a length and a date at most."""

import re
from typing import Final, Generic, TypeVar

from coordinator.core.request import Headers

What = TypeVar("What")

LENGTH: Final = b"content-length"
DATE: Final = b"date"
MAX_LESSONS = 8  # a peer whose heads differ in something else each time is not worth the comparing
_MAX_VALUE_BYTES = 32
_NUMBER = re.compile(rb"[0-9]{1,19}")
_MOMENT = re.compile(rb"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")  # RFC 9110 §5.6.7
_SHAPES = {LENGTH: _NUMBER, DATE: _MOMENT}


class HeadMemory(Generic[What]):
    """Knows a head again that was read before, so that it need not be read again.

    All of its bytes are the same but the values of `Content-Length` and, if asked for, `Date`, which keep their form.
    So whatever a parser found out about the framing of the message, and about the rest of it, holds again.

    Attributes:
        what: what the reader of the head wants to have with it; None: no head is known.
        headers: of the head that was found last, names in lower case, values as they came.
        length: its Content-Length in bytes; 0 where it has none.
    """

    __slots__ = ("_head", "_holes", "_lessons", "_start", "headers", "length", "what")

    def __init__(self) -> None:
        self.what: What | None = None
        self.headers: Headers = ()
        self.length = 0
        self._head = b""
        self._start = b""
        self._holes: tuple[tuple[int, bytes], ...] = ()  # which header's value, and the bytes up to the next value
        self._lessons = 0

    def find(self, data: bytes) -> int:
        """Where the body starts if `data` starts with the known head, else -1; sets `headers` and `length`."""
        last = self._head
        if last and data.startswith(last):
            return len(last)
        if self.what is None or not data.startswith(self._start):
            return -1
        at = len(self._start)
        headers = self.headers
        for index, following in self._holes:
            end = data.find(b"\r", at, at + _MAX_VALUE_BYTES)
            if end < 0 or not data.startswith(following, end):
                return -1
            value = data[at:end]
            if value != headers[index][1]:
                name = headers[index][0]
                if _SHAPES[name].fullmatch(value) is None:
                    return -1
                headers = (*headers[:index], (name, value), *headers[index + 1 :])
            at = end + len(following)
        self._take(data[:at], headers)
        self._lessons = 0
        return at

    def learn(self, head: bytes, headers: Headers, what: What, *, dated: bool = False) -> None:
        """Know this head from here on, unless each is another one.

        Args:
            head: its bytes, the empty line included.
            headers: as a parser has read them, names in lower case.
            what: see the class.
            dated: whether the value of `Date` may differ.
        """
        self.what, self._head = None, b""
        lengths = [value for name, value in headers if name == LENGTH]
        if self._lessons >= MAX_LESSONS or len(lengths) > 1 or not all(map(_NUMBER.fullmatch, lengths)):
            return
        self._lessons += 1
        values = _values(head, headers, (LENGTH, DATE) if dated else (LENGTH,))
        borders = [start for start, _, _ in values] + [len(head)]
        self._start = head[: borders[0]]
        pieces = zip(values, borders[1:], strict=True)
        self._holes = tuple((index, head[end:until]) for (_, end, index), until in pieces)
        self._take(head, headers)
        self.what = what

    def _take(self, head: bytes, headers: Headers) -> None:
        self._head = head
        self.headers = headers
        self.length = next((int(value) for name, value in headers if name == LENGTH), 0)


def _values(head: bytes, headers: Headers, names: tuple[bytes, ...]) -> list[tuple[int, int, int]]:
    """Start and end of these headers' values in the head, and their places among the headers; in order.

    Left out are those that are not there just once, or not in the form that they must keep.
    """
    lower = head.lower()
    found = []
    for name in names:
        mark = b"\r\n%b:" % name
        places = [index for index, header in enumerate(headers) if header[0] == name]
        if len(places) != 1 or lower.count(mark) != 1:
            continue
        start = lower.find(mark) + len(mark)
        start += len(head[start:]) - len(head[start:].lstrip(b" \t"))
        end = head.find(b"\r", start)
        value = head[start:end]
        if value == headers[places[0]][1] and _SHAPES[name].fullmatch(value) is not None:
            found.append((start, end, places[0]))
    return sorted(found)
