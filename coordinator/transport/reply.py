"""What comes back from an engine as a whole."""

from msgspec import Struct

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
