"""Streams of text completions that may break off with `preempt` and go on elsewhere: edited on their way to the client.

A chunk is looked into by byte marks; JSON is read only where a mark is found (microserving protocol page §4: `preempt`,
`usage.extra`). A quote inside of a text is escaped, so a quoted mark is a name or a value of its own.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from .json_edit import Fields, items, object_fields, read_fields, write_fields

ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
MAX_EVENT_BYTES: Final = 64 << 20
_BORDER_BYTES: Final = 3
_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_PREEMPT: Final = re.compile(rb'"finish_reason"\s*:\s*"preempt"')
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_TEXT: Final = re.compile(rb'"text"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')
_ENTRIES: Final = re.compile(rb'"token_logprobs"\s*:\s*\[([^\]]*)\]')
_LOGPROBS: Final = re.compile(
    rb'"logprobs"\s*:\s*\{(?:[^"{}]|' + _STRING + rb"|\{(?:[^\"{}]|" + _STRING + rb")*\})*\}", re.DOTALL
)
_TEXTS: Final = msgspec.json.Decoder(str)


class EventCutter:
    """Holds the end of an event stream back until it is a whole event."""

    __slots__ = ("_held", "_size")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes.

        Raises:
            ValueError: one event is longer than MAX_EVENT_BYTES.
        """
        if not self._held and data.endswith(ENDS):
            return data
        border = self._held[-1][-_BORDER_BYTES:] if self._held else b""
        joint = border + data
        cut = max(joint.rfind(end) + len(end) if end in joint else 0 for end in ENDS) - len(border)
        if cut <= 0:
            self._hold(data)
            return b""
        whole = b"".join((*self._held, data[:cut]))
        self._held, self._size = [], 0
        if cut < len(data):
            self._hold(data[cut:])
        return whole

    def rest(self) -> bytes:
        """What is held back at the stream's end."""
        held, self._held = b"".join(self._held), []
        return held

    def _hold(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_EVENT_BYTES:
            raise ValueError("an event of the stream is too long")
        if self._held and len(data) < _BORDER_BYTES:  # so that the last part always holds the border
            self._held[-1] += data
        else:
            self._held.append(data)


@dataclass(frozen=True, slots=True)
class Before:
    """What earlier attempts have sent of one answer.

    Attributes:
        chars: characters of generated text.
        tokens: tokens that they are; None where nobody has counted them.
        prompt_tokens: tokens of the client's prompt; None where nobody knows.
    """

    chars: int = 0
    tokens: int | None = 0
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What an editor does with a stream.

    Attributes:
        wire_id: the answer's id as the engine knows it.
        client_id: the same as the client knows it.
        before: what earlier attempts have sent; None: this is the first one.
        keep: note the generated text, to go on with it elsewhere.
        hide: take the log probabilities out, which were asked for only to count tokens.
        echo: the first chunk is the prompt, not generated text.
    """

    wire_id: str
    client_id: str
    before: Before | None = None
    keep: bool = True
    hide: bool = False
    echo: bool = False


class CompletionEditor:
    """Edits one stream, whole events at a time.

    Attributes:
        preempted: the engine has given the request back; nothing that came with that or after it is passed on.
        tokens: tokens counted by their log probabilities; 0 where the stream has none.
        prompted: whether the chunk that echoes the prompt has passed.
    """

    def __init__(self, reading: Reading) -> None:
        self.preempted = False
        self.tokens = 0
        self.prompted = not reading.echo
        self._reading = reading
        self._wire = b'"%b"' % reading.wire_id.encode()
        self._client = b'"%b"' % reading.client_id.encode()
        self._text = bytearray()

    @property
    def text(self) -> str:
        """The generated text that has passed."""
        return _TEXTS.decode(b'"%b"' % bytes(self._text))

    def feed(self, data: bytes) -> bytes:
        """Take whole events; returns those that go on, edited. Hot."""
        reading = self._reading
        if data.find(b'"preempt"') >= 0:
            data = self._before_preempt(data)
        if self.preempted and not data:
            return data
        if data.find(b'"token_logprobs"') >= 0:
            data = self._counted(data)
        if reading.keep:
            self._note_texts(data)
        if reading.before is not None or data.find(b'"extra"') >= 0:
            data = b"".join(map(self._edited, split_events(data)))
        return data.replace(self._wire, self._client)

    def _before_preempt(self, data: bytes) -> bytes:
        found = _PREEMPT.search(data)
        if found is None:
            return data
        self.preempted = True
        return data[: event_start(data, found.start())]

    def _counted(self, data: bytes) -> bytes:
        self.tokens += sum(map(_length, _ENTRIES.findall(data)))
        return _LOGPROBS.sub(b'"logprobs":null', data) if self._reading.hide else data

    def _note_texts(self, data: bytes) -> None:
        for found in _TEXT.finditer(data):
            if self.prompted:
                self._text += found[1]
            self.prompted = True

    def _edited(self, event: bytes) -> bytes:
        """One event with its usage and offsets put right."""
        before = self._reading.before
        has_usage = _USAGE.search(event) is not None
        has_offsets = before is not None and before.chars > 0 and b'"text_offset"' in event
        if not (has_usage or has_offsets):
            return event
        return edited(event, lambda fields: self._corrected(fields, before))

    def _corrected(self, fields: Fields, before: Before | None) -> Fields:
        changed = with_usage(fields, before)
        if before is not None and before.chars:
            changed = with_offsets(changed, before.chars)
        return changed


def with_usage(fields: Fields, before: Before | None) -> Fields:
    """An answer, or chunk of one, whose usage is the client's: without `extra`, with what earlier attempts count."""
    usage = object_fields(fields.get("usage"))
    if usage is None:
        return fields
    usage.pop("extra", None)
    if before is not None:
        prompt, completion = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        # the prompt of this attempt was the client's and all that was generated before it
        own = before.prompt_tokens if before.prompt_tokens is not None else max(0, prompt - (before.tokens or 0))
        done = before.tokens if before.tokens is not None else max(0, prompt - own)
        counts = {"prompt_tokens": own, "completion_tokens": done + completion, "total_tokens": own + done + completion}
        usage.update((name, Raw(b"%d" % number)) for name, number in counts.items())
    return {**fields, "usage": Raw(write_fields(usage))}


def with_offsets(fields: Fields, chars: int) -> Fields:
    """A chunk whose `text_offset`s count from the start of the whole answer."""
    choices = items(fields.get("choices")) or []
    for at, choice in enumerate(choices):
        inner = object_fields(choice) or {}
        logprobs = object_fields(inner.get("logprobs"))
        offsets = items((logprobs or {}).get("text_offset"))
        if logprobs is None or not offsets:
            continue
        moved = [_count(offset) + chars for offset in offsets]
        logprobs["text_offset"] = Raw(msgspec.json.encode(moved))
        choices[at] = Raw(write_fields({**inner, "logprobs": Raw(write_fields(logprobs))}))
    return {**fields, "choices": Raw(msgspec.json.encode(choices))} if choices else fields


# --- events


def split_events(data: bytes) -> Iterator[bytes]:
    """The events in some bytes, each with its end."""
    start = 0
    for end in _END.finditer(data):
        yield data[start : end.end()]
        start = end.end()
    if start < len(data):
        yield data[start:]


def event_start(data: bytes, at: int) -> int:
    """Where the event around the byte `at` begins."""
    return max(data.rfind(end, 0, at) + len(end) if end in data[:at] else 0 for end in ENDS)


def payload(event: bytes) -> bytes | None:
    """The JSON of an event; None for comments, for `[DONE]` and for what has no data.

    Several `data` lines are one payload with line ends between them (WHATWG HTML §9.2.6).
    """
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    joined = b"\n".join(lines)
    return joined if joined.startswith(b"{") else None


def edited(event: bytes, change: Callable[[Fields], Fields]) -> bytes:
    """An event with its payload changed; the same where it has none that can be read."""
    body = payload(event)
    if body is None:
        return event
    try:
        return b"data: %b\n\n" % write_fields(change(read_fields(body)))
    except ValueError:
        return event


def _length(entries: bytes) -> int:
    return entries.count(b",") + 1 if entries.strip() else 0


def _count(value: Raw | None) -> int:
    digits = bytes(value) if value is not None else b""
    return int(digits) if digits.isdigit() and len(digits) < 19 else 0
