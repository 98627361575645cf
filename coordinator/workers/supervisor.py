"""The process over several: it looks after instances and workers, and serves no client."""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from coordinator.api.families import FAMILIES
from coordinator.config import Settings
from coordinator.controlplane import ControlPlane
from coordinator.core.errors import EngineFailed, Side
from coordinator.core.ports import SplitEngine
from coordinator.observability.instruments import Cells
from coordinator.observability.metrics import Metrics
from coordinator.parts import make_engines
from coordinator.scheduler import LoadBoard, size_bytes
from coordinator.transport.client import HttpClient
from coordinator.workers.messages import Charge, Credit, Failed, Requests, Start, Told, Up
from coordinator.workers.process import WorkerProcess
from coordinator.workers.slots import Slots
from coordinator.workers.views import ViewSender
from coordinator.workers.work import BoardWork

LOG = logging.getLogger("pd_coordinator.workers")
SLOTS = 8192
METRICS_S = 0.5  # how long a scrape waits for a worker
WATCH_S = 0.1
SHORT_LIFE_S = 1.0
LONGEST_PAUSE_S = 10.0
LAST_WORDS_S = 4.0  # beyond the grace time, for a worker's error events and aborts

_SNAPSHOT = msgspec.msgpack.Decoder(dict[str, dict[tuple[str, ...], list[float]]])


