"""What single fields of a body say, which are views into its text (`msgspec.Raw`)."""

from typing import Final

from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.wire import json_edit

_NULL: Final = b"null"
_FLAGS: Final = {b"": False, _NULL: False, b"false": False, b"true": True}
_MOST_DIGITS: Final = 18  # what fits into 64 bits
_MOST_NAME_BYTES: Final = 65536


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
        BadRequest: it is of another type, not valid Unicode, or longer than any name.
    """
    if not given(value):
        return None
    if len(value) > _MOST_NAME_BYTES:
        raise BadRequest(f"`{name}` is too long")
    found = json_edit.text(value)
    if found is None:
        raise BadRequest(f"`{name}` must be a string")
    return found


def limit(*values: Raw) -> int | None:
    """The first of several fields that is given, as a count; None for what is no plain count: engines judge that."""
    for value in values:
        if given(value):
            digits = bytes(value) if len(value) <= _MOST_DIGITS else b""
            return int(digits) if digits.isdigit() else None
    return None
