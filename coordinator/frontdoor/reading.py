"""Walks long bodies in small steps, one body at a time."""

import asyncio
import math
import time
from collections.abc import Callable

from coordinator.api.bodies import Walked, token_steps
from coordinator.core.errors import DeadlineExceeded
from coordinator.steps import in_steps
from coordinator.wire.json_scan import index


class BodyReader:
    """Between two steps the event loop makes a turn.

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
        walked = Walked.indexed(text, await in_steps(index(text), self._clock))
        for array in walked.long_arrays():
            walked.counted.append((array, await in_steps(token_steps(array), self._clock)))
        return walked
