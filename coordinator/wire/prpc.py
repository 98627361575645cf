"""Frames of baidu_std, the protocol in which brpc servers and clients talk (xLLM protocol page §2.1).

    "PRPC" | u32be body size | u32be meta size | meta (RpcMeta) | payload | attachment

The body size counts meta, payload and attachment. One connection carries many calls; a reply has the correlation id of
its call and may overtake others.
"""

import struct
import zlib
from typing import NamedTuple

from google.protobuf.message import DecodeError

from coordinator.wire.protobuf.brpc_pb2 import RpcMeta

MAGIC = b"PRPC"
HEAD = struct.Struct(">4sII")
DEFAULT_MAX_BODY_BYTES = 64 << 20  # what brpc allows unless told otherwise

PLAIN, SNAPPY, GZIP = 0, 1, 2

# error codes of brpc
NO_SERVICE = 1001
NO_METHOD = 1002
BAD_REQUEST = 1003
INTERNAL = 2001
OVER_LIMIT = 2004

_GZIP_WINDOW = 31


class PrpcError(Exception):
    """The bytes are no frames, or one that is too long: nothing more can be read from this connection."""


class PayloadError(Exception):
    """A payload cannot be expanded; the frames around it can be read.

    Attributes:
        code: for the reply.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Frame(NamedTuple):
    """One frame: a call, or the reply to one. The attachment is left out: no message of xLLM has one."""

    meta: RpcMeta
    payload: bytes

    def expanded(self, max_bytes: int) -> bytes:
        """The payload as it was before it was compressed.

        Raises:
            PayloadError: an unknown compression, no such data, or more than `max_bytes`.
        """
        kind = self.meta.compress_type
        if kind == PLAIN:
            return self.payload
        if kind != GZIP:
            raise PayloadError(BAD_REQUEST, f"compress_type {kind} is not supported")
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        try:
            data = inflater.decompress(self.payload, max_bytes + 1)
        except zlib.error:
            raise PayloadError(BAD_REQUEST, "the payload is no gzip data") from None
        if len(data) > max_bytes:
            raise PayloadError(BAD_REQUEST, f"the payload expands to more than {max_bytes} bytes")
        if not inflater.eof:
            raise PayloadError(BAD_REQUEST, "the gzip data ends early")
        return data


class PrpcParser:
    """Turns the bytes of a connection, split anywhere, into frames.

    It holds at most one unfinished frame, whose size is checked before its body is waited for.

    Args:
        max_body_bytes: a frame that says that it is longer is an error.
    """

    def __init__(self, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    @property
    def idle(self) -> bool:
        """Whether no unfinished frame is held."""
        return not self._buffer

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

        Raises:
            PrpcError: see there; frames completed before it are lost with the connection.
        """
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        at = 0
        while (end := self._end_of_frame(at)) >= 0:
            frames.append(self._frame(at, end))
            at = end
        if at:
            del buffer[:at]
        return frames

    def _end_of_frame(self, at: int) -> int:
        """Offset behind the frame that begins at `at`; -1 while it is not all there."""
        buffer = self._buffer
        there = len(buffer) - at
        if there < HEAD.size:
            if bytes(buffer[at : at + 4]) != MAGIC[:there]:
                raise PrpcError("no baidu_std: a frame begins with PRPC")
            return -1
        magic, body_bytes, meta_bytes = HEAD.unpack_from(buffer, at)
        if magic != MAGIC:
            raise PrpcError("no baidu_std: a frame begins with PRPC")
        if body_bytes > self._max_body_bytes:
            raise PrpcError(f"a frame of {body_bytes} bytes is above the limit of {self._max_body_bytes}")
        if meta_bytes > body_bytes:
            raise PrpcError(f"a meta part of {meta_bytes} bytes in a body of {body_bytes}")
        return -1 if there < HEAD.size + body_bytes else at + HEAD.size + int(body_bytes)

    def _frame(self, at: int, end: int) -> Frame:
        meta_bytes = HEAD.unpack_from(self._buffer, at)[2]
        start = at + HEAD.size
        payload_at = start + int(meta_bytes)
        meta = RpcMeta()
        try:
            meta.ParseFromString(bytes(self._buffer[start:payload_at]))
        except DecodeError:
            raise PrpcError("the meta part of a frame cannot be read") from None
        attached = meta.attachment_size
        if not 0 <= attached <= end - payload_at:
            raise PrpcError(f"an attachment of {attached} bytes where {end - payload_at} are left")
        return Frame(meta, bytes(self._buffer[payload_at : end - attached]))


def encode_frame(meta: RpcMeta, payload: bytes) -> bytes:
    """A frame without attachment."""
    told = meta.SerializeToString()
    return HEAD.pack(MAGIC, len(told) + len(payload), len(told)) + told + payload


def encode_reply(correlation_id: int, payload: bytes) -> bytes:
    """The reply to a call that went well."""
    meta = RpcMeta(correlation_id=correlation_id)
    meta.response.error_code = 0
    return encode_frame(meta, payload)


def encode_error(correlation_id: int, code: int, text: str) -> bytes:
    """The reply to a call that failed. `code`: one of brpc's."""
    meta = RpcMeta(correlation_id=correlation_id)
    meta.response.error_code = code
    meta.response.error_text = text
    return encode_frame(meta, b"")
