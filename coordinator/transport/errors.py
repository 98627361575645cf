"""What can go wrong with a connection to an engine, in a bounded set of words."""

import errno
import ssl
from typing import Final, Literal

Reason = Literal[
    "connect_refused",
    "connect_timeout",
    "connect_failed",
    "dns_failed",
    "tls_failed",
    "reset",
    "closed",
    "bad_reply",
    "reply_too_large",
    "timeout",
    "key_refused",
]
KEY_REFUSED: Final = (401, 403)  # what an engine answers to credentials that it does not take (RFC 9110 §15.5)

# We ran out of descriptors, ports or memory: no word about the other side.
OUR_OWN_SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class TransportError(Exception):
    """A call to an engine that brought no reply, or not the whole of it.

    Attributes:
        reason: a word from `Reason`; fit for a metric label.
        detail: text for the log only; it may hold addresses.
        connecting: no connection could be made, so the instance itself is in doubt; False where the shortage is ours.
        unsent: the request was surely not processed: no connection was there, or a reused one turned out to be closed
            before one byte of the reply came.
    """

    def __init__(self, reason: Reason, detail: str = "", *, connecting: bool = False, unsent: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason: Reason = reason
        self.detail = detail
        self.connecting = connecting
        self.unsent = unsent

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def connect_error(error: OSError, where: str) -> TransportError:
    """Translate what opening a connection raised. `where`: the address, for the detail."""
    reason: Reason
    if isinstance(error, ConnectionRefusedError):
        reason = "connect_refused"
    elif isinstance(error, ssl.SSLError):
        reason = "tls_failed"
    elif isinstance(error, TimeoutError):
        reason = "connect_timeout"
    else:
        reason = "connect_failed"
    ours = error.errno in OUR_OWN_SHORTAGE
    return TransportError(reason, f"{where}: {error}", connecting=not ours, unsent=True)


def loss_error(error: Exception | None, where: str, *, unsent: bool) -> TransportError:
    """Translate what asyncio tells about a connection that went away in use; None: the peer closed it in order."""
    if error is None:
        return TransportError("closed", f"{where}: closed by the peer", unsent=unsent)
    if isinstance(error, ssl.SSLError):
        return TransportError("tls_failed", f"{where}: {error}")
    return TransportError("reset", f"{where}: {error}", unsent=unsent)


def key_refused(status: int, where: str) -> TransportError:
    """What a status of `KEY_REFUSED` means where the credentials were ours: the client has no part in it."""
    return TransportError("key_refused", f"{where}: status {status}")
