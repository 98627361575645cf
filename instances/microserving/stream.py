"""What an engine request puts out, on its way to the HTTP call that waits for it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instances.front import Severed
from instances.microserving.refusal import Refused


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence gained. `finish`: its finish reason, if it ended."""

    text: str
    tokens: tuple[int, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One delta for each sequence, or the final usage. `token`: number of the newest token, from 1."""

    deltas: tuple[Delta, ...] = ()
    usage: dict[str, Any] | None = None
    token: int = 0


class Struck(Exception):
    """A fault: the answer breaks off in this way."""


class Stream:
    """The outputs of one engine request. A request whose stream is lost is never heard of again.

    Attributes:
        user: the engine request id.
        left: the caller is gone, which shows when there is an output for it.
        backlog_bytes: what the caller has not taken.
        work: the task that works on the request.
    """

    def __init__(self, user: str) -> None:
        self.user = user
        self.left = False
        self.backlog_bytes: Callable[[], int] = int
        self.work: asyncio.Task[None] | None = None
        self._outputs: deque[Output] = deque()
        self._ended = False
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def push(self, output: Output) -> None:
        """Hand an output over."""
        self._outputs.append(output)
        self._news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._news.set()

    def fail(self, failure: Refused | Struck | Severed) -> None:
        """Nothing more comes, and this is why."""
        self._failure = failure
        self.end()

    async def next(self) -> Output | None:
        """The next output, None at the end; raises what the request failed with."""
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()

    async def last(self) -> Output | None:
        """The last output; None if there is none at all."""
        last = None
        while (output := await self.next()) is not None:
            last = output
        return last
