"""baidu_std frames: `PRPC`, sizes, meta, payload (xLLM protocol page §2.1)."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from instances.xllm.proto.meta_pb2 import RpcMeta

MAGIC = b"PRPC"
LIMIT_BYTES = 64 << 20
PLAIN, GZIP = 0, 2
_HEADER = struct.Struct(">4sII")
_GZIP_WINDOW = 31


class BadFrame(Exception):
    """The bytes cannot be a frame; the connection is of no use any more."""


class BadPayload(Exception):
    """The frame is one, what it carries cannot be read."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `payload`: as it was sent, possibly compressed; `attachment`: bytes after it."""

    meta: RpcMeta
    payload: bytes = b""
    attachment: bytes = b""

    def encode(self) -> bytes:
        """The bytes on the wire."""
        if self.attachment:
            self.meta.attachment_size = len(self.attachment)
        meta = self.meta.SerializeToString()
        body_bytes = len(meta) + len(self.payload) + len(self.attachment)
        return _HEADER.pack(MAGIC, body_bytes, len(meta)) + meta + self.payload + self.attachment

    def message(self) -> bytes:
        """The payload, expanded; raises BadPayload."""
        kind = self.meta.compress_type
        if kind == PLAIN:
            return self.payload
        if kind != GZIP:
            raise BadPayload(f"compress_type {kind} is not supported")
        expander = zlib.decompressobj(_GZIP_WINDOW)
        try:
            data = expander.decompress(self.payload, LIMIT_BYTES)
        except zlib.error as error:
            raise BadPayload(f"gzip: {error}") from None
        if not expander.eof:
            raise BadPayload("gzip: cut short, or too large")
        return data


def request(service: str, method: str, correlation_id: int, message: bytes, *, gzip: bool = False) -> Frame:
    """A call. `service` is the full name."""
    meta = RpcMeta(compress_type=GZIP if gzip else PLAIN, correlation_id=correlation_id)
    meta.request.service_name, meta.request.method_name = service, method
    return Frame(meta, compressed(message) if gzip else message)


def reply(correlation_id: int, message: bytes, *, gzip: bool = False) -> Frame:
    """The answer to a call that went well."""
    meta = RpcMeta(correlation_id=correlation_id)
    meta.response.error_code = 0
    if gzip:
        meta.compress_type = GZIP
    return Frame(meta, compressed(message) if gzip else message)


def failure(correlation_id: int, code: int, text: str) -> Frame:
    """The answer to a call that failed."""
    meta = RpcMeta(correlation_id=correlation_id)
    meta.response.error_code, meta.response.error_text = code, text
    return Frame(meta)


def compressed(message: bytes) -> bytes:
    """The message, gzipped."""
    packer = zlib.compressobj(wbits=_GZIP_WINDOW)
    return packer.compress(message) + packer.flush()


class Reader:
    """Cuts what comes over a connection into frames.

    Args:
        limit_bytes: largest body.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with this data; raises BadFrame after them, as early as it can be known."""
        self._held += data
        while (end := self._end()) is not None and end <= len(self._held):
            frame = self._frame(end)
            del self._held[:end]
            yield frame

    def _end(self) -> int | None:
        """Where the first frame ends; None: not known yet."""
        if not MAGIC.startswith(self._held[: len(MAGIC)]):
            raise BadFrame("the frame does not begin with PRPC")
        if len(self._held) < _HEADER.size:
            return None
        _, body_bytes, meta_bytes = _HEADER.unpack_from(self._held)
        if body_bytes > self._limit:
            raise BadFrame(f"a body of {body_bytes} bytes; at most {self._limit} are taken")
        if meta_bytes > body_bytes:
            raise BadFrame("the meta is larger than the body")
        return int(_HEADER.size + body_bytes)

    def _frame(self, end: int) -> Frame:
        (meta_bytes,) = struct.unpack_from(">I", self._held, 8)
        middle = _HEADER.size + meta_bytes
        try:
            meta = RpcMeta.FromString(bytes(self._held[_HEADER.size : middle]))
        except DecodeError:
            raise BadFrame("the meta cannot be read") from None
        if not 0 <= meta.attachment_size <= end - middle:
            raise BadFrame("the attachment is larger than the body")
        cut = end - meta.attachment_size
        return Frame(meta, bytes(self._held[middle:cut]), bytes(self._held[cut:end]))
