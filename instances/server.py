"""One simulated instance: the engine-neutral part, from the listening socket to the record of requests."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, runtime_checkable

import aiohttp
from aiohttp import web

from instances import control
from instances.faults import COMMON_MENU, Faults, Menu
from instances.front import Front
from instances.ledger import KvLedger
from instances.options import Options
from instances.ports import OwnSite, bound, bound_again
from instances.prefix import PrefixCache
from instances.records import Records
from instances.replies import reset
from instances.tasks import Tasks
from instances.timing import Clockwork

_HEADER_LIMIT = 65_536


class Engine(Protocol):
    """The engine-specific part of an instance."""

    menu: Menu
    health_paths: frozenset[str]
    aborts_on_disconnect: bool
    """Whether a caller that leaves ends its request: its handler is cancelled then."""

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths, the private ones between instances under `/sim/` included."""
        ...

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request: only these are counted by fault selectors."""
        ...

    def error(self, status: int, text: str) -> web.Response:
        """An error in the engine's own shape."""
        ...

    async def start(self) -> None:
        """Called once, with the address known, before the first request."""
        ...

    def forget(self) -> None:
        """Lose all requests, as after a crash."""
        ...

    def announce(self) -> str:
        """What a coordinator must be told besides the URL, in words; mostly nothing."""
        ...

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        ...

    def act(self, name: str, value: str) -> None:
        """Do something on the spot; raises ValueError for what it does not know."""
        ...

    async def aclose(self) -> None:
        """End standing streams."""
        ...


@runtime_checkable
class Doorkeeper(Protocol):
    """An engine that also speaks something else than HTTP on the instance's ports, and has a life of its own."""

    def accept(self, http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol for a new connection; `http` makes the one for HTTP."""
        ...

    def went_down(self) -> None:
        """The instance has crashed: cut all connections that are not HTTP, stop everything that goes out."""
        ...

    def came_up(self) -> None:
        """The instance is there again after a crash."""
        ...


class Instance:
    """A running instance; `async with` starts and stops it.

    Args:
        options: what it is told.
        make_engine: builds the engine-specific part.
    """

    def __init__(self, options: Options, make_engine: Callable[["Instance"], Engine]) -> None:
        self.options = options
        self.role = options.role
        self.host, self.port = options.host, options.port
        self.closing = asyncio.Event()
        self.started_s = time.monotonic()
        self.tasks = Tasks()
        self.clockwork = Clockwork(options.timing, options.seed)
        self.ledger = KvLedger(options.blocks, options.block_tokens)
        self.prefix = PrefixCache(options.prefix_blocks, options.block_tokens)
        self.records = Records(options.record_requests, options.record_body_bytes)
        self.ordinal = 0
        self.live = 0
        self._sites: dict[int, web.SockSite | OwnSite] = {}
        self._ports: dict[int, None] = {}  # to serve again after a crash
        self._door = asyncio.Lock()
        self._deaths = 0
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self.engine = make_engine(self)
        self.name = options.name or options.role
        menu = {**COMMON_MENU, **self.engine.menu}
        self.faults = Faults(menu, self.name, f"{options.seed}:{self.name}", options.faults)
        self._sock: socket.socket | None = None

    # --- life

    async def __aenter__(self) -> Self:
        self._sock = bound(self.host, self.port)
        self.port = self._sock.getsockname()[1]
        self.name = self.faults.name = self.options.name or f"{self.role}-{self.port}"
        try:
            await self._start(self._sock)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _start(self, sock: socket.socket) -> None:
        app = web.Application(client_max_size=self.options.max_body_bytes, middlewares=[Front(self).middleware])
        app.add_routes([*self.engine.routes(), *control.routes(self)])
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=60, connect=5),
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=self.engine.aborts_on_disconnect,
            shutdown_timeout=0.5,
            keepalive_timeout=3600,
            max_line_size=_HEADER_LIMIT,
            max_field_size=_HEADER_LIMIT,
        )
        await self._runner.setup()
        await self.engine.start()
        if self.options.listen_after_s > 0:
            self.tasks.spawn(self._listen_later(sock, self.options.listen_after_s), f"{self.name} listens later")
        else:
            await self._listen(sock)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop: standing streams end, what hangs is closed, all tasks and sockets are released."""
        self.closing.set()
        await self.engine.aclose()
        await self.tasks.aclose()
        for site in self._sites.values():
            if isinstance(site, OwnSite):
                await site.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._sock is not None:
            self._sock.close()
        if self._client is not None:
            await self._client.close()

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def client(self) -> aiohttp.ClientSession:
        """For calls to other instances."""
        assert self._client is not None
        return self._client

    @property
    def starting(self) -> bool:
        """Whether it is still within `startup_s`."""
        return self.age_s < self.options.startup_s

    @property
    def age_s(self) -> float:
        """Seconds since the start, never 0."""
        return max(1e-9, time.monotonic() - self.started_s)

    @property
    def connections(self) -> int:
        """Open connections, those of control calls included."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def _listen(self, sock: socket.socket) -> None:
        assert self._runner is not None
        engine, http = self.engine, self._runner.server
        if isinstance(engine, Doorkeeper) and http is not None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: engine.accept(http), sock=sock, backlog=4096)
            self._sites[sock.getsockname()[1]] = OwnSite(server)
            return
        site = web.SockSite(self._runner, sock, backlog=4096)
        await site.start()
        self._sites[sock.getsockname()[1]] = site

    async def listen_too(self, port: int) -> int:
        """Serve the same on a further port; 0 takes a free one. Gives the port."""
        sock = bound(self.host, port)
        try:
            await self._listen(sock)
        except BaseException:
            sock.close()
            raise
        return int(sock.getsockname()[1])

    async def _listen_later(self, sock: socket.socket, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._listen(sock)

    def crash(self, back_after_s: float | None = None) -> None:
        """Die: all connections reset, all requests lost, port closed. With a time: start again after it.

        Of several, one on top of the other, the last one says whether and when.
        """
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    reset(connection.transport)
        if isinstance(self.engine, Doorkeeper):
            self.engine.went_down()
        self.engine.forget()
        self.ledger.clear("crash")
        self.prefix.clear()
        self._deaths += 1
        self.tasks.spawn(self._down(back_after_s, self._deaths), f"{self.name} is down")

    async def _down(self, back_after_s: float | None, death: int) -> None:
        async with self._door:
            sites, self._sites = self._sites, {}
            self._ports.update(dict.fromkeys(sites))
            for site in sites.values():
                await site.stop()
        if back_after_s is None:
            return
        kept: list[socket.socket] = []  # bound meanwhile, or somebody's outgoing connection may get the port
        try:
            for port in tuple(self._ports):
                kept.append(await bound_again(self.host, port))  # noqa: PERF401  # what is there is closed in any case
            await asyncio.sleep(back_after_s)
            async with self._door:
                await self._return(kept, death)
        finally:
            for sock in kept:
                sock.close()

    async def _return(self, kept: list[socket.socket], death: int) -> None:
        """Listen on these, unless the instance has died again; what listens is taken from the list."""
        if death != self._deaths:
            return
        self.started_s = time.monotonic()
        while kept:
            await self._listen(kept[-1])
            kept.pop()
        if isinstance(self.engine, Doorkeeper) and death == self._deaths:
            self.engine.came_up()

    def reset(self) -> None:
        """Back to the start without closing anything: no requests, no KV, no record, the faults of the options."""
        self.engine.forget()
        self.ledger.clear("reset")
        self.prefix.clear()
        self.records.clear()
        self.ordinal = 0
        self.faults.replace(self.options.faults)
