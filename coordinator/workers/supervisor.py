"""The process over several: it looks after instances and workers, and serves no client."""

import asyncio
import logging
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.api.families import FAMILIES
from coordinator.config import Settings
from coordinator.controlplane import ControlPlane
from coordinator.core.abilities import AnsweringEngine
from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Instance, State
from coordinator.core.ports import EngineProtocol, SplitEngine
from coordinator.observability.metrics import Metrics
from coordinator.parts import make_engines, make_tokenizers
from coordinator.renewal import Renewal
from coordinator.scheduler import LoadBoard
from coordinator.securing import Security
from coordinator.security.certificates import Certificates
from coordinator.security.keys import Key
from coordinator.security.uses import clear_row
from coordinator.transport.client import HttpClient
from coordinator.workers.counts import CrewCounts
from coordinator.workers.crew import Crew
from coordinator.workers.memory import size_bytes, uses_words
from coordinator.workers.messages import Charge, Credit, Prepared, Requests, Said, Secured, Seen, Start, Told, Up
from coordinator.workers.port import ReservedPort
from coordinator.workers.renewing import CrewRenewal
from coordinator.workers.slots import Slots
from coordinator.workers.sums import MetricSums
from coordinator.workers.views import ViewSender
from coordinator.workers.work import BoardWork

LOG = logging.getLogger("pd_coordinator.workers")
SLOTS = 8192
WATCH_S = 0.1


