"""Collects a whole reply."""

import asyncio

from .errors import TransportError
from .reply import Headers, Reply

FIRST_ERROR = 400


class Collector:
    """A sink whose future ends with the reply.

    Args:
        future: gets the `Reply`, or the `TransportError`.
        max_reply_bytes: a longer body is `reply_too_large`.
        max_error_bytes: where the status is 400 or above, a longer body is cut there.
    """

    __slots__ = ("_future", "_headers", "_max_bytes", "_max_error_bytes", "_parts", "_size", "_status")

    def __init__(self, future: asyncio.Future[Reply], max_reply_bytes: int, max_error_bytes: int) -> None:
        self._future = future
        self._max_bytes = max_reply_bytes
        self._max_error_bytes = max_error_bytes
        self._status = 0
        self._headers: Headers = ()
        self._parts: list[bytes] = []
        self._size = 0

    def head(self, status: int, headers: Headers) -> None:
        """Take the head."""
        self._status = status
        self._headers = headers
        if status >= FIRST_ERROR:
            self._max_bytes = self._max_error_bytes

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002  # the time matters to streams only
        """Take a part of the body, up to the limit; what comes after it is dropped until the reader notices."""
        room = self._max_bytes - self._size
        self._size += len(data)
        if len(data) <= room:
            self._parts.append(data)
        elif not self._future.done():
            self._too_long(data[:room])

    def end(self, now_s: float) -> None:  # noqa: ARG002
        """The reply is whole."""
        self._answer(truncated=False)

    def lost(self, error: TransportError) -> None:
        """There is no whole reply."""
        if not self._future.done():
            self._future.set_exception(error)

    def _too_long(self, rest: bytes) -> None:
        if self._status >= FIRST_ERROR:
            self._parts.append(rest)
            self._answer(truncated=True)
        else:
            self.lost(TransportError("reply_too_large", f"body above {self._max_bytes} bytes"))

    def _answer(self, *, truncated: bool) -> None:
        if not self._future.done():
            parts = self._parts
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._future.set_result(Reply(self._status, self._headers, body, truncated))
