"""Idle connections, kept per address for the next request. There is no limit to connections in use."""

import asyncio
import time
from collections.abc import Callable

from coordinator.core.instance import Address

from .connection import Connection

CLOSING_S = 1.0
SWEEPS_PER_IDLE_TIME = 4


class Pool:
    """The home of connections.

    The last one used is given out first, so that what load does not need grows old and is closed. A single timer does
    that, and only while there are idle connections.

    Args:
        idle_s: a connection that no request used for this long is closed (up to a quarter later).
        max_idle_per_address: connections beyond this many are closed after use.
        clock: monotonic time.
    """

    def __init__(
        self, *, idle_s: float, max_idle_per_address: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._idle_s = idle_s
        self._max_idle = max_idle_per_address
        self._clock = clock
        self._idle: dict[Address, list[Connection]] = {}  # each list: longest idle first
        self._open: set[Connection] = set()
        self._removed: set[Connection] = set()  # in use when their address was removed
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    @property
    def open_count(self) -> int:
        """Open connections, in use or idle."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        """Connections that wait for a request."""
        return sum(map(len, self._idle.values()))

    def add(self, connection: Connection) -> None:
        """Take note of a new connection.

        Not done when it is made: uvloop tells nothing more about a connection whose opening was cancelled.
        """
        if connection.usable:
            self._open.add(connection)

    def take(self, address: Address) -> Connection | None:
        """Give out an idle connection, or None."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    def close_address(self, address: Address) -> None:
        """Close the idle connections to an address; those in use are closed when their request is over."""
        for connection in self._idle.pop(address, ()):
            connection.close()
        self._removed.update(connection for connection in self._open if connection.address == address)

    async def aclose(self) -> None:
        """Close every connection; requests that use one end with `closed`. Takes a second at most."""
        for connection in tuple(self._open):
            connection.shut("the client was closed")
        self._idle.clear()
        self._stop_sweeper()
        if self._open:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=CLOSING_S)

    def sweep(self) -> None:
        """Close what was idle for too long."""
        self._sweeper = None
        limit_s = self._clock() - self._idle_s
        for idle in self._idle.values():
            old = 0
            while old < len(idle) and idle[old].idle_since_s <= limit_s:
                old += 1
            expired, idle[:old] = idle[:old], []
            for connection in expired:
                connection.close()
        self._idle = {address: idle for address, idle in self._idle.items() if idle}
        if self._idle:
            self._start_sweeper()

    # --- what connections call

    def put(self, connection: Connection, now_s: float) -> bool:
        """Take a connection back; False: there are enough, or its address was removed."""
        if connection in self._removed:
            return False
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = []
        if len(idle) >= self._max_idle:
            return False
        connection.idle_since_s = now_s
        idle.append(connection)
        if self._sweeper is None:
            self._start_sweeper()
        return True

    def left(self, connection: Connection) -> None:
        """Give this connection to nobody any more."""
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not any(self._idle.values()):
                self._stop_sweeper()

    def gone(self, connection: Connection) -> None:
        """Take note that a connection is closed."""
        self._open.discard(connection)
        self._removed.discard(connection)
        if not self._open and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    # --- inside

    def _start_sweeper(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(self._idle_s / SWEEPS_PER_IDLE_TIME, self.sweep)

    def _stop_sweeper(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
