"""Ending a wait from outside with an error of its own."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Scope:
    """A block that anybody who holds it can end with an exception, wherever the block waits just then.

    The same way as `asyncio.timeout`: the task is cancelled, and the cancellation is exchanged for the exception where
    the block ends. A cancellation that comes from elsewhere at the same time wins and stays a cancellation.
    """

    __slots__ = ("_cancelling", "_error", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Args: `loop`: the running one, where the caller has it at hand; asking for it costs a system call."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._error: BaseException | None = None
        self._cancelling = 0

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task that is in the block; None before and after."""
        return self._task

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        assert self._task is not None, "a scope needs a task"
        self._cancelling = self._task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        if kind is not asyncio.CancelledError:
            # interrupted from inside the task: the cancellation waits for the next await, so meet it here
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        others = task.uncancel()
        del task  # it keeps the error that it ends with, whose traceback knows this frame
        if others > self._cancelling:
            raise asyncio.CancelledError
        if kind is None or kind is asyncio.CancelledError:
            raise self._taken() from None

    def _taken(self) -> BaseException:
        """The error, which the scope does not keep: its traceback knows the scope, which would be a cycle."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def interrupt(self, error: BaseException) -> None:
        """End the block with `error`; the first call counts, calls before or after the block do nothing."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()
