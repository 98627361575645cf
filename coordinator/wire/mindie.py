"""Messages of a MindIE decode instance's result stream (MindIE protocol page §5.2-§5.4).

One message is `reqId:<id> NUL <keyword>:<body> NUL`; a heartbeat is `ka:heartbeat NUL`. The body is opaque: it may hold
colons and NULs and, for vLLM streams, ends in a NUL of its own. A message therefore ends at a NUL that is followed by
the end of the sender's HTTP chunk or by the beginning of another message; nothing else is exact.
"""

import re
from enum import Enum
from typing import Final

from coordinator.wire.chunked import ChunkDecoder

MAX_KEYWORD_BYTES = 16
MAX_ID_BYTES = 1024
NUL: Final = 0


class Kind(Enum):
    """What a message says."""

    DATA = b"data"
    LAST_DATA = b"lastData"
    ERROR = b"error"
    RETRY = b"retry"
    CLOSE = b"close"
    HEARTBEAT = b"ka"
    UNKNOWN = b"unknown"
    OVERSIZED = b"oversized"
    """Made here, not sent: the message was above the limit and its body is gone."""


_PLAIN_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")

Frame = tuple[bytes, Kind, bytes]
"""Request id (b"" when the message names none), kind, body."""

_KINDS = {kind.value: kind for kind in Kind if kind not in (Kind.UNKNOWN, Kind.OVERSIZED)}
_DATA: Final = Kind.DATA
_DATA_START: Final = b"data:"
_STARTS = (b"reqId:", *(keyword + b":" for keyword in _KINDS))
_LONGEST_START = max(map(len, _STARTS))


class ResultParser:
    """Turns the raw, still chunk-framed bytes of `GET /dresult` into messages.

    Bytes may be split anywhere. Messages may share a chunk, and one message may be spread over several chunks, with one
    exception that no parser can see: a body that ends in NUL must end in the chunk of its terminator.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._decoder = ChunkDecoder(max_message_bytes)
        self._max_message_bytes = max_message_bytes
        self._rid = b""  # in force until the chunk in which its message ends is over
        self._keyword_due = False  # the id was read, what it says was not
        self._pending = bytearray()  # a message that began in an earlier chunk
        self._searched = 0  # no end of it lies before this offset

    @property
    def ended(self) -> bool:
        """Whether the stream's last chunk was read."""
        return self._decoder.ended

    def feed(self, data: bytes) -> list[Frame]:
        """Return the messages that `data` completes.

        Raises:
            ChunkError: the bytes are no chunked body.
        """
        frames: list[Frame] = []
        data = self._decoder.joined(data)
        at = 0 if self._pending or self._keyword_due else self._take_simple(data, frames)
        for chunk in self._decoder.cut(data, at):
            self._parse(chunk, frames)
        if self._decoder.oversized:
            frames += [(_id_of(head), Kind.OVERSIZED, b"") for head in self._decoder.oversized]
            self._decoder.oversized.clear()
        return frames

    def _take_simple(self, data: bytes, frames: list[Frame]) -> int:
        """Read messages that are one chunk each, their only NULs at their end; returns where one begins that is not.

        That is nearly all of them. They are cut where they seem to end, and are what they seem to be where their
        chunks' sizes say so too.
        """
        at = 0
        sizes = self._decoder.sizes
        pieces = data.split(b"\0\r\n")
        pieces.pop()
        for piece in pieces:
            head, _, said = piece.partition(b"\0")
            line, _, rid = head.partition(b"\r\nreqId:")
            size = sizes.get(line)
            if size is None:
                size = self._read_size(line)
            # 8: what an id begins with, and two NULs
            if len(rid) + len(said) + 8 != size or (NUL in said and said.find(NUL) < len(said) - 1):
                break
            if said[:5] == _DATA_START:  # in less time than `startswith`
                frames.append((rid, _DATA, said[5:]))
            else:
                keyword, colon, body = said.partition(b":")
                if not colon:
                    break
                frames.append((rid, _KINDS.get(keyword, Kind.UNKNOWN), body))
            at += len(piece) + 3
        return at

    def _read_size(self, line: bytes) -> int:
        """What a chunk's size line says, where it is a plain one; -1 where it needs a closer look."""
        if _PLAIN_SIZE.fullmatch(line) is None:
            return -1
        size = self._decoder.read_size(line)
        return size if size <= self._max_message_bytes else -1

    def _parse(self, chunk: bytes, frames: list[Frame]) -> None:
        """Read a chunk that holds anything but exactly one simple message."""
        pending = self._pending
        pending += chunk
        at = 0
        while at < len(pending):
            after = self._read_id(at) if pending.startswith(b"reqId:", at) else self._read_message(at, frames)
            if after < 0:
                break
            at = after
            self._searched = 0
        if at:
            del pending[:at]
            self._searched = max(0, self._searched - at)
        if not pending:
            if not self._keyword_due:
                self._rid = b""
        elif len(pending) > self._max_message_bytes:
            frames.append((self._rid, Kind.OVERSIZED, b""))
            self._reset()

    def _reset(self) -> None:
        self._pending.clear()
        self._rid, self._keyword_due, self._searched = b"", False, 0

    def _read_id(self, at: int) -> int:
        """Read `reqId:<id> NUL`; returns the offset behind it, or -1 when it is not all there."""
        end = self._pending.find(NUL, at + 6)
        if end < 0:
            return -1
        self._rid = bytes(self._pending[at + 6 : end])
        self._keyword_due = True
        return end + 1

    def _read_message(self, at: int, frames: list[Frame]) -> int:
        """Read `<keyword>:<body> NUL`; returns the offset behind it, or -1 when it is not all there."""
        pending = self._pending
        colon = pending.find(b":", at, at + MAX_KEYWORD_BYTES)
        nul = pending.find(NUL, at, at + MAX_KEYWORD_BYTES)
        if nul >= 0 and (colon < 0 or nul < colon):
            self._keyword_due = False
            return nul + 1  # no colon, no message: the original ignores it too
        if colon < 0 and len(pending) - at < MAX_KEYWORD_BYTES:
            return -1
        end = self._find_end(max(colon + 1, at, self._searched))
        if end < 0:
            return -1
        kind = _KINDS.get(bytes(pending[at:colon]), Kind.UNKNOWN) if colon >= 0 else Kind.UNKNOWN
        frames.append((self._rid, kind, bytes(pending[colon + 1 : end])))
        self._keyword_due = False
        return end + 1

    def _find_end(self, start: int) -> int:
        """Offset of the NUL that ends a body, or -1; remembers how far it has looked."""
        pending, size = self._pending, len(self._pending)
        end = pending.find(NUL, start)
        while end >= 0:
            if end + 1 == size or pending.startswith(_STARTS, end + 1):
                return end
            if size - end <= _LONGEST_START:
                rest = bytes(pending[end + 1 :])
                if any(begin.startswith(rest) for begin in _STARTS):
                    self._searched = end
                    return -1
            end = pending.find(NUL, end + 1)
        self._searched = size
        return -1


def _id_of(head: bytes) -> bytes:
    """The request id in the first bytes of an oversized message, or b""."""
    if not head.startswith(b"reqId:"):
        return b""
    end = head.find(NUL, 6, 6 + MAX_ID_BYTES)
    return head[6:end] if end > 0 else b""
