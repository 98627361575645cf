"""A child process that is started without a fork."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Sequence


class Child:
    """Runs a command, and knows when it has ended.

    A fork, as event loops make it, runs what libraries have registered for forks: gRPC's handlers crash one of the two
    processes now and then while its threads are at work. A process that is made by vfork runs none of it.

    Args:
        fds: what it inherits besides stdout and stderr, under the same numbers.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], fds: Sequence[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)  # noqa: S603  # our own command
        try:
            self._watched = os.pidfd_open(self._popen.pid)
        except OSError:
            self._popen.kill()
            self._popen.wait()
            raise
        self._loop.add_reader(self._watched, self._reap)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    async def wait(self) -> int:
        """Wait for its end; returns the exit status, negative for a signal. To be cancelled at will."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._popen.kill()

    def _reap(self) -> None:
        status = self._popen.poll()
        if status is None:
            return
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(status)
