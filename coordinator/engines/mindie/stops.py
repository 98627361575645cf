"""Aborts that outlive the requests they belong to (MindIE protocol page §7)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from coordinator.core.instance import Instance, Role
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError

MAX_PENDING = 20000
TRIES = 3
TRY_S = 5.0
PAUSE_S = 0.2
NOT_FOUND = 404
OVERTAKEN_S = 0.5


class Stops:
    """Sends `stopInfer`, once per request and instance, on tasks of its own, so that no cancellation loses one."""

    def __init__(self, client: HttpClient, log: logging.Logger, *, on_result: Callable[[str], None]) -> None:
        self._client = client
        self._log = log
        self._on_result = on_result
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the id that each stops
        self._closing = asyncio.Event()

    def stop(self, wire_id: str, instances: Sequence[tuple[Instance, str]]) -> None:
        """Tell each instance, given with the model name it knows, to end `wire_id`. Returns at once."""
        for instance, model in instances:
            if len(self._tasks) >= MAX_PENDING:
                self._on_result("dropped")
                continue
            task = asyncio.get_running_loop().create_task(
                self._send(wire_id, instance, model), name=f"stop {wire_id} at {instance.id}"
            )
            self._tasks[task] = wire_id
            task.add_done_callback(self._tasks.pop)

    async def over(self, wire_id: str) -> None:
        """Wait until no stop of `wire_id` is under way: one that came late would end whatever has taken over the id."""
        due = [task for task, stopped_id in self._tasks.items() if stopped_id == wire_id]
        if due:
            await asyncio.wait(due)

    async def _send(self, wire_id: str, instance: Instance, model: str) -> None:
        target = f"/v2/models/{quote(model, safe='')}/stopInfer"
        body = b'{"id":"%b"}' % wire_id.encode()
        headers = ((b"accept", b"*/*"), (b"content-type", b"application/json"))
        overtaken = instance.role is not Role.DECODE
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            try:
                reply = await self._client.fetch(
                    instance.address,
                    b"POST",
                    target,
                    headers,
                    body,
                    deadline_s=time.monotonic() + TRY_S,
                    keep=True,
                )
            except TransportError:
                continue
            if reply.status == NOT_FOUND and not overtaken:
                # the stop may have overtaken prefill's hand-over, and decode would hold its KV for nobody
                overtaken = True
                await self._let_pass()
                continue
            if reply.status < 500:
                # 404: the request is not there any more, or never came; nothing is left to stop
                self._on_result("not_found" if reply.status == NOT_FOUND else "sent")
                return
        self._on_result("failed")
        self._log.warning("stop of request %s at instance %s failed", wire_id, instance.id)

    async def _let_pass(self) -> None:
        """Give a hand-over time to arrive; not while closing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OVERTAKEN_S):
                await self._closing.wait()

    async def aclose(self, within_s: float) -> None:
        """Wait for what is under way, at most `within_s`, then give up the rest."""
        self._closing.set()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
