"""The decode loop: one step for the whole batch, one token for each request in it."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from instances.timing import Clockwork


class Sequence(Protocol):
    """A request in the batch."""

    def step(self) -> bool:
        """Emit the next token; False takes the request out of the batch. Must not raise."""
        ...


class Batch:
    """Continuous batching with a bound on running requests; further ones wait in arrival order.

    Args:
        clockwork: how long a step takes.
        max_running: most requests in one step.
        before_step: awaited before each step (for back-pressure); after_step: called once after it (to flush).
    """

    def __init__(
        self,
        clockwork: Clockwork,
        max_running: int,
        before_step: Callable[[], Awaitable[None]],
        after_step: Callable[[], None],
    ) -> None:
        self._clockwork = clockwork
        self._max_running = max_running
        self._before_step = before_step
        self._after_step = after_step
        self._running: dict[Sequence, None] = {}
        self._waiting: deque[Sequence] = deque()
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in it."""
        return len(self._waiting)

    def join(self, sequence: Sequence) -> None:
        """Add a request; its first step comes with the next turn of the loop."""
        self._waiting.append(sequence)
        self._wake.set()

    def leave(self, sequence: Sequence) -> None:
        """Take a request out, wherever it stands; nothing happens if it is not there."""
        self._running.pop(sequence, None)
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def clear(self) -> None:
        """Take all requests out."""
        self._running.clear()
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            self._running[self._waiting.popleft()] = None

    async def run(self) -> None:
        """Step for ever; meant for a task of its own."""
        due_s = 0.0
        while True:
            self._admit()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                due_s = 0.0
                continue
            step_s = self._clockwork.step_s(len(self._running))
            # counted from the last due time, so that a coarse timer does not slow the loop down
            now_s = time.monotonic()
            due_s = max(due_s, now_s - step_s) + step_s
            await asyncio.sleep(due_s - now_s)
            await self._before_step()
            for sequence in list(self._running):
                if sequence in self._running and not sequence.step():
                    self._running.pop(sequence, None)
            self._after_step()
