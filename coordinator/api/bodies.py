"""Reading JSON bodies no further than routing needs, and writing JSON.

A body is walked once. Fields stay undecoded (`msgspec.Raw` views into the body), so a prompt of 100 kB is checked for
syntax but never built. Whatever a client can send ends in a value or in BadRequest, in no other error.
"""

from typing import TypeVar

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest

T = TypeVar("T")

ABSENT = Raw()
_NULL = b"null"
_FLAGS = {b"": False, _NULL: False, b"false": False, b"true": True}
_TOKEN_ARRAY = b"0123456789-,[]"
_SPACE = b" \t\r\n"
_MOST_DIGITS = 18  # what fits into 64 bits


class _Parameters(msgspec.Struct, frozen=True, gc=False):
    max_new_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT


_PARAMETERS = msgspec.json.Decoder(_Parameters)
_NO_PARAMETERS = _Parameters()

# The walk does not look into the strings that it skips. Above this size the second look, which builds the text once,
# costs more than the round trip that it may save, and the engine refuses the body anyway.
UTF8_CHECKED_BYTES = 1 << 20


def read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body whose outermost value is a JSON object; of two equal keys the last one counts.

    Raises:
        BadRequest: no JSON object, broken JSON, invalid UTF-8 (looked for up to UTF8_CHECKED_BYTES), nested too deeply.
    """
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
        raise BadRequest("the body is not valid JSON", detail=str(error)) from None


def has(decoder: msgspec.json.Decoder[T], body: bytes, name: str) -> bool:
    """Whether a body can be read and has this field, whatever else is wrong with it."""
    try:
        return given(getattr(read(decoder, body), name))
    except BadRequest:
        return False


def peek(decoder: msgspec.json.Decoder[T], value: Raw) -> T | None:
    """Decode a field that only the engine validates; None where it is absent, null or of another type."""
    try:
        return decoder.decode(value) if given(value) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def given(value: Raw) -> bool:
    """Whether a field is there; an explicit null is as good as none."""
    size = len(value)
    return size > 0 and not (size == len(_NULL) and bytes(value) == _NULL)


def prompt(value: Raw, name: str) -> Raw:
    """The value of a field that must be there.

    Raises:
        BadRequest: it is absent or null.
    """
    if not given(value):
        raise BadRequest(f"`{name}` is missing")
    return value


def flag(value: Raw, name: str) -> bool:
    """A boolean field, false where it is absent or null.

    Raises:
        BadRequest: it is of another type.
    """
    answer = _FLAGS.get(bytes(value)) if len(value) <= len(b"false") else None
    if answer is None:
        raise BadRequest(f"`{name}` must be true or false")
    return answer


def text(value: Raw, name: str) -> str | None:
    """A string field, None where it is absent or null.

    Raises:
        BadRequest: it is of another type or not valid Unicode.
    """
    if not given(value):
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(f"`{name}` must be a string") from None


def limit(*values: Raw) -> int | None:
    """The first of several fields that is given, as a count; None for what is no plain count: engines judge that."""
    for value in values:
        if given(value):
            digits = bytes(value) if len(value) <= _MOST_DIGITS else b""
            return int(digits) if digits.isdigit() else None
    return None


def parameter_limit(parameters: Raw, *top_level: Raw) -> int | None:
    """The limit of generated tokens in a `parameters` object (either name), else in the top-level fields given."""
    inner = peek(_PARAMETERS, parameters) or _NO_PARAMETERS
    return limit(inner.max_new_tokens, inner.max_tokens, *top_level)


def tokens(value: Raw) -> int | None:
    """How many numbers an array, or an array of arrays, of token ids holds; None for anything else."""
    if not is_array(value):
        return None
    data = bytes(value)
    if b'"' in data or data.translate(None, _TOKEN_ARRAY + _SPACE):
        return None
    return data.count(b",") + 1 - data.translate(None, _SPACE).count(b"[]")


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
