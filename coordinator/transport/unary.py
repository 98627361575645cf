"""Collects a whole reply."""

import asyncio

from .errors import TransportError
from .reply import Headers, Reply
from .sink import ReplySink

FIRST_ERROR = 400


class Collector(ReplySink):
    """A sink that ends up with the reply, or with what went wrong; whoever waits for it derives from it.

    Args:
        max_reply_bytes: a longer body is `reply_too_large`.
        max_error_bytes: where the status is 400 or above, a longer body is cut there.

    Attributes:
        status: of the reply, as soon as its head is there; else 0.
        outcome: the `Reply`, or the `TransportError`; None until then.
    """

    __slots__ = ("_headers", "_max_bytes", "_max_error_bytes", "_parts", "_size", "outcome", "status")

    def __init__(self, max_reply_bytes: int, max_error_bytes: int) -> None:
        self.status = 0
        self.outcome: Reply | TransportError | None = None
        self._max_bytes = max_reply_bytes
        self._max_error_bytes = max_error_bytes
        self._headers: Headers = ()
        self._parts: list[bytes] = []
        self._size = 0

    def settled(self, outcome: Reply | TransportError) -> None:
        """Called once, with `outcome`."""
        raise NotImplementedError

    def head(self, status: int, headers: Headers) -> None:
        """Take the head."""
        self.status = status
        self._headers = headers
        if status >= FIRST_ERROR:
            self._max_bytes = self._max_error_bytes

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002  # the time matters to streams only
        """Take a part of the body, up to the limit; what comes after it is dropped until the reader notices."""
        room = self._max_bytes - self._size
        self._size += len(data)
        if len(data) <= room:
            self._parts.append(data)
        elif self.outcome is None:
            self._too_long(data[:room])

    def end(self, now_s: float) -> None:  # noqa: ARG002
        """The reply is whole."""
        if self.outcome is None:
            self._answer(truncated=False)

    def lost(self, error: TransportError) -> None:
        """There is no whole reply."""
        if self.outcome is None:
            self.outcome = error
            self.settled(error)

    def _too_long(self, rest: bytes) -> None:
        if self.status >= FIRST_ERROR:
            self._parts.append(rest)
            self._answer(truncated=True)
        else:
            self.lost(TransportError("reply_too_large", f"body above {self._max_bytes} bytes"))

    def _answer(self, *, truncated: bool) -> None:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.outcome = reply = Reply(self.status, self._headers, body, truncated)
        self.settled(reply)


class FutureReply(Collector):
    """Ends a future with the reply."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Reply], max_reply_bytes: int, max_error_bytes: int) -> None:
        super().__init__(max_reply_bytes, max_error_bytes)
        self._future = future

    def settled(self, outcome: Reply | TransportError) -> None:
        """See `Collector`; nothing happens where nobody waits any more."""
        if self._future.done():
            return
        if isinstance(outcome, Reply):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
