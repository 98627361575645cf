"""A log stream that several processes may share: every line stays whole."""

import io
import os
import select

ONE_WRITE_BYTES = select.PIPE_BUF


class WholeLines(io.TextIOBase):
    """Writes text to a file descriptor in pieces that end at line ends and that a pipe takes as one.

    POSIX, write: up to PIPE_BUF bytes are not interleaved with what others write. A line above that goes alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Write whole lines; raises OSError when nobody takes them."""
        data = text.encode("utf-8", "backslashreplace")
        at = 0
        while at < len(data):
            end = at + ONE_WRITE_BYTES
            if end < len(data):
                end = data.rfind(b"\n", at, end) + 1 or data.find(b"\n", end) + 1 or len(data)
            self._put(memoryview(data)[at:end])
            at = end
        return len(text)

    def _put(self, piece: memoryview) -> None:
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]
