"""The NVSHMEM world of simulated engines: one-sided writes to a rank, over local sockets that need no port.

Each rank is a socket in Linux's abstract namespace, so that instances of one machine find each other by rank alone,
whether they share a process or not, and two of them can never have the same rank.
"""

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from instances.tasks import Tasks

_MOST_RANKS = 4096
_DEADLINE_S = 5.0
_LINE_BYTES = 16 << 20
Write = dict[str, Any]


class World:
    """One instance's place in a world.

    Args:
        name: of the world; empty: that of this process.
        deliver: takes a write to one of the instance's ranks; tells whether it went where it was meant to.
        tasks: owner of the tasks that read writes.
    """

    def __init__(self, name: str, deliver: Callable[[int, Write], bool], tasks: Tasks) -> None:
        self.name = name or f"process-{os.getpid()}"
        self._deliver = deliver
        self._tasks = tasks
        self._servers: list[asyncio.Server] = []

    def _address(self, rank: int) -> str:
        return f"\0pd-coordinator-instance/{self.name}/{rank}"

    async def join(self, first: int, count: int) -> int:
        """Take ranks, and give the first one; -1 takes the first that are free. Raises ValueError for taken ranks."""
        starts = range(_MOST_RANKS) if first < 0 else (first,)
        for start in starts:
            sockets = self._bound(start, count)
            if sockets:
                for rank, sock in enumerate(sockets, start):
                    server = await asyncio.start_unix_server(self._listener(rank), sock=sock, limit=_LINE_BYTES)
                    self._servers.append(server)
                return start
        raise ValueError(f"ranks {first} to {first + count - 1} of world {self.name!r} are not all free")

    def _bound(self, start: int, count: int) -> list[socket.socket]:
        """Sockets of all ranks, or of none."""
        sockets: list[socket.socket] = []
        for rank in range(start, start + count):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
            sockets.append(sock)
            try:
                sock.bind(self._address(rank))
            except OSError as taken:
                for one in sockets:
                    one.close()
                if taken.errno != errno.EADDRINUSE:
                    raise
                return []
        return sockets

    def _listener(self, rank: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.spawn(self._receive(rank, reader, writer), f"write to rank {rank}")

        return connected

    async def _receive(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                arrived = self._deliver(rank, json.loads(await reader.readline()))
                writer.write(b"arrived\n" if arrived else b"stray\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # the writer sees that its write went nowhere
        finally:
            writer.close()

    async def write(self, rank: int, write: Write) -> str:
        """Write to a rank: `arrived`, `stray` (not what anybody waits for there), or `nobody` (no such rank)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        try:
            sock.connect(self._address(rank))
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except OSError:
            sock.close()
            return "nobody"
        try:
            async with asyncio.timeout(_DEADLINE_S):
                writer.write(json.dumps(write).encode() + b"\n")
                return (await reader.readline()).decode().strip() or "nobody"
        except (TimeoutError, ConnectionError):
            return "nobody"
        finally:
            writer.close()

    async def aclose(self) -> None:
        """Give the ranks back."""
        for server in self._servers:
            server.close()
        self._servers.clear()
