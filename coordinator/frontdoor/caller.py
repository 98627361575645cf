"""What the front door takes from a client's headers, once for all requests that a connection sends with them."""

from coordinator.core.request import Headers
from coordinator.frontdoor.headers import forwardable, request_id
from coordinator.security.keys import Key
from coordinator.server.exchange import Exchange


class Caller:
    """One client's headers, as the front door sees them.

    Attributes:
        credentials: whether its keys are among `headers`.
        ident: its own request id, if it gave one that can be used.
        headers: those that travel on to an engine.
        key: its key as it was found; the keys may have been exchanged since.
    """

    __slots__ = ("credentials", "headers", "ident", "key")

    def __init__(self, headers: Headers, *, credentials: bool, key: Key | None = None) -> None:
        self.credentials = credentials
        self.key = key
        self.ident = request_id(headers)
        self.headers = forwardable(headers, credentials=credentials)

    @classmethod
    def of(cls, exchange: Exchange, *, credentials: bool) -> "Caller":
        """Who sends this request."""
        known = exchange.kept
        if isinstance(known, Caller) and known.credentials is credentials:
            return known
        exchange.kept = made = cls(exchange.headers, credentials=credentials)
        return made
