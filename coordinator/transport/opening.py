"""The head of a standing stream's reply, or the refusal that came instead; knows no socket."""

from .errors import TransportError
from .reader import END_OF_HEAD, ReplyReader
from .reply import Headers
from .sink import ReplySink

OK = 200
MAX_HEAD_BYTES = 65536
MAX_REFUSAL_BYTES = 4096


class Opening(ReplySink):
    """Reads up to the end of the head and no byte further, since the rest is wanted as it is on the wire.

    Attributes:
        accepted: the head is complete and is a 200 with chunked transfer coding.
        refusal: what came instead, for the log, once it is complete or long enough.
        status: of the head; 0 while it is not there.
    """

    __slots__ = ("_body", "_buffer", "_reply", "accepted", "refusal", "status")

    def __init__(self) -> None:
        self.accepted = False
        self.refusal: str | None = None
        self._buffer = bytearray()
        self._body = bytearray()
        self._reply = ReplyReader(self, bodiless=False, max_head_bytes=MAX_HEAD_BYTES)
        self.status = 0

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns those that follow an accepted head."""
        if self.status:
            self._read(data)
            return b""
        self._buffer += data
        if not self._head_read():
            return b""
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self.accepted:
            return rest
        self._read(rest)
        return b""

    def cut(self) -> str | None:
        """No more will come: returns the refusal as far as it was read, or None where there is not even a head."""
        return self._told() if self.status and self.refusal is None else self.refusal

    # --- the sink of the reply

    def head(self, status: int, headers: Headers) -> None:
        """Decide. A stream that is not chunked is refused for its head alone: its body may never end."""
        self.status = status
        chunked = any(name == b"transfer-encoding" for name, _ in headers)  # the reader knows no other coding
        if status == OK:
            self.accepted = chunked and not self._reply.expands
            if not self.accepted:
                self.refusal = "status 200, but not plain chunks"

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002  # no time matters here
        """Keep the start of a refusal's body."""
        self._body += data[: MAX_REFUSAL_BYTES - len(self._body)]

    def end(self, now_s: float) -> None:
        """Not called: the reader leaves it to its owner, which is this object."""

    def lost(self, error: TransportError) -> None:
        """Not called, as `end`."""

    # --- inside

    def _head_read(self) -> bool:
        """Read what there is of heads, interim ones included; True: the final one was among them."""
        while not self.status:
            end = self._buffer.find(END_OF_HEAD)
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    self.refusal = "head too long"
                return False
            end += len(END_OF_HEAD)
            head = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._read(head)
            if self.refusal is not None:
                return False
        return True

    def _read(self, data: bytes) -> None:
        self._reply.feed(data, 0.0)
        if self._reply.fault is not None:
            self.refusal = self._reply.fault.detail
        elif not self.accepted and self.refusal is None:
            enough = len(self._body) >= MAX_REFUSAL_BYTES
            if self.status and (self._reply.complete or enough):
                self.refusal = self._told()

    def _told(self) -> str:
        return f"status {self.status}: {self._body.decode('utf-8', 'replace')}"
