"""A worker's process as the supervisor sees it."""

import asyncio
import socket
import sys
from collections.abc import Callable

from coordinator.workers.channel import Channel
from coordinator.workers.child import Child
from coordinator.workers.messages import AskMetrics, Drain, Failed, Serving, Snapshot, Start, Up

START_S = 60.0
DEAF_S = 6.0  # from the end of the channel to the end of the process: error events, aborts, closing


class WorkerProcess:
    """Starts one worker, talks to it, and knows when it has ended.

    Args:
        number: its row on the board and the number in its request ids.
        take: called with every message that is not about starting or metrics.

    Attributes:
        serving: whether it listens.
        snapshot: its metrics, packed, as it told them last.
    """

    def __init__(self, number: int, take: Callable[[Up], None]) -> None:
        self.number = number
        self.serving = False
        self.snapshot: bytes | None = None
        self._take = take
        self._process: Child | None = None
        self._channel: Channel[Up] | None = None
        self._answer: asyncio.Future[Serving | Failed] = asyncio.get_running_loop().create_future()
        self._questions: dict[int, asyncio.Future[None]] = {}
        self._asked = 0
        self._killing: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self, start: Callable[[], Start], board_fd: int) -> None:
        """Start the process and tell it who it is, as of that moment; returns at once.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)  # noqa: FBT003  # the socket module's signature
            fds = (theirs.fileno(), board_fd)
            # -P: what lies in the current directory must not come before our own modules
            command = (sys.executable, "-P", "-m", "coordinator.workers", *map(str, fds))
            self._process = Child(command, fds)
            self._channel = await Channel.open(ours, Up, self._heard, self._cut)
        except BaseException:
            ours.close()
            self.kill()
            raise
        finally:
            theirs.close()
        self.say(start())

    async def started(self) -> Serving | Failed:
        """Wait until it serves, or says why it cannot; Failed as well if it ended without a word or takes a minute."""
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._answer)
        except TimeoutError:
            return Failed(f"worker {self.number} did not start within {START_S:g} s")

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit status, negative for a signal."""
        if self._process is None:
            return 0
        status = await self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._cut()
        if self._killing is not None:
            self._killing.cancel()
        return status

    def say(self, message: object) -> None:
        """Send a message; nothing happens when the process is gone."""
        if self._channel is not None:
            self._channel.send(message)

    def drain(self, within_s: float) -> None:
        """Have it end by itself; 0 seconds: at once."""
        self.say(Drain(within_s))

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()

    async def refresh_snapshot(self) -> None:
        """Have it tell its metrics; returns without if it is gone before that."""
        if not self.serving:
            return
        self._asked += 1
        question: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._questions[self._asked] = question
        number = self._asked
        try:
            self.say(AskMetrics(number))
            await question
        finally:
            self._questions.pop(number, None)

    def _heard(self, message: Up) -> None:
        if isinstance(message, Serving | Failed):
            self.serving = isinstance(message, Serving)
            if not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, Snapshot):
            self.snapshot = message.data
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                question.set_result(None)
        else:
            self._take(message)

    def _cut(self) -> None:
        """It will not say anything any more: it has ended, or ends, or does not listen."""
        self.serving = False
        if not self._answer.done():
            self._answer.set_result(Failed(f"worker {self.number} ended before it served"))
        for question in self._questions.values():
            if not question.done():
                question.set_result(None)
        if self._killing is None:
            self._killing = asyncio.get_running_loop().call_later(DEAF_S, self.kill)
