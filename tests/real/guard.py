"""Runs a command in a process group of its own, and ends the whole group with itself or with its parent.

`python guard.py PARENT_PID COMMAND...`. vLLM is a tree of processes, and a parent's death reaches only the first of
them. SIGTERM: the command gets it too and some time to end, what is left of its group then gets SIGKILL. The exit
status is the command's.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

STOP_S = 20.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)


class Stop(BaseException):
    """SIGTERM came, or the parent has gone."""


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this signal when the parent has gone; it may have gone already."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def main(parent: int, command: list[str]) -> int:
    """Run the command; returns its exit status, negative for a signal."""
    signal.signal(signal.SIGTERM, stop)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)  # grandchildren whose parent dies are ours to wait for
    die_with(parent, signal.SIGTERM)
    me = os.getpid()
    child = subprocess.Popen(
        command,
        process_group=0,
        preexec_fn=lambda: die_with(me, signal.SIGKILL),  # noqa: PLW1509  # there is one thread here
    )
    print(f"guard: process group {child.pid}", flush=True)
    try:
        child.wait()
    except Stop:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_group(child.pid)
    return -signal.SIGKILL if child.returncode is None else child.returncode


def end_group(group: int) -> None:
    """SIGKILL for all that is left of it; returns when every descendant has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def stop(number: int, frame: FrameType | None) -> None:
    """Turn the signal into an exception."""
    raise Stop


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
