"""The server as its user sees it: a handler, limits, a port."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from coordinator.server.acceptor import Acceptor
from coordinator.server.connection import ClientConnection
from coordinator.server.handshakes import Refusals
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import Gate
from coordinator.server.shared import Handler, Shared

__all__ = ["Handler", "HttpServer", "ServerLimits"]

_EXPANDING_THREADS = 2
_LONGEST_SWEEP_S = 1.0
_SHORTEST_SWEEP_S = 0.05
_SWEEPS_PER_LIMIT = 4
_STOP_TASKS_S = 1.0
_FLUSH_S = 0.25
_HANDSHAKE_S = 10.0
_SHUTDOWN_S = 2.0


class HttpServer:
    """An HTTP/1.1 server on one port.

    Each request is handled by a task of its own, which ends by cancellation if its client leaves. One timer for all
    connections enforces the time limits, so these are kept to within a second or a quarter of the limit.

    Args:
        handler: coroutine function; answers one exchange. What it raises is logged, and the client gets a 500 or a torn
            stream.
        limits: what clients may do.
        log: gets faults of handlers and shortages of the system.
        clock: monotonic seconds.
        gate: asked about each request whose body is still to come, so that no body is kept of one that is refused.

    Attributes:
        port: the real port, once listening.
        tls: set before listening: clients speak TLS, and nothing else.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        gate: Gate | None = None,
    ) -> None:
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        self._limits = limits
        self._clock = clock
        self._log = log
        self._acceptor = Acceptor(self._has_room, self._take, log, clock)
        self._executor = ThreadPoolExecutor(_EXPANDING_THREADS, thread_name_prefix="expand")
        self._shared = Shared(handler, limits, log, clock, self._executor, self._freed, gate)
        self._adopting: set[asyncio.Task[None]] = set()
        self._refusals = Refusals(log, clock)
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()

    @property
    def limits(self) -> ServerLimits:
        """What clients may do; may change: what comes from then on is held against them."""
        return self._limits

    @limits.setter
    def limits(self, limits: ServerLimits) -> None:
        self._limits = self._shared.limits = limits

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Bind and accept; `host` may be a name or an address of either family, empty for all interfaces.

        Raises:
            OSError: it cannot be bound.
        """
        self._shared.encrypted = self.tls is not None
        self.port = await self._acceptor.open(host, port, reuse_port=reuse_port)
        self._sweep_later()

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._shared.connections) + len(self._adopting)

    @property
    def draining(self) -> bool:
        """Whether connections close after the answer at hand; turning it on closes the idle ones at once."""
        return self._shared.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._shared.draining = value
        if value:
            for connection in list(self._shared.connections):
                connection.close_if_idle()

    def stop_listening(self) -> None:
        """Accept nothing more; what is open goes on."""
        self._acceptor.close()

    async def aclose(self) -> None:
        """Stop: cancel the handlers, let them say goodbye for at most 1 s, flush for 0.25 s and close everything."""
        self.stop_listening()
        self._shared.draining = self._shared.stopping = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        tasks = [*self._adopting, *self._shared.tasks]
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_TASKS_S)
            await self._close_connections()
        finally:
            self._abort_connections()
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _close_connections(self) -> None:
        for connection in list(self._shared.connections):
            connection.close()
        self._closed.clear()
        if self._shared.connections:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._closed.wait()
            except TimeoutError:
                self._abort_connections()
                await asyncio.sleep(0)

    def _abort_connections(self) -> None:
        for connection in list(self._shared.connections):
            connection.transport.abort()

    # --- connections

    def _has_room(self) -> bool:
        most = self._limits.max_connections
        return most is None or self.connections < most

    def _take(self, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._adopt(sock), name="adopt a client's socket")
        self._adopting.add(task)
        task.add_done_callback(lambda done: self._adopted(done, sock))

    async def _adopt(self, sock: socket.socket) -> None:
        connection = ClientConnection(self._shared)
        loop = asyncio.get_running_loop()
        try:
            if self.tls is None:
                await loop.connect_accepted_socket(lambda: connection, sock)
            else:
                await self._shake_hands(connection, sock, self.tls)
        except OSError as error:
            sock.close()
            self._log.warning("an accepted connection was lost at once: %s", type(error).__name__)

    async def _shake_hands(self, connection: ClientConnection, sock: socket.socket, tls: ssl.SSLContext) -> None:
        """Begin TLS; whoever takes longer than for a head, or speaks something else, is let go."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=min(self._limits.head_s, _HANDSHAKE_S),
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:
            sock.close()
            self._refusals.note(error)

    def _adopted(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._adopting.discard(task)
        if task.cancelled():
            sock.close()  # the server may stop before the task has begun
        elif (error := task.exception()) is not None:
            self._log.error("an accepted connection could not be used", exc_info=error)
        self._freed()

    def _freed(self) -> None:
        """A connection is closed, or counted but once again."""
        if not self._shared.connections:
            self._closed.set()
        if not self._shared.stopping:
            self._acceptor.resume()

    # --- time

    def _sweep_later(self) -> None:
        shortest_s = min(self._limits.idle_s, self._limits.head_s, self._limits.body_s)
        delay_s = min(_LONGEST_SWEEP_S, max(_SHORTEST_SWEEP_S, shortest_s / _SWEEPS_PER_LIMIT))
        self._sweep_timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_later()
        now_s = self._clock()
        for connection in [c for c in self._shared.connections if c.deadline_s <= now_s]:
            connection.expire(now_s)
