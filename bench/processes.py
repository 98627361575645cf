"""Processes and what they use, from /proc: a router is its whole tree of processes."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
END_S = 10.0
PROC = Path("/proc")
MEMORY = ("Pss_Anon:", "Pss_Shmem:")


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, ()))
    return found


def cpu_s(pid: int) -> float:
    """Processor time of the tree so far, user and system, threads that have ended included."""
    ticks = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            fields = _stat(one)
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Memory of the tree as PSS (what is shared counts in equal parts), without the pages of files.

    A program's share of the pages of common libraries changes with whatever else is started.
    """
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(PROC, str(one), "smaps_rollup").read_text().splitlines():
                if line.startswith(MEMORY):
                    total += int(line.split()[1]) * 1024
    return total


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, *, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block lasts; what it says goes to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd, start_new_session=True)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: first kindly, then not."""
    pids = tree(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            break
    with contextlib.suppress(ProcessLookupError):  # what has outlived its parent, where it has a group of its own
        os.killpg(process.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything."""
    return Path(PROC, str(pid), "stat").read_text().rpartition(") ")[2].split()
