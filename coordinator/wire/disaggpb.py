"""Messages of the package `disagg` (disaggpb protocol page §1): written by hand, KV read no further than its head.

A prefill message is a whole layer's KV, megabytes of it. Nothing here decodes or copies `k_data` and `v_data`: their
lengths are read, and where the block stands, so that its bytes can become an entry of decode's request as they are
(page §4: `0x0a len block` in a KVBlockStream is `0x12 len block` in a DecodeRequest).
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

PREFILL_METHOD: Final = "/disagg.PrefillWorker/Prefill"
DECODE_METHOD: Final = "/disagg.DecodeWorker/Decode"
HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"

MAX_INT32: Final = 2**31 - 1
MAX_MESSAGE_BYTES: Final = 2**31 - 1
"""What one protobuf message can hold (page §4)."""

BLOCK_ENTRY: Final = b"\x12"
"""The tag of `kv_blocks` in a DecodeRequest; what follows is `read_kv`'s span of a prefill message."""

SERVING: Final = 1
"""`HealthCheckResponse.status` of a server that takes requests."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10
_LONGEST_TAG: Final = 5  # and the longest length, which has 31 bits
_MAX_FIELD: Final = (1 << 29) - 1
_MAX_ID_BYTES: Final = 1024
_MAX_REASON_BYTES: Final = 1024
_MAX_FIELDS: Final = 64
_UINT64: Final = (1 << 64) - 1


class WireError(ValueError):
    """The bytes are no message of this protocol; the text says why and quotes none of them."""


@dataclass(frozen=True, slots=True)
class KvBlock:
    """The head of one KV block, and where the block is in its message.

    Attributes:
        k_bytes: length of `k_data`; fp16, so an even number.
        start: offset of the block's length, right behind its tag.
        end: offset behind the block.
    """

    request_id: bytes
    layer_idx: int
    block_idx: int
    k_bytes: int
    v_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KvMessage:
    """One message of the prefill stream."""

    block: KvBlock | None
    done: bool


@dataclass(frozen=True, slots=True)
class Token:
    """One message of the decode stream. Each carries a token, the last one too, and 0 is a token like any other."""

    request_id: bytes
    token_id: int
    done: bool
    finish_reason: str


# --- to the workers


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as both requests hold them, a quarter of a microsecond each; packs of parts can be joined."""
    packed = bytearray()
    for token_id in token_ids:
        _append_varint(packed, token_id)
    return bytes(packed)


def prefill_request(request_id: str, packed_ids: bytes, max_new_tokens: int, temperature: float) -> bytes:
    """A serialised PreFillRequest; numbers are from 0 to MAX_INT32, the temperature fits into 32 bits."""
    return _text(1, request_id) + _sized(2, packed_ids) + _number(3, max_new_tokens) + _float(4, temperature)


def decode_head(request_id: str) -> bytes:
    """The part of a serialised DecodeRequest that stands before its KV blocks."""
    return _text(1, request_id)


def decode_tail(packed_ids: bytes, max_new_tokens: int, temperature: float) -> bytes:
    """The part of a serialised DecodeRequest that stands behind its KV blocks."""
    return _sized(3, packed_ids) + _number(4, max_new_tokens) + _float(5, temperature)


def _text(field: int, value: str) -> bytes:
    return _sized(field, value.encode())


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def _float(field: int, value: float) -> bytes:
    return varint(field << 3 | _FIXED32) + struct.pack("<f", value) if value else b""


def _sized(field: int, data: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(data)) + data if data else b""


def varint(value: int) -> bytes:
    """A number from 0 to 2**64-1 in base 128, lowest digits first."""
    digits = bytearray()
    _append_varint(digits, value)
    return bytes(digits)


def _append_varint(digits: bytearray, value: int) -> None:
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)


# --- from the workers


def read_kv(data: bytes) -> KvMessage:
    """Read one KVBlockStream as far as its order and lengths go.

    Raises:
        WireError: a length points out of the message, a number does not end, a field has another type than it must
            have, or two blocks are in one message.
    """
    block: KvBlock | None = None
    done = False
    for field, kind, value, start in _fields(data, 0, len(data)):
        if field == 1:
            if kind != _BYTES or block is not None:
                raise WireError("more than one KV block in a message" if block is not None else "`block` is no message")
            block = _read_block(data, start, value)
        elif field == 2:
            done = bool(_demand(kind, _VARINT, value, "done"))
    return KvMessage(block, done)


