"""What the API families have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from coordinator.core.errors import BadRequest, RequestError
from coordinator.core.ports import Route
from coordinator.core.request import Ask, Headers

from . import bodies
from .bodies import Body, Walked

_DATA = b"data:"
_NO_DATA = (b":", b"event:", b"id:", b"retry:")
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Family(ABC):
    """A `core.ports.ApiFamily` in the making: whatever suits most families; the rest is theirs.

    Attributes:
        prefixes: paths that start so are this family's, served or not: an unknown one is answered in its error shape.
    """

    name: str
    routes: Sequence[Route] = ()
    prefixes: tuple[str, ...] = ()
    stream_type: bytes = EVENT_STREAM
    ends_with: bytes = b""

    def claims(self, path: str, body: Body) -> bool:
        """Whether this body is of this family, where two families share a path. False for what cannot be read."""
        try:
            self.parse(path, body)
        except BadRequest:
            return False
        return True

    def check_headers(self, headers: Headers) -> None:  # noqa: B027 (most families take any)
        """Refuse what a header announces and the body therefore is not; names are lower-case. Raises BadRequest."""

    @abstractmethod
    def parse(self, path: str, body: Body) -> Ask:
        """Read a request body as far as routing needs it.

        Raises:
            BadRequest: in plain words that name the field.
        """

    def engine_path(self, path: str) -> str:
        """The path under which engines know this call: without the slash that clients may put at its end."""
        return path.rstrip("/") or "/"

    def renamed(self, path: str, body: Body, model: str) -> tuple[str, Body]:
        """An engine's path and a body with another model name, every other value byte for byte as it was.

        A walked body is changed in place.

        Raises:
            BadRequest: the body cannot be read.
        """
        walked = body if isinstance(body, Walked) else bodies.walk(body)
        if "model" not in walked.fields:
            return path, body
        walked.change("model", bodies.dump(model))
        return path, walked if isinstance(body, Walked) else bytes(walked.written())

    def error_body(self, error: RequestError) -> bytes:
        """A whole error answer: `{"error":"text"}`."""
        return bodies.dump({"error": error.message})

    def error_event(self, error: RequestError) -> bytes:
        """The same as the last piece of a stream that has begun."""
        return b"data: " + self.error_body(error) + b"\n\n"

    def only_opens(self, piece: bytes) -> bool:
        """Whether whole lines of a stream only open it: comments, other fields than `data`, and what `opens` knows.

        In doubt it says no: then a piece counts as a token that is none.
        """
        return piece.endswith(b"\n") and all(map(self._line_opens, piece.splitlines()))

    def opens(self, data: bytes) -> bool:  # noqa: ARG002 (most families' streams have no opening event)
        """Whether an event with this value of `data` holds no token yet."""
        return False

    def ends(self, data: bytes) -> bool:  # noqa: ARG002 (no sign to go by)
        """Whether the last bytes of a stream (at least its last event) hold the sign of a whole answer.

        True for families whose streams carry no such sign.
        """
        return True

    def _line_opens(self, line: bytes) -> bool:
        if line.startswith(_DATA):
            return self.opens(line[len(_DATA) :])
        return not line or line.startswith(_NO_DATA)
