"""Web pages that call through the browser of somebody who can reach the management plane.

A browser says where a page is from (`Origin`, RFC 6454 §7; `Sec-Fetch-Site`, Fetch Metadata) and adds no credentials of
ours by itself. Where no key is wanted, that alone tells a page of ours from others; and a page can call itself ours by
having its own name resolve to our address (DNS rebinding). The name in `Host` is its own then.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

from .errors import Refused

READING = frozenset(("GET", "HEAD", "OPTIONS"))
OUR_SITE = ("same-origin", "none")
FORBIDDEN = 403


def refuse_strangers(request: web.Request, names: Collection[str] | None) -> None:
    """Let no page of another site change anything.

    Args:
        request: the call.
        names: lower-case names, beyond addresses and `localhost`, that are ours for certain; None: any, since callers
            have to show a key.

    Raises:
        Refused: 403.
    """
    if request.method in READING:
        return
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if origin is None and site is None:
        return  # no browser, or none that any page could steer
    host = request.headers.get("Host", "")
    if (origin is not None and origin.partition("://")[2] != host) or (site is not None and site not in OUR_SITE):
        raise Refused(FORBIDDEN, "calls from pages of other sites are refused")
    if names is not None and not _is_ours(host, names):
        raise Refused(
            FORBIDDEN,
            "a web page may change things only at an address, at localhost, or at a name of server.management_names; "
            "or set auth.management_keys",
        )


def _is_ours(host: str, names: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
