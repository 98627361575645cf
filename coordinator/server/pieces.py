"""Gathers a body that comes in pieces of any size."""

LONG_BYTES = 1 << 20
_PIECE_BYTES = 16384
_JOINED_BYTES = 65536


class Pieces:
    """The pieces of a body, to be put together once, at the end.

    A single growing buffer would be moved again and again, as a whole, while several bodies grow side by side. Small
    pieces are joined at once: each kept by itself, a client's one-byte chunks would cost forty times their size.
    """

    __slots__ = ("_parts", "_size_bytes", "_small")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._small = bytearray()
        self._size_bytes = 0

    def __len__(self) -> int:
        """How many bytes there are."""
        return self._size_bytes

    def add(self, piece: bytes) -> None:
        """Take a piece."""
        self._size_bytes += len(piece)
        if len(piece) < _PIECE_BYTES:
            self._small += piece
            if len(self._small) < _JOINED_BYTES:
                return
            piece = b""
        if self._small:
            self._parts.append(bytes(self._small))
            self._small.clear()
        if piece:
            self._parts.append(piece)

    @property
    def long(self) -> bool:
        """Whether putting them together takes a while: some 0.4 ms for each megabyte of memory not yet used."""
        return self._size_bytes >= LONG_BYTES

    def whole(self) -> bytes:
        """All of it; other threads run while a long one is put together, because all parts are plain bytes."""
        return b"".join((*self._parts, bytes(self._small)))