class Supervisor:
    """Control plane and workers, from start to stop; the same calls as `app.App`."""

    def __init__(self, settings: Settings, *, max_connections: int, path: Path | None = None) -> None:
        self.settings = settings
        self._max_connections = max_connections
        count = settings.server.workers
        self.metrics = Metrics([family.name for family in FAMILIES])
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self._engines = make_engines(settings, self._client, self.metrics)
        self._board_fd = os.memfd_create("pd-coordinator loads")
        os.ftruncate(self._board_fd, size_bytes(count, SLOTS))
        self._board = LoadBoard(mmap.mmap(self._board_fd, 0), count, SLOTS)
        self._slots = Slots(SLOTS)
        work = BoardWork(self._board, self._slots)
        self.control = ControlPlane(settings, self._engines, self.metrics, work, path=path, render=self._render)
        self.cluster = self.control.cluster
        self.management = self.control.management
        self._workers: dict[int, WorkerProcess] = {}
        self._views = ViewSender(self.cluster, self._slots, self._tell_all)
        self._past: dict[str, Cells] = {}
        self._last: dict[int, dict[str, Cells]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._leaving = False
        self._reserved: socket.socket | None = None
        self.port = settings.server.port

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers by their numbers."""
        return {number: worker.pid for number, worker in self._workers.items()}

    # --- life

    async def start(self) -> None:
        """Listen on the management port, look after the instances, and start every worker.

        Raises:
            OSError: a port cannot be had; nothing is left running.
        """
        try:
            self._reserve_port()
            for name, engine in self._engines.items():
                if isinstance(engine, SplitEngine):
                    engine.own(self._teller(name))
            self.control.take_instances(self.settings)
            await self.cluster.start()
            self.management.serving = False
            await self.management.start()
            await self._start_workers()
            self.management.serving = True
        except BaseException:
            await self.aclose()
            raise

    async def _start_workers(self) -> None:
        count = self.settings.server.workers
        workers = [await self._launch(number) for number in range(count)]
        for worker in workers:
            answer = await worker.started()
            if isinstance(answer, Failed):
                raise OSError(answer.reason)
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(worker), name=f"worker {worker.number}") for worker in workers]
        self._keepers.append(loop.create_task(self._watch(), name="watch the board"))

    def reload(self) -> bool:
        """Read the file again; see ControlPlane.reload."""
        return self.control.reload()

    async def drain(self) -> None:
        """Have every worker drain and end; one that outlives its time is killed."""
        self._leaving = True
        self.management.draining = True
        within_s = self.settings.timeouts.effective.drain_s
        for worker in self._workers.values():
            worker.drain(within_s)
        ends = [asyncio.create_task(w.ended(), name=f"end of worker {w.number}") for w in self._workers.values()]
        if ends:
            await asyncio.wait(ends, timeout=None if within_s == float("inf") else within_s + LAST_WORDS_S)
        for worker in self._workers.values():
            worker.kill()

    async def aclose(self) -> None:
        """Stop everything; idempotent."""
        self._leaving = True
        for task in self._keepers:
            task.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        for worker in self._workers.values():
            worker.kill()
            await worker.ended()
        self._workers.clear()
        for engine in self._engines.values():
            await engine.aclose()
        await self.cluster.aclose()
        await self.management.aclose()
        await self._client.aclose()
        if self._reserved is not None:
            self._reserved.close()
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1

    # --- workers

    async def _launch(self, number: int) -> WorkerProcess:
        worker = WorkerProcess(number, self._heard)
        server = self.settings.server.model_copy(update={"port": self.port})
        settings = self.settings.model_copy(update={"server": server})
        count = self.settings.server.workers
        start = Start(number, count, SLOTS, settings.model_dump_json(), self._max_connections)
        await worker.start(start, self._board_fd)
        self._workers[number] = worker
        worker.say(self._views.view())
        for engine in self._engines.values():
            if isinstance(engine, SplitEngine):
                engine.introduce(number)
        return worker

    async def _keep(self, worker: WorkerProcess) -> None:
        """Put a new process in the place of one that has ended, for as long as it takes."""
        pause_s = 0.0
        while True:
            since_s = time.monotonic()
            status = await worker.ended()
            if self._leaving:
                return
            self._bury(worker)
            lived_s = time.monotonic() - since_s
            pause_s = 0.0 if lived_s > SHORT_LIFE_S else min(max(0.25, pause_s * 2), LONGEST_PAUSE_S)
            LOG.warning("worker %d ended with status %d and is started again", worker.number, status)
            await asyncio.sleep(pause_s)
            worker = await self._launch(worker.number)

    def _bury(self, worker: WorkerProcess) -> None:
        """Clear the load of a worker that has died and keep what it had counted."""
        self._board.clear_row(worker.number)
        last = self._last.pop(worker.number, None)
        if last is not None:
            for instrument in self.metrics.instruments:
                parts = [part.get(instrument.name, {}) for part in (self._past, last)]
                self._past[instrument.name] = instrument.merge(parts)

    async def _watch(self) -> None:
        """See when a leaving instance is idle, and when what workers must know has changed without a view."""
        while True:
            await asyncio.sleep(WATCH_S)
            known = self.cluster.known()
            for instance in self._slots.gone(known):
                if self.control.work.in_flight(instance) == 0:
                    self._board.clear_slot(self._slots.free(instance))
            for instance in known:
                if instance not in self.cluster.view.ready and self.control.work.in_flight(instance) == 0:
                    self.cluster.idle(instance)
            self._views.refresh()

    # --- messages

    def _teller(self, engine: str) -> Callable[[int | None, bytes], None]:
        """Sends an engine's own messages to its halves in the workers."""
        return lambda worker, data: self._tell(worker, Told(engine, data))

    def _tell(self, number: int | None, message: object) -> None:
        """Send to one worker, or to all."""
        if number is None:
            self._tell_all(message)
            return
        worker = self._workers.get(number)
        if worker is not None:
            worker.say(message)

    def _tell_all(self, message: object) -> None:
        for worker in self._workers.values():
            worker.say(message)

    def _heard(self, _worker: WorkerProcess, message: Up) -> None:
        if isinstance(message, Requests):
            self.control.traffic.note(message.prompt_bytes, message.output_tokens, message.count)
        elif isinstance(message, Charge | Credit):
            instance = next((i for i in self.cluster.known() if i.id == message.instance), None)
            if instance is None:
                return
            if isinstance(message, Credit):
                self.cluster.credit(instance)
            else:
                error = EngineFailed(
                    Side(message.side),
                    message.instance,
                    message.reason,
                    detail=message.detail,
                    connecting=message.connecting,
                )
                self.cluster.charge(instance, error)

    # --- metrics and port

    async def _render(self) -> bytes:
        """The sums of all processes; a worker that does not answer in time counts as it last did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(METRICS_S), asyncio.TaskGroup() as group:
                for worker in self._workers.values():
                    group.create_task(self._ask(worker), name=f"metrics of worker {worker.number}")
        return self.metrics.render([self._past, *self._last.values()])

    async def _ask(self, worker: WorkerProcess) -> None:
        data = await worker.snapshot()
        if data is not None:
            self._last[worker.number] = _SNAPSHOT.decode(data)

    def _reserve_port(self) -> None:
        """Hold the data port without listening on it, so that all workers get the same one; raises OSError."""
        host = self.settings.server.host
        family, _, _, _, address = socket.getaddrinfo(host or None, self.port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
        except OSError:
            reserved.close()
            raise
        self._reserved = reserved
        self.port = reserved.getsockname()[1]
