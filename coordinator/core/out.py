"""Where an engine puts the answer of one request."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from mypy_extensions import mypyc_attr


# no Protocol: compiled code calls what a class of its own declares without looking it up
@mypyc_attr(allow_interpreted_subclasses=True)
class Out(ABC):
    """Where an engine puts the answer of one request; the relay implements it, a list does in tests.

    All calls are synchronous and cheap; none blocks and none raises for a client that has left (the request's task is
    cancelled instead).
    """

    __slots__ = ()

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether anything was sent to the client: from then on nothing can be retried."""

    @abstractmethod
    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send stream bytes as they are. `now_s`: monotonic time of arrival. `token`: counts for TTFT and ITL."""

    @abstractmethod
    def finish(self, data: bytes, now_s: float, *, token: bool = True, after: bytes = b"") -> None:
        """Send the last stream bytes, what the family's streams end with if it is not there yet, and the end.

        `after`: the stream's bytes before `data`, as far back as the caller knows them.
        """

    @abstractmethod
    def only_opens(self, data: bytes) -> bool:
        """Whether a stream piece only opens the stream (a role without content), by the family's rules."""

    @abstractmethod
    def ends(self, data: bytes) -> bool:
        """Whether `data`, the last bytes of a stream, holds the family's own sign of a whole answer."""

    @abstractmethod
    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Give the relay the means to slow this request's own source down while the client is slow."""

    @abstractmethod
    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:
        """Send a complete answer that is not a stream."""

    @abstractmethod
    def hold(self) -> None:
        """See core.gather."""

    @abstractmethod
    def flush(self) -> None:
        """See core.gather."""
