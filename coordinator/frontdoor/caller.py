"""Who calls: what a client's headers say, found out once for all requests that a connection sends with them."""

from coordinator.api.routes import RouteTable
from coordinator.core.errors import InvalidKey, UnknownPath, WrongMethod
from coordinator.core.request import Headers
from coordinator.frontdoor.headers import forwardable, request_id
from coordinator.security.guard import Guard
from coordinator.security.keys import Key
from coordinator.server.exchange import Exchange

OPEN = frozenset(("live", "ready"))  # operations that need no key: probes


class Caller:
    """One client's headers, as the front door sees them.

    Attributes:
        keyed: whether callers needed a key, which does not travel on then.
        ident: its own request id, if it gave one that can be used.
        headers: those that travel on to an engine.
        key: its key as it was found; the keys may have been exchanged since.
    """

    __slots__ = ("headers", "ident", "key", "keyed")

    def __init__(self, headers: Headers, guard: Guard, key: Key | None = None) -> None:
        self.keyed = guard.on
        self.key = key
        self.ident = request_id(headers)
        self.headers = forwardable(headers, credentials=not guard.on)


def caller_of(exchange: Exchange, guard: Guard) -> Caller:
    """Who sends this request; hot."""
    known = exchange.kept
    if isinstance(known, Caller) and known.keyed is guard.on:
        return known
    made = Caller(exchange.headers, guard)
    exchange.keep(made)
    return made


def key_of(exchange: Exchange, guard: Guard) -> Key | None:
    """The key of a request that needs one, if the guard wants keys; hot.

    Raises:
        InvalidKey: it has none, or a wrong one.
    """
    if not guard.on:
        return None
    caller = caller_of(exchange, guard)
    caller.key = key = guard.find(exchange.headers, caller.key)
    return key


def let_in(guard: Guard, table: RouteTable, method: str, path: str, headers: Headers) -> Caller | None:
    """Judge a request by its head alone; see `FrontDoor.gate`."""
    if not guard.on:
        return None
    try:
        key = guard.find(headers)
    except InvalidKey:
        try:
            match = table.match(method, path)
        except (UnknownPath, WrongMethod):
            return None  # refused in its turn
        if match.operation in OPEN:
            return None
        raise
    return Caller(headers, guard, key)
