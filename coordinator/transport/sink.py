"""Where an engine's reply goes piece by piece."""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from .errors import TransportError
from .reply import Headers


# no Protocol: compiled code calls what a class of its own declares without looking it up
@mypyc_attr(allow_interpreted_subclasses=True)
class ReplySink(ABC):
    """Where a reply goes as it comes. All calls come straight from the socket's callback: they must be quick.

    The order is `head`, any number of `data`, then exactly one of `end` and `lost`; `lost` may come first too. Once the
    stream was closed from our side nothing is called any more.
    """

    __slots__ = ()

    @abstractmethod
    def head(self, status: int, headers: Headers) -> None:
        """Take status and headers (lower-case names) of the final reply; interim ones (1xx) are not shown."""

    @abstractmethod
    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes, free of chunk framing; `now_s`: monotonic time at which they were read."""

    @abstractmethod
    def end(self, now_s: float) -> None:
        """Take note that the body is complete by its own framing."""

    @abstractmethod
    def lost(self, error: TransportError) -> None:
        """Take note that nothing more will come, and that the reply is not complete."""
