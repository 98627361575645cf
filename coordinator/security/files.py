"""Seeing when files change: keys and certificates come out of mounted Secrets, which are replaced while we run."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

LOG = logging.getLogger("pd_coordinator.security")

Signature = tuple[tuple[int, int, int], ...]


def signature(files: Iterable[str]) -> Signature:
    """What differs when any of the files has been written or replaced; one that cannot be seen counts as empty."""
    return tuple(map(_signature, files))


def _signature(file: str) -> tuple[int, int, int]:
    try:
        found = Path(file).stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


class FileWatch:
    """Calls somebody when files have changed. Looks at their times: no event is lost, on any file system.

    Args:
        name: of the task.
        files: names the files; asked for at each look.
        changed: called after a change; what it raises is logged, and the watch goes on.
        interval_s: seconds between two looks; asked for at each.
    """

    def __init__(
        self,
        name: str,
        files: Callable[[], Iterable[str]],
        changed: Callable[[], None],
        interval_s: Callable[[], float],
    ) -> None:
        self._name = name
        self._files = files
        self._changed = changed
        self._interval_s = interval_s
        self._seen: Signature = ()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look; whoever is told knows the files as they are."""
        self._seen = signature(self._files())
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def aclose(self) -> None:
        """Stop; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def look(self) -> None:
        """Look once."""
        seen = signature(self._files())
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._changed()
        except Exception:  # the border to all who are told: one fault must not end the watch
            LOG.exception("files that have changed could not be read again")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s())
            self.look()
