"""Bounded expansion of compressed replies.

We never ask for compression, so only an engine's front (a gateway) that compresses unasked comes here.
"""

import zlib
from collections.abc import Iterator

PIECE_BYTES = 1 << 20
MAX_EXPANDED_PER_FEED = 16 << 20
GZIP_WBITS = 31
ZLIB_WBITS = 15
RAW_WBITS = -15
ZLIB_HEADER_BYTES = 2
IDENTITY = (b"", b"identity")


class ExpansionError(Exception):
    """The bytes are not what `Content-Encoding` says; `bomb`: they expand beyond the bound."""

    def __init__(self, message: str, *, bomb: bool = False) -> None:
        super().__init__(message)
        self.bomb = bomb


class Expander:
    """Expands one body, fed in any pieces.

    Args:
        encoding: lower-case value of `Content-Encoding`.

    Raises:
        ExpansionError: for an encoding other than gzip and deflate, nested ones included.
    """

    __slots__ = ("_deflate", "_engine", "_first", "_started")

    def __init__(self, encoding: bytes) -> None:
        if encoding not in (b"gzip", b"x-gzip", b"deflate"):
            raise ExpansionError("unknown content encoding")
        self._deflate = encoding == b"deflate"
        self._engine = zlib.decompressobj(ZLIB_WBITS if self._deflate else GZIP_WBITS)
        self._first = b""  # start of a deflate body, until its kind is known
        self._started = False

    @property
    def finished(self) -> bool:
        """Whether the compressed data ended where it may; an empty body counts."""
        return self._engine.eof or not (self._started or self._first)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` expands to, in pieces of at most 1 MiB.

        Raises:
            ExpansionError: for corrupt data, and for more than 16 MiB out of one feed.
        """
        data = self._kind_known(data)
        total = 0
        while data:
            if self._engine.eof:
                self._next_member()
            self._started = True
            for piece in self._pieces(data):
                total += len(piece)
                if total > MAX_EXPANDED_PER_FEED:
                    raise ExpansionError("compressed body expands too far", bomb=True)
                yield piece
            data = self._engine.unused_data

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Expand up to the end of the data or of the member, whichever comes first."""
        full = True
        while data or full:  # after a full piece zlib may hold more, although it took all input
            try:
                piece = self._engine.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise ExpansionError("corrupt compressed body") from error
            if piece:
                yield piece
            full = len(piece) == PIECE_BYTES and not self._engine.eof
            data = self._engine.unconsumed_tail

    def _next_member(self) -> None:
        """Gzip data may be several members in a row (RFC 1952 §2.2)."""
        if self._deflate:
            raise ExpansionError("data after the compressed body")
        self._engine = zlib.decompressobj(GZIP_WBITS)

    def _kind_known(self, data: bytes) -> bytes:
        """Hold the first two bytes of a deflate body back: some servers send it without its zlib header."""
        if not self._deflate or self._started:
            return data
        self._first += data
        if len(self._first) < ZLIB_HEADER_BYTES:
            return b""
        data, self._first = self._first, b""
        if data[0] & 0x0F != zlib.DEFLATED or int.from_bytes(data[:ZLIB_HEADER_BYTES], "big") % 31:
            self._engine = zlib.decompressobj(RAW_WBITS)
        return data
