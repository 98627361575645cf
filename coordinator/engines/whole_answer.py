"""An answer of an engine that is no stream: one JSON document, bounded, and not an error in disguise."""

import msgspec
from msgspec import Raw

from coordinator.wire.events import MAX_MESSAGE_CHARS, MAY_BE_ERROR, ErrorEvent
from coordinator.wire.json_edit import number, object_fields, read_fields, text
from coordinator.wire.refusal import message_of

MAX_BYTES = 64 << 20
MAX_CODE = 999
ANSWERS = ("choices", "text", "generated_text", "text_output", "outputs")  # what answers of all families are named


class WholeAnswer:
    """Collects the parts of an answer, up to MAX_BYTES."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> bool:
        """Take a part; False: the answer is too long, and what there is of it is dropped."""
        self._size += len(data)
        if self._size > MAX_BYTES:
            self._parts.clear()
            return False
        self._parts.append(data)
        return True

    @property
    def body(self) -> bytes:
        """What has come."""
        return b"".join(self._parts)


def error_in(body: bytes) -> ErrorEvent | None:
    """The error that a 200 tells in place of an answer: `{"error": ...}` or `{"object": "error", ...}`.

    Raises:
        ValueError: the body is no whole JSON document.
    """
    try:
        msgspec.json.decode(body, type=Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("answer is no JSON") from error
    if MAY_BE_ERROR not in body:
        return None
    try:
        fields = read_fields(body)
    except ValueError:
        return None  # a list of answers
    told = fields.get("error")
    inner = object_fields(told)
    if inner is None and text(told) is None:
        if text(fields.get("object")) != "error":
            return None
        inner = fields
    elif any(name in fields for name in ANSWERS):
        return None
    code = number((inner or {}).get("code"))
    return ErrorEvent(0, message_of(body, 0)[:MAX_MESSAGE_CHARS], int(code) if code and 0 < code <= MAX_CODE else 0)
