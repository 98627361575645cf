"""A worker's process as the supervisor sees it."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

from coordinator.workers.channel import Channel
from coordinator.workers.messages import AskMetrics, Drain, Failed, Serving, Snapshot, Start, Up


class WorkerProcess:
    """Starts one worker, talks to it, and knows when it has ended.

    Args:
        number: its row on the board and the number in its request ids.
        take: called with every message that is not about starting or metrics.
    """

    def __init__(self, number: int, take: Callable[["WorkerProcess", Up], None]) -> None:
        self.number = number
        self._take = take
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel[Up] | None = None
        self._serving: asyncio.Future[Serving | Failed] = asyncio.get_running_loop().create_future()
        self._snapshots: dict[int, asyncio.Future[bytes]] = {}
        self._asked = 0
        self.serving = False

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self, start: Start, board_fd: int) -> None:
        """Start the process and tell it who it is; returns at once."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)  # noqa: FBT003  # the socket module's signature
            fds = (theirs.fileno(), board_fd)
            command = (sys.executable, "-m", "coordinator.workers", *map(str, fds))
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=fds)
            self._channel = await Channel.open(ours, Up, self._heard, self._cut)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.say(start)

    async def started(self) -> Serving | Failed:
        """Wait until it serves, or says why it cannot; Failed if it ended without a word."""
        return await self._serving

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit status."""
        assert self._process is not None
        status = await self._process.wait()
        self.serving = False
        if self._channel is not None:
            self._channel.close()
        self._cut()
        return status

    def say(self, message: object) -> None:
        """Send a message; nothing happens when the process is gone."""
        if self._channel is not None:
            self._channel.send(message)

    def drain(self, within_s: float) -> None:
        """Have it end by itself."""
        self.say(Drain(within_s))

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def snapshot(self) -> bytes | None:
        """Its metrics; None when it is gone before it could answer. Cancellation forgets the question."""
        if not self.serving:
            return None
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = answer
        try:
            self.say(AskMetrics(number))
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                return None
            raise
        finally:
            self._snapshots.pop(number, None)

    def _heard(self, message: Up) -> None:
        if isinstance(message, Serving | Failed):
            self.serving = isinstance(message, Serving)
            if not self._serving.done():
                self._serving.set_result(message)
        elif isinstance(message, Snapshot):
            answer = self._snapshots.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.data)
        else:
            self._take(self, message)

    def _cut(self) -> None:
        """It will not say anything any more."""
        self.serving = False
        if not self._serving.done():
            self._serving.set_result(Failed("the process ended before it served"))
        for answer in self._snapshots.values():
            answer.cancel()
