"""Walks long bodies in small steps, one body at a time, so that streams of other clients go on meanwhile."""

import asyncio
import math
import time
from collections.abc import Callable, Generator
from typing import TypeVar, cast

from coordinator.api.bodies import Walked, token_steps
from coordinator.core.errors import DeadlineExceeded
from coordinator.wire.json_scan import index

STEP_S = 0.001
T = TypeVar("T")


class BodyReader:
    """Between two steps of about a millisecond the event loop makes a turn.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()

    async def walk(self, text: bytes, within_s: float) -> Walked:
        """Find the outermost fields of a body, and count its long arrays; cancellation lets the next body in.

        Args:
            text: the body.
            within_s: the longest that it may take, other bodies' turns included; infinity: no limit.

        Raises:
            BadRequest: as wire.json_scan.index.
            DeadlineExceeded: it took longer.
        """
        try:
            async with asyncio.timeout(within_s if math.isfinite(within_s) else None), self._turn:
                return await self._walk(text)
        except TimeoutError:
            raise DeadlineExceeded("schedule") from None

    async def _walk(self, text: bytes) -> Walked:
        walked = Walked.indexed(text, await self._in_steps(index(text)))
        for array in walked.long_arrays():
            walked.counted.append((array, await self._in_steps(token_steps(array))))
        return walked

    async def _in_steps(self, work: Generator[None, None, T]) -> T:
        try:
            while True:
                until_s = self._clock() + STEP_S
                next(work)
                while self._clock() < until_s:
                    next(work)
                await asyncio.sleep(0)
        except StopIteration as found:
            return cast("T", found.value)
