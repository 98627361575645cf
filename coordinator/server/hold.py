"""Keeps back what is written, to make one write of it: each is a system call."""

from collections.abc import Iterable
from typing import Protocol


class Wire(Protocol):
    """What an exchange needs of a transport."""

    def write(self, data: bytes, /) -> None:
        """See asyncio.Transport."""
        ...

    def writelines(self, pieces: Iterable[bytes], /) -> None:
        """See asyncio.Transport."""
        ...

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        ...


class Hold:
    """Takes the transport's place for a while, so that who does not hold back pays nothing for who does."""

    __slots__ = ("_bytes", "_pieces", "_wire")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pieces: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes, /) -> None:
        """Keep it."""
        self._pieces.append(data)
        self._bytes += len(data)

    def writelines(self, pieces: Iterable[bytes], /) -> None:
        """Keep them."""
        for piece in pieces:
            self.write(piece)

    def get_write_buffer_size(self) -> int:
        """What waits in the transport, and here."""
        return self._wire.get_write_buffer_size() + self._bytes

    def release(self) -> None:
        """Write it all at once."""
        if self._pieces:
            self._wire.write(b"".join(self._pieces))
