"""Who may manage, and a line in the log of what each caller did."""

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence

from aiohttp import web

from coordinator.core.errors import InvalidKey
from coordinator.observability.lines import quoted
from coordinator.security.keys import Key, Keyring
from coordinator.security.proxies import TrustedProxies

from .errors import Refused
from .pages import FORBIDDEN, READING, refuse_strangers

AUDIT = logging.getLogger("pd_coordinator.audit")
BEARER = 'Bearer realm="pd-coordinator"'
CHALLENGE = f'{BEARER}, Basic realm="pd-coordinator"'
WHO = web.RequestKey("who", str)
ABOUT = web.RequestKey("about", str)
"""What a call was about beyond its path: the id and address of an instance."""
METRICS = ("/metrics", "/metrics/engines")
UNAUTHORIZED = 401

_PATTERN = re.compile(r":[^{}]+}")  # of a template's name; what a route is called has it no more

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Screen:
    """Lets everybody in until it is given keys; from then on those alone, except to what is open.

    Attributes:
        proxies: whose word counts about the addresses of callers.
        open_metrics: whether `/metrics` needs no key.
        names: lower-case names of ours, for calls from web pages where no key is wanted.
    """

    def __init__(self, open_paths: Collection[str], polled: Collection[str]) -> None:
        """Args: `open_paths`: routes that need no key; `polled`: those that are called over and over."""
        self._open = frozenset(_PATTERN.sub("}", path) for path in open_paths)
        self._polled = frozenset(polled)
        self._ring: Keyring | None = None
        self.proxies = TrustedProxies()
        self.open_metrics = True
        self.names: Collection[str] = ()

    def take(self, keys: Sequence[Key] | None) -> None:
        """Take these keys in place of those before; None: nobody needs one."""
        self._ring = None if keys is None else Keyring(keys)

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for a key, which browsers may give as the password of basic credentials; refuse pages of other sites."""
        refuse_strangers(request, self.names if self._ring is None else None)
        if self._ring is not None and not self._is_open(_route(request)):
            headers = [(name.lower(), value) for name, value in request.raw_headers]
            try:
                request[WHO] = self._ring.find(headers, basic=True).name
            except InvalidKey as error:
                raise Refused(UNAUTHORIZED, error.message) from None
        return await handler(request)

    @web.middleware
    async def audit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log who asked for what and what came of it: changes and refusals at INFO, the rest at DEBUG."""
        reply = await handler(request)
        if reply.status == UNAUTHORIZED and not reply.prepared:
            # the live page asks for the key itself; at the offer of basic credentials the browser would, before it
            asks_itself = request.headers.get("Accept") == "text/event-stream"
            reply.headers["WWW-Authenticate"] = BEARER if asks_itself else CHALLENGE
        route = _route(request)
        quiet = request.method in READING or route in self._polled
        level = logging.DEBUG if quiet and reply.status not in (UNAUTHORIZED, FORBIDDEN) else logging.INFO
        if AUDIT.isEnabledFor(level):
            AUDIT.log(level, "%s", self._line(request, reply.status))
        return reply

    def _is_open(self, route: str) -> bool:
        return route in self._open or (route in METRICS and self.open_metrics)

    def _line(self, request: web.Request, status: int) -> str:
        headers = [(name.lower(), value) for name, value in request.raw_headers]
        client = self.proxies.client(request.remote or "", headers)
        who = request.get(WHO, "-")
        about = f" about={quoted(request[ABOUT])}" if ABOUT in request else ""
        return (
            f"management call key={quoted(who)} client={quoted(client)} method={quoted(request.method)}"
            f" path={quoted(request.path)}{about} status={status}"
        )


def _route(request: web.Request) -> str:
    """The template of the route; empty where there is none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical
