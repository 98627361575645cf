"""Clients that do not get as far as TLS: told, but not once each."""

import logging
import math
import ssl
from collections.abc import Callable

_TELL_EVERY_S = 10.0


class Refusals:
    """Logs failed handshakes, at most one line in 10 s: whoever can connect can cause them."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._count = 0
        self._told_s = -math.inf

    def note(self, error: OSError) -> None:
        """One more."""
        self._count += 1
        now_s = self._clock()
        if now_s - self._told_s < _TELL_EVERY_S:
            return
        self._log.warning("%d TLS handshakes failed, the last one: %s", self._count, _reason(error))
        self._told_s = now_s
        self._count = 0


def _reason(error: OSError) -> str:
    """What went wrong, in OpenSSL's words where they are there; none of the client's."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "broken off").lower().replace("_", " ")
    return "not in time" if isinstance(error, ConnectionAbortedError | TimeoutError) else "broken off"
