"""A worker's process: from two inherited descriptors to its exit status."""

import asyncio
import mmap
import signal
import socket
import sys
from typing import TextIO, cast

import uvloop

from coordinator.config import Settings
from coordinator.observability.logs import configure
from coordinator.workers.channel import Channel
from coordinator.workers.lines import WholeLines
from coordinator.workers.messages import Down, Start
from coordinator.workers.worker import Worker

FLUSH_S = 1.0


def main(socket_fd: int, board_fd: int) -> int:
    """Run a worker on an inherited socket and shared memory; returns the exit status."""
    return uvloop.run(_main(socket_fd, board_fd))


class Inbox:
    """Keeps what the supervisor says until there is a worker to hear it."""

    def __init__(self) -> None:
        self.start: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()
        self._worker: Worker | None = None
        self._early: list[Down] = []
        self._cut = False

    def take(self, message: Down) -> None:
        """Take a message."""
        if self._worker is not None:
            self._worker.take(message)
        elif isinstance(message, Start) and not self.start.done():
            self.start.set_result(message)
        else:
            self._early.append(message)

    def ended(self) -> None:
        """The supervisor is gone: without it nothing comes from standing streams, and nobody would start us again."""
        self._cut = True
        if self._worker is not None:
            self._worker.leave_alone(0.0)
        elif not self.start.done():
            self.start.set_result(None)

    def hand_to(self, worker: Worker) -> None:
        """Let the worker hear everything, what has come so far first."""
        self._worker = worker
        early, self._early = self._early, []
        for message in early:
            worker.take(message)
        if self._cut:
            worker.leave_alone(0.0)


async def _main(socket_fd: int, board_fd: int) -> int:
    inbox = Inbox()
    channel: Channel[Down] = await Channel.open(socket.socket(fileno=socket_fd), Down, inbox.take, inbox.ended)
    start = await inbox.start
    if start is None:
        return 1
    sys.path[:] = start.path
    settings = Settings.model_validate_json(start.settings)
    stream = cast("TextIO", WholeLines(sys.stderr.fileno()))
    logs = configure(settings.logging.level, settings.logging.format, stream, settings.logging.levels)
    try:
        worker = Worker(start, mmap.mmap(board_fd, 0), channel.send, logs.access, logs.flush)
        worker.renewal.on_logging = lambda logging: logs.apply(logging.level, logging.format, logging.levels)
        logs.belongs_to(worker.renewal.belonging)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: worker.leave_alone(worker.renewal.drain_s))
        inbox.hand_to(worker)
        return await worker.run()
    finally:
        await channel.aclose(FLUSH_S)
        logs.close()
