"""A request body that comes in chunks."""

from coordinator.core.errors import BadRequest, BodyTooLarge, HeadersTooLarge
from coordinator.server.pieces import Pieces

_HEX = b"0123456789abcdefABCDEF"
_MAX_SIZE_DIGITS = 16
_MAX_SIZE_LINE_BYTES = 1024
_LINES_AT_ONCE = 500  # well below a millisecond of work

_SIZE, _CHUNK, _CHUNK_END, _TRAILER = range(4)


class ChunkedBody:
    """Collects a chunked body and knows the byte at which it ends (RFC 9112 §7.1).

    The grammar is taken strictly (CRLF only, plain hexadecimal sizes): a proxy in front that reads it in another way
    must not be able to hide a second request in it. Extensions and trailers are skipped.

    Args:
        limit_bytes: the most that the body may hold.
        trailer_limit_bytes: the most that the trailers may take.

    Attributes:
        body: what has come of it.
    """

    __slots__ = ("_later", "_left", "_limit_bytes", "_line", "_state", "_trailer_bytes_left", "body")

    def __init__(self, limit_bytes: int, trailer_limit_bytes: int) -> None:
        self.body = Pieces()
        self._limit_bytes = limit_bytes
        self._trailer_bytes_left = trailer_limit_bytes
        self._state = _SIZE
        self._left = 0
        self._line = self._later = b""

    @property
    def behind(self) -> bool:
        """Whether the last data came in so many small chunks that `feed` must be called again, be it with nothing."""
        return bool(self._later)

    def feed(self, data: bytes) -> bytes | None:
        """Take what came in.

        Returns:
            The bytes behind the end of the body, or None while the end is not there yet.

        Raises:
            BadRequest: the framing is broken.
            BodyTooLarge: a chunk was announced that would exceed the limit.
            HeadersTooLarge: the trailers exceed theirs.
        """
        if self._later:
            data, self._later = self._later + data, b""
        at, end, lines_left = 0, len(data), _LINES_AT_ONCE
        while at < end:
            if self._state == _CHUNK:
                at = self._take_piece(data, at)
                continue
            if self._state == _SIZE and not self._line:
                at, lines_left = self._take_chunks(data, at, lines_left)
                if lines_left <= 0:
                    self._later = data[at:]
                    break
            cut = data.find(b"\n", at) + 1
            self._line += data[at : cut or end]
            if len(self._line) > (self._trailer_bytes_left if self._state == _TRAILER else _MAX_SIZE_LINE_BYTES):
                raise self._line_too_long()
            if not cut:
                break
            at = cut
            if self._take_line():
                return data[at:]
            lines_left -= 1
        return None

    def _take_chunks(self, data: bytes, at: int, lines_left: int) -> tuple[int, int]:
        """Take chunks that are there as a whole and framed in the plainest way; all others are for the caller.

        Returns:
            Where they end, and how many lines may still be taken.
        """
        body, room = self.body, self._limit_bytes - len(self.body)
        known, size = b"", 0
        while lines_left > 0:
            cut = data.find(b"\r\n", at, at + _MAX_SIZE_DIGITS + 2)
            if cut <= at:
                break
            line = data[at:cut]
            if line != known:
                if line.strip(_HEX):
                    break
                known, size = line, int(line, 16)
            start, end = cut + 2, cut + 2 + size
            room -= size
            if not size or room < 0 or data[end : end + 2] != b"\r\n":
                break
            body.add(data[start:end])
            at = end + 2
            lines_left -= 2
        return at, lines_left

    def _take_piece(self, data: bytes, at: int) -> int:
        """Take what is there of a chunk; returns where that ends."""
        piece = data[at : at + self._left]
        self.body.add(piece)
        self._left -= len(piece)
        if not self._left:
            self._state = _CHUNK_END
        return at + len(piece)

    def _line_too_long(self) -> BadRequest:
        if self._state == _TRAILER:
            return HeadersTooLarge("the trailers of the request are too large")
        return BadRequest("the chunked framing of the body is broken")

    def _take_line(self) -> bool:
        """Judge a complete line; true when it ends the body."""
        line, self._line = self._line, b""
        if line[-2:] != b"\r\n" or b"\r" in line[:-2]:
            raise BadRequest("the chunked framing of the body is broken")
        if self._state == _SIZE:
            self._left = self._size(line[:-2])
            self._state = _CHUNK if self._left else _TRAILER
            return False
        if self._state == _TRAILER:
            self._trailer_bytes_left -= len(line)
            return line == b"\r\n"
        if line != b"\r\n":
            raise BadRequest("a chunk of the body is longer than its size")
        self._state = _SIZE
        return False

    def _size(self, line: bytes) -> int:
        digits = line.partition(b";")[0]
        if not 0 < len(digits) <= _MAX_SIZE_DIGITS or digits.strip(_HEX):
            raise BadRequest("the chunked framing of the body is broken")
        size = int(digits, 16)
        if len(self.body) + size > self._limit_bytes:
            raise BodyTooLarge(f"the body is larger than {self._limit_bytes} bytes")
        return size
