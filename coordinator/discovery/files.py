"""Files with lists of instances, looked at all the time."""

import asyncio
import glob
import os
import stat
from collections.abc import Callable
from pathlib import Path

from coordinator.config import ConfigError
from coordinator.core.instance import Instance

from .source import Report

LOOK_S = 0.25
MISSES = 2  # looks in a row that miss a file of a pattern before it counts as gone: some writers remove it first
TOLD = 3
MAX_FILES = 1000

Signature = tuple[int, int, int, int]
Read = Callable[[str], tuple[Instance, ...]]
"""Reads a file; raises ConfigError."""


class FileSource:
    """One path, or a pattern of paths.

    A file that has changed is read once it has kept still for one look, so that one which is just being written is not
    taken for a short one. A file that cannot be used keeps its last good instances, and so does a path that is missing;
    where a pattern stands, a missing file is one that was taken away.

    Args:
        pattern: absolute; `*`, `?` and `[...]` have their usual meaning.
        read: reads one file.
        look_s: seconds between two looks.
    """

    def __init__(self, pattern: str, read: Read, look_s: float = LOOK_S) -> None:
        self._pattern = pattern
        self._is_pattern = glob.has_magic(pattern)
        self._read = read
        self._look_s = look_s
        self._first = True
        self._taken: dict[str, Signature] = {}
        self._moving: dict[str, Signature] = {}
        self._good: dict[str, tuple[Instance, ...]] = {}
        self._broken: dict[str, str] = {}
        self._misses: dict[str, int] = {}
        self._trouble = ""

    async def run(self, report: Report) -> None:
        """See source.Source. Looks in a thread, since a file system may hang and long files take time to read."""
        while True:
            if await asyncio.to_thread(self.look):
                instances = [one for name in sorted(self._good) for one in self._good[name]]
                unread = bool(self._trouble) or not self._broken.keys() <= self._good.keys()
                report.found(instances, {}, self._told(), incomplete=unread)
            await asyncio.sleep(self._look_s)

    def look(self) -> bool:
        """Look once; returns whether there is anything to tell."""
        names, trouble = self._names()
        changed = self._first or trouble != self._trouble
        self._trouble = trouble
        for name in names:
            changed |= self._look_at(name)
        if self._is_pattern and not trouble:
            changed |= self._forget_all_but(names)
        self._first = False
        return changed

    def _names(self) -> tuple[list[str], str]:
        """Which files there are, and what keeps them from being seen."""
        if not self._is_pattern:
            return [self._pattern], ""
        folder = self._pattern
        while glob.has_magic(folder):
            folder = os.path.dirname(folder)  # noqa: PTH120  # a pattern, no path
        try:
            with os.scandir(folder):
                pass
        except OSError as error:
            return [], f"{folder} cannot be read: {_reason(error)}"
        names = sorted(glob.glob(self._pattern))  # noqa: PTH207  # an absolute pattern
        if len(names) > MAX_FILES:
            return names[:MAX_FILES], f"{self._pattern} stands for {len(names)} files; {MAX_FILES} are read"
        return names, ""

    def _look_at(self, name: str) -> bool:
        """Read a file if it has changed; returns whether there is anything to tell."""
        self._misses.pop(name, None)
        try:
            seen = _signature(name)
        except OSError as error:
            if self._is_pattern and isinstance(error, FileNotFoundError):
                return False
            return self._note_broken(name, f"{name} cannot be read: {_reason(error)}")
        if seen == self._taken.get(name):
            return False
        if not self._first and self._moving.get(name) != seen:
            self._moving[name] = seen
            return False
        return self._read_one(name, seen)

    def _read_one(self, name: str, seen: Signature) -> bool:
        try:
            found = self._read(name)
        except ConfigError as error:
            changed = self._note_broken(name, _brief(error))
        else:
            changed = self._broken.pop(name, None) is not None or self._good.get(name) != found
            self._good[name] = found
        if not self._first:  # at the first look it may have been moving: it is read a second time
            self._taken[name] = seen
            self._moving.pop(name, None)
        return changed

    def _note_broken(self, name: str, why: str) -> bool:
        changed = self._broken.get(name) != why
        self._broken[name] = why
        self._taken.pop(name, None)
        return changed

    def _forget_all_but(self, names: list[str]) -> bool:
        changed = False
        for name in {*self._good, *self._broken} - {*names}:
            self._misses[name] = self._misses.get(name, 0) + 1
            if self._misses[name] >= MISSES:
                for kept in (self._good, self._broken, self._taken, self._moving, self._misses):
                    kept.pop(name, None)
                changed = True
        return changed

    def _told(self) -> str:
        reasons = [*([self._trouble] if self._trouble else ()), *(self._broken[name] for name in sorted(self._broken))]
        return _first_of(reasons)


def _signature(name: str) -> Signature:
    """What differs once the file was written or replaced; raises OSError."""
    found = Path(name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a file")
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def _brief(error: ConfigError) -> str:
    return _first_of([problem.text(error.name) for problem in error.problems])


def _first_of(reasons: list[str]) -> str:
    more = f"; and {len(reasons) - TOLD} more" if len(reasons) > TOLD else ""
    return "; ".join(reasons[:TOLD]) + more


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
