"""Reading JSON bodies no further than routing needs, and writing JSON.

A body is walked once. Fields stay undecoded (`msgspec.Raw` views into the body), so a prompt of 100 kB is checked for
syntax but never built. Whatever a client can send ends in a value or in BadRequest, in no other error.

msgspec walks a body in one go. What is longer than LONG_BYTES is walked beforehand, in small steps (wire.json_scan).
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

import msgspec
from msgspec import Raw

from coordinator.core.body import LongBody, RequestBody
from coordinator.core.errors import BadRequest
from coordinator.wire.json_edit import ONE_GO_BYTES, write_fields
from coordinator.wire.json_scan import Spans, fields_of

from . import values

T = TypeVar("T")

ABSENT = Raw()
_SPACE = b" \t\r\n"
_TOKENS = b"0123456789-[]" + _SPACE  # what a token array consists of, but for commas


class _Parameters(msgspec.Struct, frozen=True, gc=False):
    max_new_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT


_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_PARAMETERS = msgspec.json.Decoder(_Parameters)
_NO_PARAMETERS = _Parameters()

# The walk does not look into the strings that it skips. Above this size the second look, which builds the text once,
# costs more than the round trip that it may save, and the engine refuses the body anyway.
UTF8_CHECKED_BYTES = 1 << 20
LONG_BYTES = ONE_GO_BYTES
_SLICE_BYTES = 65536
_COMMAS = b"," * _SLICE_BYTES


@dataclass(slots=True)
class Walked:
    """A body whose outermost fields are known.

    Attributes:
        text: the body as it came.
        fields: its outermost fields, views into the text.
        spans: where they are there; None where nobody will want to know again, because the text is short.
        changed: fields that were given another value.
        counted: long arrays among the fields, and what `tokens` says of each.
    """

    text: bytes
    fields: Mapping[str, Raw]
    spans: Spans | None = None
    changed: dict[str, Raw] = field(default_factory=dict)
    counted: list[tuple[Raw, int | None]] = field(default_factory=list)

    @classmethod
    def indexed(cls, text: bytes, spans: Spans) -> Self:
        """A body that was walked step by step."""
        return cls(text, fields_of(text, spans), spans)

    def long_arrays(self) -> list[Raw]:
        """Fields that are arrays of which even counting the elements takes time."""
        return [value for value in self.fields.values() if len(value) >= LONG_BYTES and is_array(value)]

    def change(self, name: str, value: bytes) -> None:
        """Give one of the fields another value, and leave all else byte for byte as it was."""
        self.changed[name] = Raw(value)
        self.fields = {**self.fields, name: self.changed[name]}

    def written(self) -> RequestBody:
        """The body with what was changed; of a long one nothing is copied."""
        if not self.changed:
            return self.text
        if self.spans is None:
            return write_fields(dict(self.fields))
        view, at = memoryview(self.text), 0
        parts: list[bytes | memoryview] = []
        for (start, end), name in sorted((self.spans[name], name) for name in self.changed):
            parts += (view[at:start], bytes(self.changed[name]))
            at = end
        return LongBody((*parts, view[at:]))


Body = bytes | Walked


def walk(body: bytes) -> Walked:
    """Walk a short body once for several readers; raises BadRequest as `read` does."""
    fields = read(_FIELDS, body)
    return Walked(body, fields)


def read(decoder: msgspec.json.Decoder[T], body: Body) -> T:
    """Decode a body whose outermost value is a JSON object; of two equal keys the last one counts.

    Raises:
        BadRequest: no JSON object, broken JSON, invalid UTF-8 (looked for up to UTF8_CHECKED_BYTES), nested too deeply.
    """
    if isinstance(body, Walked):
        return _picked(cast("type[T]", decoder.type), body.fields)
    try:
        if not body.isascii() and len(body) <= UTF8_CHECKED_BYTES:
            body.decode()
        return decoder.decode(body)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object", detail=str(error)) from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise BadRequest(_broken(body, str(error)), detail=str(error)) from None


def _broken(body: bytes, found: str) -> str:
    """What is wrong with broken JSON, and where; the decoder's words hold places, and nothing of the body."""
    if not body.strip():
        return "the body is empty, a JSON object is wanted"
    where = found.removeprefix("JSON is malformed: ")
    if where == "Input data was truncated":  # said of a string that ends in half of a pair as well
        where = "it ends too early, or a string holds half of a surrogate pair"
    return f"the body is not valid JSON: {where}"


def _picked(kind: type[T], fields: Mapping[str, Raw]) -> T:
    names = cast("type[msgspec.Struct]", kind).__struct_fields__
    return kind(**{name: fields[name] for name in names if name in fields})


def has(decoder: msgspec.json.Decoder[T], body: Body, name: str) -> bool:
    """Whether a body can be read and has this field, whatever else is wrong with it."""
    try:
        return values.given(getattr(read(decoder, body), name))
    except BadRequest:
        return False


def peek(decoder: msgspec.json.Decoder[T], value: Raw) -> T | None:
    """Decode a field that only the engine validates; None where it is absent, null, long or of another type."""
    try:
        return decoder.decode(value) if values.given(value) and len(value) < LONG_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parameter_limit(parameters: Raw, *top_level: Raw) -> int | None:
    """The limit of generated tokens in a `parameters` object (either name), else in the top-level fields given."""
    inner = peek(_PARAMETERS, parameters) or _NO_PARAMETERS
    return values.limit(inner.max_new_tokens, inner.max_tokens, *top_level)


def tokens(value: Raw, body: Body) -> int | None:
    """How many numbers a field of `body` holds that is an array, or an array of arrays, of token ids; else None."""
    if not is_array(value):
        return None
    if isinstance(body, Walked):
        for array, number in body.counted:
            if array is value:
                return number
    steps = token_steps(value)
    while True:
        try:
            next(steps)
        except StopIteration as counted:
            return cast("int | None", counted.value)


def token_steps(value: Raw) -> Generator[None, None, int | None]:
    """Count as `tokens` does, in an array: a generator that does a bounded amount of work between two yields."""
    view = memoryview(value)
    commas = empty = 0
    carry = b""
    for at in range(0, len(view), _SLICE_BYTES):  # in slices, so that no copy of the whole is made
        if at:
            yield
        piece = bytes(view[at : at + _SLICE_BYTES])
        rest = piece.translate(None, _TOKENS)
        if not _COMMAS.startswith(rest):
            return None
        commas += len(rest)
        if carry or b"[" in piece:
            slim = carry + piece.translate(None, _SPACE)
            empty += slim.count(b"[]")
            carry = b"[" if slim.endswith(b"[") else b""
    return commas + 1 - empty


def is_array(value: Raw) -> bool:
    """Whether a field holds a JSON array."""
    return len(value) > 0 and memoryview(value)[0] == ord("[")


def dump(value: object) -> bytes:
    """JSON bytes; halves of surrogate pairs, which JSON text cannot carry, become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_speakable(value))


def _speakable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_speakable(item) for item in value]
    return value