class Supervisor:
    """Control plane and workers, from start to stop; the same calls as `app.App`."""

    def __init__(self, settings: Settings, *, max_connections: int, path: Path | None = None) -> None:
        self.port = settings.server.port
        self._max_connections = max_connections
        count = settings.server.workers
        self.metrics = Metrics([family.name for family in FAMILIES])
        self._sums = MetricSums(self.metrics)
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self._certificates = Certificates(settings, self._client.peers, "management")
        self._tokenizers = make_tokenizers(settings)
        self._engines = make_engines(settings, self._client, self.metrics, self._tokenizers)
        self._board_fd = os.memfd_create("pd-coordinator loads")
        os.ftruncate(self._board_fd, size_bytes(count, SLOTS))
        memory = mmap.mmap(self._board_fd, 0)
        self._board = LoadBoard(memory, count, SLOTS)
        self._slots = Slots(SLOTS)
        work = BoardWork(self._board, self._slots)
        self._counts = CrewCounts(self._sums, lambda: self.crew)
        self.control = ControlPlane(
            settings,
            self._engines,
            self.metrics,
            work,
            client=self._client,
            counted=self._counts,
            path=path,
            render=self._render,
        )
        self.cluster = self.control.cluster
        self.management = self.control.management
        self.crew = Crew(
            self._board_fd, self._board, self._introduction, self._greet, heard=self._heard, bury=self._sums.bury
        )
        self._uses = uses_words(memory, count, SLOTS)
        self.crew.on_end = self._ended
        self._certificates.on_change = self._engines.renew_certificates
        self.management.tls = self._certificates.context("management")
        self.security = Security(settings, self.management, self._certificates, self._secure, self.metrics)
        self.control.reloader.parts.append(self.security.apply)
        self.renewal = self.control.reloader.renewal = Renewal(settings, self._client, self._tokenizers, self._engines)
        self._renewing = self.control.reloader.processes = CrewRenewal(self.crew)
        self._engines.on_new = self._welcome
        self._views = ViewSender(
            self.cluster, self._slots, lambda view: self.crew.tell(None, view), lambda: self.crew.acknowledged
        )
        work.may_come = self._views.may_get_requests
        self._known: tuple[Instance, ...] = ()
        self._watching: asyncio.Task[None] | None = None
        self._reserved: ReservedPort | None = None

    # --- life

    async def start(self) -> None:
        """Listen on the management port, look after the instances, and start every worker.

        Raises:
            OSError: a port cannot be had, or a worker cannot be started; nothing is left running.
        """
        try:
            self._reserved = ReservedPort(self.settings.server.host, self.port)
            self.port = self._reserved.port
            for name, engine in self._engines.items():
                self._own(name, engine)
            self.security.start()
            await self.control.start(lambda: self.crew.start(self.settings.server.workers))
            self._watching = asyncio.create_task(self._watch(), name="watch workers and instances")
        except BaseException:
            await self.aclose()
            raise

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        return self.control.settings

    def hang_up(self) -> None:
        """Read the file again, soon; what comes of it is in the log."""
        self.control.reloader.request()

    async def drain(self) -> None:
        """Have every worker drain and end; one that outlives its time is killed."""
        self.management.draining = True
        await self.crew.drain(self.settings.timeouts.effective.drain_s)

    async def aclose(self) -> None:
        """Stop everything; idempotent. Workers that still run get a third of a second for their aborts."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self.control.discovery.aclose()
        await self.security.aclose()
        await self.crew.aclose()
        for engine in self._engines.values():
            await engine.aclose()
        await self._tokenizers.aclose()
        await self.control.aclose()
        await self._client.aclose()
        if self._reserved is not None:
            self._reserved.close()
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1

    async def _watch(self) -> None:
        """See when a leaving instance is idle, and what workers must know although the view has not changed."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.crew.look()
                self.management.serving = self.crew.serving
                self._part_idle()
                self._views.refresh()
            except Exception:  # the border to all that is watched: one fault must not end the watch
                LOG.exception("watching workers and instances failed")

    def _part_idle(self) -> None:
        current = list(self.cluster.states())
        # those behind them are leaving, too, and their ids have new holders
        leaving = [instance for instance, state in current if state is State.DRAINING]
        for instance in (*leaving, *self.cluster.known()[len(current) :]):
            if self.control.work.in_flight(instance) == 0:
                self.cluster.idle(instance)
        known = self.cluster.known()
        if known != self._known:
            self._known = known
            self._forget_all_but(known)

    def _forget_all_but(self, known: tuple[Instance, ...]) -> None:
        keys = {instance.key for instance in known}
        ids = {instance.id for instance in known}
        for instance, _ in self._slots.pairs():
            if instance.key not in keys:
                self._board.clear_slot(self._slots.free(instance))
                self._views.forget(instance)
                if instance.id not in ids:
                    self._sums.forget_instance(instance.id)

    # --- workers

    def _introduction(self, number: int) -> Start:
        server = self.settings.server.model_copy(update={"port": self.port})
        settings = self.settings.model_copy(update={"server": server}).model_dump_json()
        return Start(number, self.settings.server.workers, SLOTS, settings, self._max_connections, sys.path)

    def _greet(self, number: int) -> None:
        """Tell a new worker all there is; the view comes last, since it goes to work with that."""
        for engine in self._engines.values():
            if isinstance(engine, SplitEngine):
                engine.introduce(number)
        self._secure(self.security.settings, self.security.keys, number)
        self._renewing.log_by(self.control.reloader.logging, number)
        self.crew.tell(number, self._views.view())

    def _secure(self, settings: Settings, keys: Sequence[Key] | None, worker: int | None = None) -> None:
        """Tell one worker, or all, whom to let in."""
        self.crew.tell(worker, Secured(settings.model_dump_json(), None if keys is None else list(keys)))

    def _own(self, name: str, engine: EngineProtocol) -> None:
        if isinstance(engine, SplitEngine):
            engine.own(self._teller(name))

    def _welcome(self, name: str, engine: EngineProtocol) -> None:
        """An engine protocol has been added while the workers run."""
        self._own(name, engine)
        self.control.welcome(name, engine)

    def _ended(self, number: int) -> None:
        """A worker has ended while others go on."""
        clear_row(self._uses, number)
        self._renewing.ended(number)

    def _teller(self, engine: str) -> Callable[[int | None, bytes], None]:
        """Sends an engine's own messages to its halves in the workers."""
        return lambda worker, data: self.crew.tell(worker, Told(engine, data))

    def _heard(self, message: Up) -> None:
        if isinstance(message, Said):
            engine = self._engines[message.engine]
            if isinstance(engine, AnsweringEngine):
                engine.answered(message.data)
        elif isinstance(message, Prepared):
            self._renewing.heard(message)
        elif isinstance(message, Requests):
            self.control.traffic.note(message.prompt_bytes, message.output_tokens, message.count)
        elif isinstance(message, Seen):
            self._counts.take(message)
        elif isinstance(message, Charge | Credit):
            asked = (message.instance, message.url)
            instance = next((i for i in self.cluster.known() if (i.id, i.url) == asked), None)
            if instance is None:
                return
            if isinstance(message, Credit):
                self.cluster.credit(instance)
                return
            side, name = Side(message.side), message.instance
            error = EngineFailed(side, name, message.reason, detail=message.detail, connecting=message.connecting)
            error.doubted = message.doubted
            self.cluster.charge(instance, error)

    async def _render(self) -> bytes:
        """The page with the sums of all processes."""
        return self._sums.render(await self.crew.snapshots())
