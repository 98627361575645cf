"""Server-sent events of engines, as far as they are looked into: errors, and the usage at a stream's end.

Sources: WHATWG HTML §9.2 (event stream); an error inside a stream is `data: {"error": ...}` (OpenAI, TGI, vLLM) or
`data: {"object": "error", ...}` (older vLLM).
"""

import re
from dataclasses import dataclass
from typing import Final

from msgspec import Raw

from .json_edit import is_true, number, object_fields, read_fields, text, write_fields
from .merge import with_cached_tokens

MAY_BE_ERROR: Final = b'"error"'  # a quote inside of a text is escaped: this stands where JSON has a name or value
MAX_HELD_BYTES: Final = 1 << 20
MAX_MESSAGE_CHARS: Final = 1000
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_END: Final = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_ERROR: Final = re.compile(rb'^data:[ \t]*\{\s*(?:"error"\s*:\s*[{"]|"object"\s*:\s*"error")', re.MULTILINE)
_LAST_USAGE: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]|"prompt_tokens_details"')


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An engine's error inside a stream.

    Attributes:
        at: where its event begins in the bytes that were looked at.
        message: the engine's text; empty where it cannot be read.
        code: a status as the engine gives it; 0 where it gives none.
    """

    at: int
    message: str
    code: int = 0


def find_error(data: bytes) -> ErrorEvent | None:
    """The first error event in stream bytes that begin at the start of a line."""
    found = _ERROR.search(data)
    if found is None:
        return None
    ends = [end.end() for end in _END.finditer(data, 0, found.start())]
    line = data[found.start() + len(b"data:") :].split(b"\n", 1)[0]
    message, code = _read_error(line)
    return ErrorEvent(ends[-1] if ends else 0, message, code)


def _read_error(line: bytes) -> tuple[str, int]:
    try:
        fields = read_fields(line)
    except ValueError:
        return "", 0
    plain = text(fields.get("error"))
    if plain is not None:
        return plain[:MAX_MESSAGE_CHARS], 0
    inner = object_fields(fields.get("error")) or fields
    code = number(inner.get("code"))
    return (text(inner.get("message")) or "")[:MAX_MESSAGE_CHARS], int(code) if code and code < 1000 else 0


def is_whole(data: bytes) -> bool:
    """Whether stream bytes end with the end of an event."""
    return data.endswith(_ENDS)


class UsageEditor:
    """Puts prefill's cached tokens into the usage of a stream's last chunks.

    Bytes pass through; only an event that is not whole yet is held back, and only those with a final usage are read.
    """

    __slots__ = ("_cached_tokens", "_held")

    def __init__(self, cached_tokens: Raw) -> None:
        self._cached_tokens = cached_tokens
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take stream bytes; returns those that can go on, edited."""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(_ENDS):
            data = self._hold_rest(data)
        if data.find(b'"usage"') < 0 or _LAST_USAGE.search(data) is None:
            return data
        return b"".join(map(self._edited, _split(data)))

    def rest(self) -> bytes:
        """What is held back at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _hold_rest(self, data: bytes) -> bytes:
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
        if len(data) - cut > MAX_HELD_BYTES:
            return data
        self._held = data[cut:]
        return data[:cut]

    def _edited(self, event: bytes) -> bytes:
        if not event.startswith(b"data:") or b'"usage"' not in event or _LAST_USAGE.search(event) is None:
            return event
        body = event[len(b"data:") :]
        try:
            fields = read_fields(body)
        except ValueError:
            return event
        end = body[len(body.rstrip()) :]
        return b"data: " + write_fields(with_cached_tokens(fields, self._cached_tokens)) + end


def _split(data: bytes) -> list[bytes]:
    """The events in some bytes, each with its end."""
    events, start = [], 0
    for end in _END.finditer(data):
        events.append(data[start : end.end()])
        start = end.end()
    if start < len(data):
        events.append(data[start:])
    return events


def wants_usage(stream_options: Raw | None) -> bool:
    """Whether a stream is to end with a chunk of usage."""
    options = object_fields(stream_options)
    return options is not None and is_true(options.get("include_usage"))
