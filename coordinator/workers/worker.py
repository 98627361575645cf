"""One serving process of several: the data plane, following the supervisor."""

import asyncio
import mmap
import signal
import socket

import msgspec
import uvloop

from coordinator.api.families import FAMILIES
from coordinator.config import Settings
from coordinator.core.ports import SplitEngine
from coordinator.dataplane import DataPlane
from coordinator.frontdoor import Telemetry
from coordinator.observability.logs import Logs, configure
from coordinator.observability.metrics import Metrics
from coordinator.parts import make_engines, make_policies, settle_memory
from coordinator.scheduler import LoadBoard, Scheduler, SharedLoads
from coordinator.transport.client import HttpClient
from coordinator.workers.channel import Channel
from coordinator.workers.messages import (
    AskMetrics,
    Down,
    Drain,
    Failed,
    Requests,
    Serving,
    Snapshot,
    Start,
    Told,
    View,
)
from coordinator.workers.mirror import Mirror

REPORT_S = 0.5
LOOK_AROUND_S = 0.02
REFRESH_S = 0.002
REFRESH_S_PER_INSTANCE = 0.00002  # a placement spends at most about a tenth of the time on reading the board


class Worker:
    """Serves clients from the first `Start` to the last `Drain`.

    Args:
        start: who this is, and the configuration.
        board: the loads of all workers.
        logs: where this process logs.
    """

    def __init__(self, start: Start, memory: mmap.mmap, channel: Channel[Down], logs: Logs) -> None:
        settings = Settings.model_validate_json(start.settings)
        self._settings = settings
        self._say = channel.send
        self._board = LoadBoard(memory, start.workers, start.slots, start.worker)
        self._shared = SharedLoads(self._board)
        self._metrics = Metrics([family.name for family in FAMILIES])
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self._engines = make_engines(settings, self._client, self._metrics, start.worker)
        self._halves = {name: engine for name, engine in self._engines.items() if isinstance(engine, SplitEngine)}
        for half in self._halves.values():
            half.follow()
        self._mirror = Mirror(self._say)
        self._scheduler = Scheduler(
            make_policies(settings), max_queue=settings.limits.max_queue, fallback=settings.scheduling.fallback
        )
        self._scheduler.share(self._shared)
        telemetry = Telemetry(self._metrics, logs.access, self._note)
        self._data = DataPlane(
            settings,
            self._mirror,
            self._scheduler,
            self._engines,
            telemetry,
            max_connections=start.max_connections,
        )
        self._data.dispatcher.elsewhere = self._board.live_elsewhere
        self._data.dispatcher.on_live = lambda live: self._board.write_process(live, self._scheduler.queued)
        self._requests = self._prompt_bytes = self._output_tokens = 0
        self._drain_s: float | None = None
        self._over = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to drain; returns the exit status."""
        server = self._settings.server
        try:
            await self._data.server.listen(server.host, server.port, reuse_port=True)
        except OSError as error:
            self._say(Failed(error.strerror or str(error)))
            return 1
        self._say(Serving(self._data.server.port))
        settle_memory()
        ticking = asyncio.create_task(self._tick(), name="look around")
        await self._over.wait()
        await self._data.drain(0.0 if self._drain_s is None else self._drain_s)
        ticking.cancel()
        await asyncio.wait([ticking])
        self._report()
        await self._data.server.aclose()
        for engine in self._engines.values():
            await engine.aclose()
        await self._client.aclose()
        return 0

    def take(self, message: Down) -> None:
        """Do what the supervisor says; hot for `Told`."""
        if isinstance(message, Told):
            half = self._halves.get(message.engine)
            if half is not None:
                half.told(message.data)
        elif isinstance(message, View):
            self._shared.interval_s = max(REFRESH_S, REFRESH_S_PER_INSTANCE * len(message.members))
            self._shared.assign({instance.key: slot for instance, slot in message.members})
            self._scheduler.on_view(self._mirror.take(message))
        elif isinstance(message, AskMetrics):
            self._say(Snapshot(message.number, msgspec.msgpack.encode(self._metrics.snapshot())))
        elif isinstance(message, Drain):
            self.leave(message.within_s)

    def leave(self, within_s: float) -> None:
        """Drain and end; the first call counts."""
        if self._drain_s is None:
            self._drain_s = within_s
            self._over.set()

    def _note(self, prompt_bytes: int, output_tokens: int) -> None:
        self._requests += 1
        self._prompt_bytes += prompt_bytes
        self._output_tokens += output_tokens

    async def _tick(self) -> None:
        """Now and then: tell of finished requests, and see whether what the others gave back helps those who wait."""
        elapsed_s = 0.0
        while True:
            await asyncio.sleep(LOOK_AROUND_S)
            elapsed_s += LOOK_AROUND_S
            if self._scheduler.queued:
                self._scheduler.look_around()
            self._board.write_process(self._data.dispatcher.live, self._scheduler.queued)
            if elapsed_s >= REPORT_S:
                elapsed_s = 0.0
                self._report()

    def _report(self) -> None:
        if self._requests:
            self._say(Requests(self._requests, self._prompt_bytes, self._output_tokens))
            self._requests = self._prompt_bytes = self._output_tokens = 0


def main(socket_fd: int, board_fd: int) -> int:
    """Run a worker on an inherited socket and shared memory."""
    return uvloop.run(_main(socket_fd, board_fd))


async def _main(socket_fd: int, board_fd: int) -> int:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[Start] = loop.create_future()
    worker: Worker | None = None
    early: list[Down] = []

    def take(message: Down) -> None:
        if worker is not None:
            worker.take(message)
        elif isinstance(message, Start) and not first.done():
            first.set_result(message)
        else:
            early.append(message)

    def ended() -> None:
        if worker is not None:
            worker.leave(0.0)  # the supervisor is gone: nobody would tell us anything any more
        elif not first.done():
            first.cancel()

    channel: Channel[Down] = await Channel.open(socket.socket(fileno=socket_fd), Down, take, ended)
    start = await first
    settings = Settings.model_validate_json(start.settings)
    logs = configure(settings.logging.level, settings.logging.format)
    try:
        worker = Worker(start, mmap.mmap(board_fd, 0), channel, logs)
        loop.add_signal_handler(signal.SIGTERM, worker.leave, settings.timeouts.effective.drain_s)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the supervisor's to handle
        for message in early:
            worker.take(message)
        return await worker.run()
    finally:
        channel.close()
        logs.close()
