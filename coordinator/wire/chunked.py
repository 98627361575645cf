"""HTTP/1.1 chunked framing with the sender's chunk borders kept (RFC 9112 §7.1).

An ordinary HTTP parser hides where one chunk ends and the next begins. On a MindIE result stream that border is
the only exact end of a message (MindIE protocol page §5.2), so this decoder hands whole chunks out.
"""

import re
from typing import Final

MAX_SIZE_LINE_BYTES = 256
MAX_TRAILER_BYTES = 16384
CACHED_SIZES = 4096
CR: Final = 0x0D
LF: Final = 0x0A
_HEX = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


def size_lines(limit_bytes: int) -> dict[int, bytes]:
    """What a chunk of so many bytes, framing included, begins with where it is framed in the usual way."""
    lines = {}
    for size in range(1, limit_bytes):
        line = b"%x\r\n" % size
        lines[len(line) + size + 2] = line
    return lines


class ChunkError(ValueError):
    """The bytes are no chunked body; the connection is of no further use."""


class ChunkDecoder:
    """Cuts a chunked body into the chunks that the sender made.

    A chunk above `max_chunk_bytes` is never held: its first `HEAD_BYTES` bytes come out at once in `oversized`, the
    rest is skipped and the chunks after it come as usual.

    Attributes:
        sizes: size lines that came before, of chunks that may be held.
    """

    HEAD_BYTES: Final = 2048

    def __init__(self, max_chunk_bytes: int) -> None:
        self._max_chunk_bytes = max_chunk_bytes
        self.sizes: dict[bytes, int] = {}
        self._parts: list[bytes] = []  # what is left of earlier reads
        self._have_bytes = 0
        self._need_bytes = 0  # below this many bytes no chunk can be complete
        self._skip_bytes = 0  # rest of an oversized chunk
        self.oversized: list[bytes] = []
        self.ended = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the chunks that `data` completes, in order; sets `ended` at the last chunk.

        Raises:
            ChunkError: broken framing.
        """
        return self.cut(self.joined(data), 0)

    def joined(self, data: bytes) -> bytes:
        """First half of `feed`: what is left of earlier reads, and `data`; nothing while no chunk can be complete."""
        if self._skip_bytes:
            data = self._skip(data)
        if self._parts:
            self._parts.append(data)
            self._have_bytes += len(data)
            if self._have_bytes < self._need_bytes:
                return b""
            data = b"".join(self._parts)
            self._parts.clear()
        return data

    def cut(self, data: bytes, at: int) -> list[bytes]:
        """Second half of `feed`: the chunks of what `joined` gave from `at` on, where one begins; the rest is kept."""
        chunks: list[bytes] = []
        if at < len(data):
            at = self._cut(data, at, chunks)
            if at < len(data) and not self.ended:
                rest = data[at:] if at else data
                self._parts.append(rest)
                self._have_bytes = len(rest)
        return chunks

    def _cut(self, data: bytes, at: int, chunks: list[bytes]) -> int:
        """Append the whole chunks of `data`; returns where the rest begins."""
        end = len(data)
        sizes = self.sizes
        self._need_bytes = 0
        while at < end:
            line_end = data.find(b"\r\n", at, at + MAX_SIZE_LINE_BYTES)
            if line_end < 0:
                if end - at >= MAX_SIZE_LINE_BYTES:
                    raise ChunkError("chunk size line is too long")
                break
            line = data[at:line_end]
            size = sizes.get(line)
            if size is None:
                size = self.read_size(line)
            start = line_end + 2
            stop = start + size
            if size == 0:
                return self._finish(data, at, start)
            if stop + 2 > end:
                if size > self._max_chunk_bytes:
                    return self._oversize(data, at, start, stop + 2)
                self._need_bytes = stop + 2 - at
                break
            if not data.startswith(b"\r\n", stop):
                raise ChunkError("chunk does not end where its size says")
            if size > self._max_chunk_bytes:
                self.oversized.append(data[start : start + self.HEAD_BYTES])
            else:
                chunks.append(data[start:stop])
            at = stop + 2
        return at

    def read_size(self, line: bytes) -> int:
        """The size that a line says, which has not come before; raises ChunkError."""
        match = _HEX.fullmatch(line)
        if match is None:
            raise ChunkError("chunk size is not hexadecimal")
        size = int(match[1], 16)
        if size <= self._max_chunk_bytes and len(self.sizes) < CACHED_SIZES:
            self.sizes[line] = size
        return size

    def _oversize(self, data: bytes, at: int, start: int, stop: int) -> int:
        """Begin to skip a chunk that is too large to hold, once its first bytes are there."""
        head_end = min(start + self.HEAD_BYTES, stop - 2)
        if len(data) < head_end:
            self._need_bytes = head_end - at
            return at
        self.oversized.append(data[start:head_end])
        self._skip_bytes = stop - len(data)
        return len(data)

    def _skip(self, data: bytes) -> bytes:
        skipped = min(self._skip_bytes, len(data))
        self._skip_bytes -= skipped
        return data[skipped:]

    def _finish(self, data: bytes, at: int, start: int) -> int:
        """Take the last chunk with its trailer section."""
        if data.startswith(b"\r\n", start):
            self.ended = True
            return start + 2
        trailer_end = data.find(b"\r\n\r\n", start)
        if trailer_end < 0:
            if len(data) - start > MAX_TRAILER_BYTES:
                raise ChunkError("trailer section is too long")
            return at
        self.ended = True
        return trailer_end + 4