def _read_block(data: bytes, start: int, size: int) -> KvBlock:
    """Args: `start` is the offset of the block's length, whose value is `size`."""
    request_id = b""
    numbers = [0, 0, 0, 0]  # layer_idx, block_idx, length of k_data, of v_data
    begin = _past_varint(data, start)
    end = begin + size
    for field, kind, value, at in _fields(data, begin, end):
        if field == 1:
            request_id = _short(data, kind, value, at, _MAX_ID_BYTES)
        elif field in (2, 3):
            numbers[field - 2] = _int32(_demand(kind, _VARINT, value, "an index of a KV block"))
        elif field in (4, 5):
            numbers[field - 2] = _demand(kind, _BYTES, value, "KV data")
    layer_idx, block_idx, k_bytes, v_bytes = numbers
    return KvBlock(request_id, layer_idx, block_idx, k_bytes, v_bytes, start, end)


def read_token(data: bytes) -> Token:
    """Read one TokenStream.

    Raises:
        WireError: as `read_kv`, or a finish reason that is no text.
    """
    request_id, token_id, done, reason = b"", 0, False, b""
    for field, kind, value, at in _fields(data, 0, len(data)):
        if field == 1:
            request_id = _short(data, kind, value, at, _MAX_ID_BYTES)
        elif field == 2:
            token_id = _int32(_demand(kind, _VARINT, value, "token_id"))
        elif field == 3:
            done = bool(_demand(kind, _VARINT, value, "done"))
        elif field == 4:
            reason = _short(data, kind, value, at, _MAX_REASON_BYTES)
    try:
        return Token(request_id, token_id, done, reason.decode())
    except UnicodeDecodeError:
        raise WireError("finish_reason is no text") from None


def read_health(data: bytes) -> int:
    """The status in a `grpc.health.v1.HealthCheckResponse`; raises WireError."""
    status = 0
    for field, kind, value, _ in _fields(data, 0, len(data)):
        if field == 1:
            status = _int32(_demand(kind, _VARINT, value, "status"))
    return status


# --- fields


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, value and the offset behind the tag, for each field between two offsets.

    The value is the number itself, or the length of what is measured by one. Fields that are skipped may be of any
    known type; groups are refused, which no worker sends.
    """
    for _ in range(_MAX_FIELDS):
        if at == end:
            return
        tag, at = _varint(data, at, end, _LONGEST_TAG)
        field, kind = tag >> 3, tag & 7
        if not 0 < field <= _MAX_FIELD:
            raise WireError("a field number is out of range")
        start = at
        if kind in (_VARINT, _BYTES):
            value, at = _varint(data, at, end, _LONGEST_TAG if kind == _BYTES else _LONGEST_VARINT)
            at += value if kind == _BYTES else 0
        elif kind in (_FIXED32, _FIXED64):
            value, at = 0, at + (4 if kind == _FIXED32 else 8)
        else:
            raise WireError(f"fields of wire type {kind} are not read")
        if at > end:
            raise WireError("a field reaches out of its message")
        yield field, kind, value, start
    if at != end:
        raise WireError("too many fields")


def _varint(data: bytes, at: int, end: int, longest: int) -> tuple[int, int]:
    """The number at an offset, and the offset behind it; bits above the 64th are dropped, as protobuf does."""
    value = shift = 0
    for here in range(at, min(end, at + longest)):
        byte = data[here]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, here + 1
        shift += 7
    raise WireError("a number does not end")


def _past_varint(data: bytes, at: int) -> int:
    """The offset behind a number that was read before."""
    while data[at] >= 0x80:
        at += 1
    return at + 1


def _int32(value: int) -> int:
    """A number on the wire as the int32 that it stands for."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value > MAX_INT32 else value


def _demand(kind: int, wanted: int, value: int, name: str) -> int:
    if kind != wanted:
        raise WireError(f"{name} has another type")
    return value


def _short(data: bytes, kind: int, size: int, at: int, most: int) -> bytes:
    """A short byte string whose length stands at `at`."""
    _demand(kind, _BYTES, size, "text")
    if size > most:
        raise WireError(f"a text is longer than {most} bytes")
    begin = _past_varint(data, at)
    return data[begin : begin + size]
