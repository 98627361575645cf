"""The record of the requests that an instance got; readable while it runs."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        number: counts all requests of the instance, from 1.
        at_s: wall-clock time of arrival (seconds since the epoch).
        connection: peer address and port; two requests on one connection show the same.
        outcome: what became of it: an HTTP status, or words; `running` while it is.
        took_s: from arrival to outcome.
        note: what the engine made of it, in words.
    """

    number: int
    connection: str
    method: str
    path: str
    headers: list[tuple[str, str]]
    role: str
    at_s: float = field(default_factory=time.time)
    body_bytes: int = 0
    body: str = ""
    outcome: str = "running"
    took_s: float = 0.0
    note: str = ""

    def header(self, name: str) -> str | None:
        """First value of a header, whatever its case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Records:
    """The newest `limit` records."""

    def __init__(self, limit: int, body_bytes: int) -> None:
        self._kept: deque[Record] = deque(maxlen=limit)
        self._body_bytes = body_bytes
        self.total = 0

    def __iter__(self) -> Iterator[Record]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, connection: str, method: str, path: str, headers: list[tuple[str, str]], role: str) -> Record:
        """A new record, kept from now on."""
        self.total += 1
        record = Record(self.total, connection, method, path, headers, role)
        self._kept.append(record)
        return record

    def fill(self, record: Record, body: bytes) -> None:
        """Add the body, cut to the limit; bytes that are not UTF-8 show as escapes."""
        record.body_bytes = len(body)
        record.body = body[: self._body_bytes].decode("utf-8", "backslashreplace")

    def of(self, path: str) -> list[Record]:
        """Records whose path (query aside) is this one."""
        return [record for record in self._kept if record.path.partition("?")[0] == path]

    def clear(self) -> None:
        """Forget all; the count goes on."""
        self._kept.clear()
