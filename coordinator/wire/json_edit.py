"""JSON objects of which only the outermost fields are read or changed; all other bytes stay as they came.

A value of a field is `msgspec.Raw`, a view into the text: large integers, nulls, the digits of a float and unknown
fields travel on as they were written, and a prompt of 100 kB is never built.
"""

import re
from collections.abc import Generator, Iterable, Mapping
from typing import Self, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from coordinator.core.body import Buffer, LongBody, RequestBody
from coordinator.core.request import Request

from .json_scan import Spans, elements, fields_of

T = TypeVar("T")
Fields = dict[str, Raw]
Lists = Mapping[str, list[Raw]]
NO_LISTS: Lists = {}

_FIELDS = msgspec.json.Decoder(Fields)
_LIST = msgspec.json.Decoder(list[Raw])
_NUMBER = msgspec.json.Decoder(float)
_TEXT = msgspec.json.Decoder(str)
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_LISTS = re.compile(rb'\[[ \t\r\n]*["\[{]')
NOTHING = (b"", b"null")
JOINED_BYTES = 65536  # msgspec's encoder takes half as much again for its buffer, and is not faster on long values
ONE_GO_BYTES = 1 << 19  # msgspec takes 1 ms for it where it is slowest
BLANKS_BYTES = 4096  # how far the first element of an array is looked for
VIEWS_AT_ONCE = 512
PART_BYTES = 512  # shorter values are copied: TLS would make a record of each


def read_fields(text: bytes | Raw) -> Fields:
    """The outermost fields of a JSON object; of two equal names the last one counts.

    Raises:
        ValueError: it is no JSON object, or a name cannot be read.
    """
    try:
        return _FIELDS.decode(text)
    except _BROKEN as error:
        raise ValueError(f"not a JSON object that can be read: {error}") from error


class IndexedRequest(Request, frozen=True):
    """A request with a long body that was walked when it came.

    Attributes:
        walked: the body that this tells of; a request that continues this one has another body.
        text: as it came.
        spans: where the outermost fields of `text` are.
        changed: those that have another value than there.
    """

    walked: RequestBody = b""
    text: bytes = b""
    spans: Spans = {}  # noqa: RUF012  # msgspec makes each its own
    changed: Fields = {}  # noqa: RUF012

    @classmethod
    def of(cls, request: Request, text: bytes, spans: Spans, changed: Fields) -> Self:
        """The same request with the index of its body."""
        return cls(**asdict(request), walked=request.body, text=text, spans=spans, changed=changed)


def request_fields(request: Request) -> Fields:
    """The outermost fields of a request's body, which is not walked a second time where it is long.

    Raises:
        ValueError: as `read_fields`.
    """
    if isinstance(request, IndexedRequest) and request.walked is request.body:
        return {**fields_of(request.text, request.spans), **request.changed}
    return read_fields(bytes(request.body))


def long_lists(request: IndexedRequest, names: Iterable[str], most: int) -> Generator[None, None, Lists]:
    """Look for the elements of long arrays, of texts, arrays or objects, among the fields of a request's body.

    In steps as `json_scan.index`; `items` would take all its time in one go, up to 80 ms for 20 MB.

    Args:
        request: with a long body.
        names: the fields that may be such an array.
        most: how many elements are looked for in each.

    Raises:
        BadRequest: what stands between two elements is wrong.
    """
    text = request.text
    found: dict[str, list[Raw]] = {}
    for name in names if request.walked is request.body else ():
        start, end = request.spans.get(name, (0, 0))
        if end - start >= JOINED_BYTES and _LISTS.match(text, start, start + BLANKS_BYTES) is not None:
            view = memoryview(text)
            spans = yield from elements(text, start, most)
            items_of = found[name] = []
            for first in range(0, len(spans), VIEWS_AT_ONCE):
                items_of += [Raw(view[at:to]) for at, to in spans[first : first + VIEWS_AT_ONCE]]
                yield
    return found


def write_fields(fields: Fields) -> bytes:
    """The object as JSON text; the values byte for byte as they were read."""
    return bytes(write_body(fields))


def write_body(fields: Fields) -> RequestBody:
    """The same as the body of a request: long values are not copied."""
    if sum(map(len, fields.values())) < JOINED_BYTES:
        return msgspec.json.encode(fields)
    parts: list[Buffer] = []
    small = bytearray(b"{")
    for name, value in fields.items():
        small += msgspec.json.encode(name) + b":"
        if len(value) < PART_BYTES:
            small += value
        else:
            parts += (bytes(small), memoryview(value))
            small.clear()
        small += b","
    small[-1:] = b"}"
    return LongBody((*parts, bytes(small)))


def given(value: Raw | None) -> bool:
    """Whether a field is there; an explicit null is as good as none."""
    return value is not None and (len(value) > len(b"null") or bytes(value) not in NOTHING)


def number(value: Raw | None) -> float | None:
    """A number, for comparisons only; None for anything else."""
    return _decoded(_NUMBER, value)


def text(value: Raw | None) -> str | None:
    """A string; None for anything else."""
    return _decoded(_TEXT, value)


def items(value: Raw | None) -> list[Raw] | None:
    """The items of an array, each as it was written; None for anything else."""
    return _decoded(_LIST, value)


def request_items(fields: Fields, name: str, listed: Lists) -> list[Raw] | None:
    """The items of an array in a request's body, as `items`; None also where it is so long that it takes a while.

    Args:
        fields: of the body.
        name: of the field.
        listed: what was found beforehand.
    """
    known, value = listed.get(name), fields.get(name)
    return known if known is not None or value is None or len(value) >= ONE_GO_BYTES else items(value)


def object_fields(value: Raw | None) -> Fields | None:
    """The fields of an object; None for anything else."""
    return _decoded(_FIELDS, value)


def is_true(value: Raw | None) -> bool:
    """Whether a field is the literal `true`."""
    return value is not None and bytes(value) == b"true"


def _decoded(decoder: msgspec.json.Decoder[T], value: Raw | None) -> T | None:
    try:
        return None if value is None else decoder.decode(value)
    except _BROKEN:
        return None
