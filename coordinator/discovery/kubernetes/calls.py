"""Lists and watches as the API server offers them ("Kubernetes API Concepts": efficient detection of changes)."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
from kubernetes_asyncio.client import ApiClient

from .errors import Expired, Unreachable
from .objects import Event, Page, Status, read

PAGE_ITEMS: Final = 500
CALL_S: Final = 30.0
GRACE_S: Final = 10.0  # that a watch may outlive the time it was asked to last
MAX_LINE_BYTES: Final = 16 << 20
MAX_REFUSAL_BYTES: Final = 4096
GONE: Final = 410
OK: Final = 200
# a peer that is gone without a word is noticed within half a minute
KEEP_ALIVE: Final = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Calls:
    """Calls for the objects of one kind.

    Args:
        client: of a session.
        path: of their collection.
        selector: labels that they must have.
    """

    def __init__(self, client: ApiClient, path: str, selector: str) -> None:
        self._client = client
        self._path = path
        self._query = {"labelSelector": selector} if selector else {}

    async def list_all(self) -> tuple[list[Any], str]:
        """All objects, undecoded, and the version to watch from; raises Unreachable, Expired."""
        items: list[Any] = []
        query: dict[str, str] = {"limit": str(PAGE_ITEMS)}
        while True:
            try:
                async with asyncio.timeout(CALL_S), self._get(query) as response:
                    page = read(await response.read(), Page)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise Unreachable(_broken(error)) from None
            items += page.items or ()
            if not page.metadata.go_on:
                return items, page.metadata.resource_version
            query["continue"] = page.metadata.go_on

    @contextlib.asynccontextmanager
    async def watch(self, version: str, last_s: float) -> AsyncIterator["Watch"]:
        """Watch from a version on, for `last_s`.

        Raises:
            Unreachable: it cannot be begun.
            Expired: the version is too old.
        """
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(max(1, int(last_s)))
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(CALL_S):
                    response = await stack.enter_async_context(self._get(query))
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise Unreachable(_broken(error)) from None
            _keep_alive(response)
            yield Watch(response, last_s + GRACE_S)

    @contextlib.asynccontextmanager
    async def _get(self, query: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        response: Any = await self._client.call_api(
            self._path,
            "GET",
            query_params=[*self._query.items(), *query.items()],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(total=None),
        )
        async with response:
            if response.status != OK:
                raise await _refusal(response)
            yield response


class Watch:
    """A watch that has begun."""

    def __init__(self, response: aiohttp.ClientResponse, within_s: float) -> None:
        self._response = response
        self._rest = b""
        self._end_s = asyncio.get_running_loop().time() + within_s

    async def events(self) -> list[Event] | None:
        """The next events; None: it has ended or is broken, and trying to begin another one will tell what is wrong.

        Raises:
            Unreachable: the server says what cannot be read, or that the watch has failed.
            Expired: the version is too old.
        """
        try:
            async with asyncio.timeout_at(self._end_s):
                data = await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise Unreachable("a line of the watch is too long")
        return [_event(line) for line in lines if line.strip()]


def _event(line: bytes) -> Event:
    event = read(line, Event)
    if event.type != "ERROR":
        return event
    status = read(event.object, Status)
    if status.code == GONE:
        raise Expired
    raise Unreachable(f"the watch ended: {status.message or status.reason or 'no reason given'}")


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    if response.status == GONE:
        return Expired()
    body = await response.content.read(MAX_REFUSAL_BYTES)
    try:
        told = read(body, Status).message
    except Unreachable:
        told = None
    wait = response.headers.get("Retry-After", "")
    words = " ".join((told or response.reason or "").split())[:300]
    return Unreachable(f"status {response.status}: {words}", float(wait) if wait.isdecimal() else 0.0)


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    connection = response.connection
    sock = connection.transport.get_extra_info("socket") if connection and connection.transport else None
    if sock is None:
        return  # the whole answer was there already, and the connection is free again
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _broken(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CALL_S:g} s"
    return " ".join(str(error).split())[:300] or type(error).__name__
