"""Calls that go on after the request that made them has left, and the reservations that are freed then.

prep_recv cannot be taken back by closing its connection, and decode's reservation is in none of its queues, so that no
abort finds it (microserving protocol page §8). The one way to free it is start_generate, left as soon as it begins.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from coordinator.core.instance import Instance
from coordinator.core.request import Headers
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.sink import ReplySink
from coordinator.transport.stream import Stream
from coordinator.wire.microserving import GENERATE

ReplyTask: TypeAlias = asyncio.Task[Reply]

MAX_PENDING = 1000
LATE_ANSWER_S = 600.0  # the engine has no limit of its own
SENDING_S = 5.0
LINGER_S = 0.25
OK = 200


@dataclass(frozen=True, slots=True)
class Reservation:
    """KV pages that decode keeps for one request.

    Attributes:
        wire_id: the `user` under which they were reserved.
        headers: of the request's calls.
        body: of the start_generate that frees them.
    """

    decode: Instance
    wire_id: str
    headers: Headers
    body: bytes


class Errands:
    """Owns every call that may outlive its request; all are bounded in number and time.

    Args:
        on_result: gets a result of `aborts_total` for each reservation that was to be freed.
        within_s: how long the call that frees one may take.

    Attributes:
        within_s: as given; may change.
        sending_s: how long prefill may go on writing into a reservation before it is freed all the same.
        late_answer_s: how long an answer to prep_recv is waited for that nobody else waits for.
        linger_s: from a request's arrival at an engine to its being read, at most.
    """

    def __init__(
        self, client: HttpClient, log: logging.Logger, *, on_result: Callable[[str], None], within_s: float
    ) -> None:
        self._client = client
        self._log = log
        self._on_result = on_result
        self.within_s = within_s
        self.sending_s = SENDING_S
        self.late_answer_s = LATE_ANSWER_S
        self.linger_s = LINGER_S
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sending: set[ReplyTask] = set()
        self._freeing: dict[asyncio.Task[None], str] = {}
        self._parting: dict[Stream, asyncio.TimerHandle] = {}

    def pinned(self) -> Mapping[str, int]:
        """Reservations of ended requests that are still to be freed, by decode instance id."""
        return Counter(ident for task, ident in self._freeing.items() if not task.done())

    # --- calls

    async def call(
        self, name: str, work: Coroutine[Any, Any, Reply], within_s: float, left: Callable[[ReplyTask], None]
    ) -> Reply:
        """Make a call on a task of its own and wait for it.

        Raises:
            TransportError: there is no reply, or none within the time.

        After a timeout, or cancelled, the call goes on, and `left` is given its task to deal with.
        """
        task: ReplyTask = self._spawn(work, name)
        try:
            await asyncio.wait((task,), timeout=within_s)
        except asyncio.CancelledError:
            left(task)
            raise
        if not task.done():
            left(task)
            raise TransportError("timeout", f"no answer within {within_s:g} s")
        try:
            return task.result()
        finally:
            del task  # an error in it knows this frame: without a cycle, all that belongs to the request is freed soon

    def cancel_soon(self, task: ReplyTask) -> None:
        """End a call that nobody waits for, as soon as its engine has surely read it."""
        self._spawn(self._end(task, self.linger_s), f"end of {task.get_name()}")

    def part(self, stream: Stream) -> None:
        """Close a stream that was left before its head: the engine must have read the request first."""
        self._parting[stream] = asyncio.get_running_loop().call_later(self.within_s, self.close, stream)

    def close(self, stream: Stream) -> None:
        """Close a stream now, parting or not."""
        timer = self._parting.pop(stream, None)
        if timer is not None:
            timer.cancel()
        stream.close()

    # --- reservations

    def free(self, reservation: Reservation, sending: ReplyTask | None = None) -> None:
        """Free what decode has reserved. Returns at once.

        `sending`: prefill's call, if it is still under way: it writes into decode's memory, whoever that belongs to.
        """
        self._begin(reservation, self._free(reservation, sending), sending)

    def free_late(self, reservation: Reservation, preparing: ReplyTask) -> None:
        """Free what decode reserves once it has found room: when its answer to prep_recv comes. Returns at once."""
        self._begin(reservation, self._free_late(reservation, preparing), preparing)

    def _begin(
        self, reservation: Reservation, work: Coroutine[Any, Any, None], waited: ReplyTask | None = None
    ) -> None:
        if len(self._freeing) >= MAX_PENDING:
            work.close()
            if waited is not None:
                waited.cancel()
            self._on_result("dropped")
            return
        task = self._spawn(work, f"free reservation {reservation.wire_id}")
        self._freeing[task] = reservation.decode.id
        task.add_done_callback(self._freeing.pop)

    async def _free_late(self, reservation: Reservation, preparing: ReplyTask) -> None:
        try:
            await self._end(preparing, self.late_answer_s)
        except asyncio.CancelledError:
            self._on_result("failed")
            raise
        if preparing.cancelled():
            self._result(reservation, "failed")
        elif preparing.exception() is None and preparing.result().status == OK:
            await self._free(reservation, None)

    async def _free(self, reservation: Reservation, sending: ReplyTask | None) -> None:
        result = "failed"
        try:
            if sending is not None:
                self._sending.add(sending)
                await self._end(sending, self.sending_s)
                self._sending.discard(sending)
            result = await self._visit(reservation)
        finally:
            self._result(reservation, result)

    async def _visit(self, reservation: Reservation) -> str:
        """Begin to generate and leave. Only once: an engine that has lost the reservation would die of the call."""
        sink = _Head()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self.within_s):
                address = reservation.decode.address
                stream = await self._client.open_stream(
                    address, b"POST", GENERATE, reservation.headers, reservation.body, sink=sink, retry_stale=False
                )
                await sink.begun.wait()
        except (TimeoutError, TransportError) as error:
            return "not_found" if isinstance(error, TransportError) and error.connecting else "failed"
        finally:
            if stream is not None:
                stream.close()
        return "sent" if sink.status == OK else "not_found" if sink.lost_it else "failed"

    def _result(self, reservation: Reservation, result: str) -> None:
        self._on_result(result)
        if result == "failed":
            self._log.warning(
                "decode instance %s may keep what it has reserved for request %s: it did not take the call that "
                "frees it",
                reservation.decode.id,
                reservation.wire_id,
            )

    # --- inside

    async def _end(self, task: ReplyTask, within_s: float) -> None:
        """Wait for a call, and cancel it when its time is over or nobody waits for it any more."""
        try:
            await asyncio.wait((task,), timeout=within_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            elif not task.cancelled():
                task.exception()  # seen

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, within_s: float) -> None:
        """Free what can be freed within that time, then give up the rest."""
        deadline_s = time.monotonic() + within_s
        for stream in tuple(self._parting):
            self.close(stream)
        for sending in self._sending:
            sending.cancel()
        while due := [task for task in self._freeing if not task.done()]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.wait(due, timeout=left_s)
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError, TransportError):
                await task


class _Head(ReplySink):
    """A sink that only waits for the reply's head."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.status = 0

    @property
    def lost_it(self) -> bool:
        """Whether the connection went before a head: the engine is not there any more, and neither are its pages."""
        return self.status == 0

    def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        """The engine has taken the request on, or refused it."""
        self.status = status
        self.begun.set()

    def data(self, data: bytes, now_s: float) -> None:
        """Nobody reads it."""

    def end(self, now_s: float) -> None:
        """Nobody waits for it."""

    def lost(self, error: TransportError) -> None:  # noqa: ARG002
        """The engine is gone."""
        self.begun.set()
