"""Errors of calls (xLLM protocol page §2.1)."""

from collections.abc import Mapping
from types import MappingProxyType

ENOSERVICE, ENOMETHOD, EREQUEST, ERPCTIMEDOUT = 1001, 1002, 1003, 1008
EINTERNAL, ELOGOFF, ELIMIT = 2001, 2003, 2004
STATUS_OF: Mapping[int, int] = MappingProxyType(
    {ENOSERVICE: 404, ENOMETHOD: 404, EREQUEST: 400, ERPCTIMEDOUT: 504, ELOGOFF: 503, ELIMIT: 503}
)
_CODE_OF = MappingProxyType({400: EREQUEST, 404: ENOMETHOD, 503: ELIMIT, 504: ERPCTIMEDOUT})


class RpcError(Exception):
    """A call was answered with an error, or is to be."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"[E{code}]{text}")
        self.code = code
        self.text = text

    @property
    def status(self) -> int:
        """The HTTP status that stands for it."""
        return STATUS_OF.get(self.code, 500)


class RpcLost(Exception):
    """A call got no answer: no connection, or none in time."""


def code_of(status: int) -> int:
    """The error code that an HTTP status stands for."""
    return _CODE_OF.get(status, EINTERNAL)
