"""Long computations that let the event loop turn in between, so that streams of other clients go on meanwhile."""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar, cast

STEP_S = 0.001
T = TypeVar("T")


async def in_steps(work: Generator[None, None, T], clock: Callable[[], float] = time.monotonic) -> T:
    """Run a generator for about a millisecond at a time; what it returns.

    Args:
        work: yields wherever it may be interrupted.
        clock: monotonic seconds.

    Raises whatever `work` raises. Cancelled, it is left where it is.
    """
    try:
        while True:
            until_s = clock() + STEP_S
            next(work)
            while clock() < until_s:
                next(work)
            await asyncio.sleep(0)
    except StopIteration as found:
        return cast("T", found.value)
