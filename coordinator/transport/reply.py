"""What comes back from an engine: whole, or piece by piece into a sink."""

from typing import Protocol

from msgspec import Struct

from .errors import TransportError

Headers = tuple[tuple[bytes, bytes], ...]


class Reply(Struct, frozen=True):
    """A whole reply.

    Attributes:
        headers: in the order of the wire, names in lower case. Where the body came compressed it is plain here, and
            `content-encoding` and `content-length` are gone.
        truncated: the body was cut, as happens to long error replies.
    """

    status: int
    headers: Headers
    body: bytes
    truncated: bool = False

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header of this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class ReplySink(Protocol):
    """Where a reply goes as it comes. All calls come straight from the socket's callback: they must be quick.

    The order is `head`, any number of `data`, then exactly one of `end` and `lost`; `lost` may come first too. Once the
    stream was closed from our side nothing is called any more.
    """

    def head(self, status: int, headers: Headers) -> None:
        """Take status and headers (lower-case names) of the final reply; interim ones (1xx) are not shown."""
        ...

    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes, free of chunk framing; `now_s`: monotonic time at which they were read."""
        ...

    def end(self, now_s: float) -> None:
        """Take note that the body is complete by its own framing."""
        ...

    def lost(self, error: TransportError) -> None:
        """Take note that nothing more will come, and that the reply is not complete."""
        ...
