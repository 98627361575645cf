"""All workers: started, started again, drained, killed."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

from coordinator.scheduler import LoadBoard
from coordinator.workers.messages import AskMetrics, Failed, Start, Up
from coordinator.workers.process import WorkerProcess

LOG = logging.getLogger("pd_coordinator.workers")
SHORT_LIFE_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
SNAPSHOT_S = 0.5
LOOKS_PER_SNAPSHOT = 10
SILENT_LOOKS = 150
LAST_WORDS_S = 5.0  # beyond the grace time, for a worker's error events, aborts and closing
HURRY_S = 0.35


class Crew:
    """Keeps as many workers as it was made with.

    Args:
        board_fd: the shared memory, for the workers to inherit.
        board: the same, for us.
        introduction: what a new worker is told before all else.
        greet: tells a new worker, by its number, what the others know.
        heard: called with every message that is not about starting or metrics.
        bury: gets the last metrics of a worker that has ended.

    Attributes:
        on_end: told the number of a worker that has ended while others go on.
    """

    def __init__(  # the supervisor hands over what it has built
        self,
        board_fd: int,
        board: LoadBoard,
        introduction: Callable[[int], Start],
        greet: Callable[[int], None],
        *,
        heard: Callable[[Up], None],
        bury: Callable[[bytes | None], None],
    ) -> None:
        self._board_fd = board_fd
        self._board = board
        self._introduction = introduction
        self._greet = greet
        self._heard = heard
        self._bury = bury
        self._workers: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._beats: dict[WorkerProcess, tuple[int, int]] = {}
        self._looks = 0
        self._leaving = False
        self.on_end: Callable[[int], None] | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by the workers' numbers."""
        return {number: worker.pid for number, worker in self._workers.items()}

    @property
    def serving(self) -> bool:
        """Whether any worker serves."""
        return any(worker.serving for worker in self._workers.values())

    @property
    def acknowledged(self) -> float:
        """The number of the oldest picture of the cluster that a worker goes by; infinity: there is no worker."""
        return min(map(self._board.view_of, self._workers), default=math.inf)

    def tell(self, number: int | None, message: object) -> None:
        """Send to one worker, if it is there, or to all."""
        if number is None:
            for worker in self._workers.values():
                worker.say(message)
        elif (found := self._workers.get(number)) is not None:
            found.say(message)

    async def start(self, count: int) -> None:
        """Start so many and wait until they serve.

        Raises:
            OSError: one of them cannot; all are left to `aclose`.
        """
        workers = [await self._launch(number) for number in range(count)]
        for worker in workers:
            answer = await worker.started()
            if isinstance(answer, Failed):
                raise OSError(answer.reason)
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(worker), name=f"worker {worker.number}") for worker in workers]

    def look(self) -> None:
        """Look after the workers; to be called every now and then.

        One that has not moved for `SILENT_LOOKS` calls is killed: it would let clients hang. Looks are counted, not
        seconds: a machine that was suspended has no silent workers. Now and then all are asked for their metrics, so
        that little is lost with one that ends suddenly.
        """
        self._looks += 1
        if self._looks % LOOKS_PER_SNAPSHOT == 0:
            self.tell(None, AskMetrics(0))
        for worker in self._workers.values():
            beat = self._board.beat_of(worker.number)
            known, looks = self._beats.get(worker, (-1, 0))
            looks = looks + 1 if beat == known and worker.serving else 0
            self._beats[worker] = (beat, looks)
            if looks == SILENT_LOOKS:
                LOG.error("worker %d does not move any more and is killed", worker.number)
                worker.kill()

    async def snapshots(self) -> Iterator[bytes]:
        """The metrics of all; of one that does not answer within half a second, what it said last."""
        asking = [
            asyncio.create_task(worker.refresh_snapshot(), name=f"metrics of worker {worker.number}")
            for worker in self._workers.values()
        ]
        try:
            if asking:
                await asyncio.wait(asking, timeout=SNAPSHOT_S)
        finally:
            for task in asking:
                task.cancel()
        return (worker.snapshot for worker in list(self._workers.values()) if worker.snapshot is not None)

    async def drain(self, within_s: float) -> None:
        """Have every worker drain and end; one that outlives its time is left to `aclose`, which kills it."""
        self._leaving = True
        for worker in await self._end(within_s, within_s + LAST_WORDS_S):
            LOG.warning("worker %d does not come to its end and is killed", worker.number)

    async def aclose(self) -> None:
        """End every worker at once; idempotent."""
        self._leaving = True
        for task in self._keepers:
            task.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        try:
            await self._end(0.0, HURRY_S)
        finally:
            for worker in self._workers.values():
                worker.kill()
        for worker in self._workers.values():
            await worker.ended()

    async def _end(self, within_s: float, patience_s: float) -> list[WorkerProcess]:
        """Tell all to end and wait for that; returns those that have not."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.drain(within_s)
        ends = [asyncio.create_task(worker.ended(), name=f"end of worker {worker.number}") for worker in workers]
        try:
            if ends:
                await asyncio.wait(ends, timeout=None if math.isinf(patience_s) else patience_s)
        finally:
            for task in ends:
                task.cancel()
        return [worker for worker, task in zip(workers, ends, strict=True) if not task.done()]

    # --- one worker

    async def _launch(self, number: int) -> WorkerProcess:
        worker = WorkerProcess(number, self._heard)
        await worker.start(lambda: self._introduction(number), self._board_fd)
        self._workers[number] = worker
        self._greet(number)
        return worker

    async def _keep(self, worker: WorkerProcess) -> None:
        """Put a new process in the place of one that has ended, for as long as it takes."""
        pause_s = 0.0
        while True:
            since_s = time.monotonic()
            status = await worker.ended()
            if self._leaving:
                return
            self._remove(worker, status)
            brief = time.monotonic() - since_s < SHORT_LIFE_S
            pause_s = min(max(FIRST_PAUSE_S, pause_s * 2), LONGEST_PAUSE_S) if brief else 0.0
            await asyncio.sleep(pause_s)
            successor = await self._relaunch(worker.number)
            if successor is None:
                return
            worker = successor

    async def _relaunch(self, number: int) -> WorkerProcess | None:
        """Start it, however often that takes; None: everybody is to leave."""
        pause_s = FIRST_PAUSE_S
        while not self._leaving:
            try:
                return await self._launch(number)
            except OSError as error:
                LOG.error("worker %d cannot be started: %s", number, error.strerror or error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return None

    def _remove(self, worker: WorkerProcess, status: int) -> None:
        """Clear the load of a worker that has ended, and keep what it had counted."""
        lost = self._board.live_of(worker.number)
        self._board.clear_row(worker.number)
        if self.on_end is not None:
            self.on_end(worker.number)
        del self._workers[worker.number]
        self._beats.pop(worker, None)
        self._bury(worker.snapshot)
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        level = logging.INFO if status == os.EX_OK else logging.WARNING
        LOG.log(level, "worker %d was %s with %d live requests; it is started again", worker.number, how, lost)
