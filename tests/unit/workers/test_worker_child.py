"""Child processes: their end, and that nothing runs in a fork."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import uvloop

from coordinator.workers.child import Child

GUARD_S = 30
SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine to its end."""

    def run(work):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(work)

    return run


async def end_of(child):
    async with asyncio.timeout(GUARD_S):
        return await child.wait()


@pytest.mark.parametrize("status", [0, 3])
def test_its_exit_status(run, status):
    async def work():
        child = Child((sys.executable, "-c", f"raise SystemExit({status})"), ())
        return [await end_of(child), await end_of(child)]

    assert run(work()) == [status, status]


def test_it_has_these_files_and_no_others(run):
    async def work():
        ours, theirs = os.pipe()
        other = os.memfd_create("other")
        os.set_inheritable(other, True)
        program = (
            "import os, sys\n"
            "os.write(int(sys.argv[1]), b'hello')\n"
            "try: os.fstat(int(sys.argv[2]))\n"
            "except OSError: sys.exit(7)\n"
        )
        child = Child((sys.executable, "-c", program, str(theirs), str(other)), (theirs,))
        os.close(theirs)
        status = await end_of(child)
        said = os.read(ours, 99)
        for fd in (ours, other):
            os.close(fd)
        return status, said

    assert run(work()) == (7, b"hello")


def test_killing_it_once_and_again(run):
    async def work():
        child = Child(SLEEPER, ())
        child.kill()
        child.kill()
        status = await end_of(child)
        child.kill()
        return status

    assert run(work()) == -signal.SIGKILL


def test_whoever_waits_may_leave(run):
    async def work():
        child = Child(SLEEPER, ())
        waiting = asyncio.create_task(child.wait(), name="waits")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.kill(child.pid, signal.SIGTERM)
        return await end_of(child)

    assert run(work()) == -signal.SIGTERM


def test_a_program_that_there_is_not(run):
    def files():
        return len(list(Path("/proc/self/fd").iterdir()))

    async def work():
        before = files()
        with pytest.raises(FileNotFoundError):
            Child(("/no/such/program",), ())
        return files() - before

    assert run(work()) == 0


def test_what_is_registered_for_forks_does_not_run(run):
    forks = []
    os.register_at_fork(before=lambda: forks.append("fork"))

    async def work():
        return await end_of(Child((sys.executable, "-c", ""), ()))

    assert run(work()) == 0
    assert not forks
