"""Background tasks with an owner."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Starts named tasks and ends them; a task that fails is reported to the loop's exception handler."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `work`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            task.get_loop().call_exception_handler(
                {"message": f"task {task.get_name()} of a simulated instance failed", "exception": error, "task": task}
            )

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their end."""
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
