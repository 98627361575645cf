"""One serving process of several: the data plane, following the supervisor."""

import asyncio
import logging
import mmap
from collections.abc import Callable, Iterator

from coordinator.api.families import FAMILIES
from coordinator.config import ConfigError, Settings
from coordinator.core.errors import Draining
from coordinator.core.instance import Instance
from coordinator.core.ports import KvHolder
from coordinator.dataplane import DataPlane
from coordinator.frontdoor import Telemetry
from coordinator.observability.access import AccessLog
from coordinator.observability.metrics import Metrics
from coordinator.observability.recent import Recent
from coordinator.parts import make_engines, make_scheduler, make_tokenizers
from coordinator.renewal import Renewal
from coordinator.scheduler import LoadBoard, SharedLoads
from coordinator.security.certificates import Certificates
from coordinator.security.files import FileWatch
from coordinator.security.guard import Guard
from coordinator.security.keys import Key
from coordinator.security.uses import KeyUses
from coordinator.transport.client import HttpClient
from coordinator.workers.halves import Halves
from coordinator.workers.memory import uses_words
from coordinator.workers.messages import (
    AskMetrics,
    AskRecent,
    Commit,
    Down,
    Drain,
    Failed,
    LogBy,
    Prepare,
    Requests,
    Secured,
    Serving,
    Snapshot,
    Start,
    Told,
    View,
)
from coordinator.workers.mirror import Mirror
from coordinator.workers.renewing import WorkerRenewal
from coordinator.workers.sums import packed, seen

LOG = logging.getLogger("pd_coordinator.workers")
REPORT_S = 0.5
LOOK_AROUND_S = 0.02
LAST_COMERS_S = 0.5  # whoever was connected just before listening stopped has sent a request by then


class Worker:
    """Serves clients from the first view of the cluster until it is told to leave.

    Args:
        start: who this is, and the configuration.
        memory: the loads of all workers.
        say: sends a message to the supervisor.
        access: where finished requests are logged.
        flush: writes what the log has collected.
    """

    def __init__(
        self,
        start: Start,
        memory: mmap.mmap,
        say: Callable[[object], None],
        access: AccessLog,
        flush: Callable[[], None],
    ) -> None:
        self._settings = settings = Settings.model_validate_json(start.settings)
        self._number = start.worker
        self._say = say
        self._flush = flush
        self._board = LoadBoard(memory, start.workers, start.slots, start.worker)
        self._metrics = Metrics([family.name for family in FAMILIES])
        self._client = HttpClient(connect_s=settings.timeouts.connect_s)
        self._certificates = Certificates(settings, self._client.peers, "data")
        self._certificate_files = FileWatch(
            "watch certificates",
            self._certificates.files,
            self._certificates.reread,
            lambda: self.renewal.settings.tls.reread_s,
        )
        self._tokenizers = make_tokenizers(settings)
        self._engines = make_engines(settings, self._client, self._metrics, self._tokenizers, start.worker)
        self._halves = Halves(self._engines, say)
        self._mirror = Mirror(self._pass_on, self._board)
        self._metrics.add_gauge("kv_pinned_requests", self._read_pinned)
        self._scheduler = make_scheduler(settings, self._engines)
        self._shared = SharedLoads(self._board)
        self._scheduler.share(self._shared)
        self._recent = Recent()
        telemetry = Telemetry(self._metrics, access, self._note, self._recent)
        self._data = DataPlane(
            settings, self._mirror, self._scheduler, self._engines, telemetry, max_connections=start.max_connections
        )
        self._certificates.on_change = self._engines.renew_certificates
        self._data.server.tls = self._certificates.context("data")
        self._data.door.guard = Guard(KeyUses(uses_words(memory, start.workers, start.slots), start.worker))
        self._data.dispatcher.elsewhere = self._board.live_elsewhere
        self._data.dispatcher.on_live = self._board.write_live
        self.renewal = Renewal(
            settings, self._client, self._tokenizers, self._engines, scheduler=self._scheduler, data=self._data
        )
        self._renewing = WorkerRenewal(start.worker, self.renewal, say, lambda: self.leave_alone(self.renewal.drain_s))
        self._engines.on_new = self._halves.add
        self._requests = self._prompt_bytes = self._output_tokens = 0
        self._detaching: set[asyncio.Task[None]] = set()
        self._drain_s: float | None = None
        self._seen = asyncio.Event()
        self._over = asyncio.Event()

    # --- life

    async def run(self) -> int:
        """Serve until told to leave; returns the exit status."""
        await self._seen.wait()
        if self._over.is_set():
            return 0
        server = self._settings.server
        try:
            await self._data.server.listen(server.host, server.port, reuse_port=True)
        except OSError as error:
            self._say(Failed(error.strerror or str(error)))
            return 1
        self._say(Serving(self._data.server.port))
        self._certificate_files.start()
        ticking = asyncio.create_task(self._tick(), name="look around")
        try:
            await self._over.wait()
            await self._data.drain(self._drain_s or 0.0)
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
        await self._aclose()
        return 0

    def drain(self, within_s: float) -> None:
        """Take no more requests, and leave once the live ones have ended or `within_s` is over.

        The first call sets the time; a later one with 0 seconds ends it.
        """
        if self._drain_s is None:
            self._drain_s = within_s
            self._over.set()
            self._seen.set()
        elif within_s == 0:
            self._data.dispatcher.interrupt_all(Draining())

    def leave_alone(self, within_s: float) -> None:
        """The same while the others go on: they get the connections that come from here on.

        Requests on connections that are open already are served for another 0.5 s, if there is that much time.
        """
        self._data.server.stop_listening()
        if within_s <= LAST_COMERS_S:
            self.drain(within_s)
        else:
            asyncio.get_running_loop().call_later(LAST_COMERS_S, self.drain, within_s - LAST_COMERS_S)

    async def _aclose(self) -> None:
        self._report()
        await self._renewing.aclose()
        await self._certificate_files.aclose()
        await self._data.server.aclose()
        for task in self._detaching:
            task.cancel()
        if self._detaching:
            await asyncio.wait(self._detaching)
        for engine in self._engines.values():
            await engine.aclose()
        await self._tokenizers.aclose()
        await self._data.aclose()
        await self._client.aclose()
        self._say(Snapshot(0, packed(self._metrics)))

    # --- from the supervisor

    def take(self, message: Down) -> None:
        """Do what the supervisor says; hot for `Told`."""
        if isinstance(message, Told):
            self._halves.told(message)
        elif isinstance(message, View):
            self._see(message)
        elif isinstance(message, Secured):
            self._secure(Settings.model_validate_json(message.settings), message.keys)
        elif isinstance(message, AskRecent):
            self._say(seen(self._number, self._recent))
        elif isinstance(message, AskMetrics):
            self._say(Snapshot(message.number, packed(self._metrics)))
        elif isinstance(message, Prepare | Commit | LogBy):
            self._renewing.take(message)
        elif isinstance(message, Drain):
            self.drain(message.within_s)

    def _secure(self, settings: Settings, keys: list[Key] | None) -> None:
        """Go by these keys and certificates."""
        self._data.secure(settings, keys)
        try:
            self._certificates.apply(settings)
        except ConfigError as error:  # the supervisor could still use the files
            LOG.error("certificates and keys not read again, those before stay in use: %s", error)

    def _see(self, view: View) -> None:
        """Go by another picture of the cluster."""
        moves = self._mirror.take(view)
        for instance in moves.joined:
            self._attach(instance)
        self._shared.assign(self._mirror.slots)
        self._scheduler.on_view(self._mirror.view)
        self._board.write_view(view.number)
        for instance in moves.gone:
            task = asyncio.create_task(self._detach(instance), name=f"leave:{instance.id}")
            self._detaching.add(task)
            task.add_done_callback(self._detaching.discard)
        ids = {instance.id for instance, _ in view.members}
        for gone_id in {instance.id for instance in moves.gone} - ids:
            self._metrics.forget_instance(gone_id)
        self._seen.set()

    def _attach(self, instance: Instance) -> None:
        engine = self._engines.get(instance.engine)
        if engine is None:
            return
        try:
            engine.attach(instance, _Unwatched())
        except Exception:  # the border to an engine
            LOG.exception("instance %s could not be attached", instance.id)

    async def _detach(self, instance: Instance) -> None:
        engine = self._engines.get(instance.engine)
        if engine is None:
            return
        try:
            await engine.detach(instance)
        except Exception:  # the border to an engine
            LOG.exception("instance %s could not be detached", instance.id)

    # --- to the supervisor

    def _pass_on(self, message: object) -> None:
        """Tell how an instance does; the supervisor's log may say so at once, and ours should not lag behind."""
        self._say(message)
        self._flush()

    def _read_pinned(self) -> Iterator[tuple[tuple[str], int]]:
        """Ended requests whose KV is still to be released; what live ones keep is on the board."""
        known = {instance.id for instance in self._mirror.members}
        for engine in self._engines.values():
            if isinstance(engine, KvHolder):
                yield from (((held,), count) for held, count in engine.pinned().items() if held in known)

    def _note(self, prompt_bytes: int, output_tokens: int) -> None:
        self._requests += 1
        self._prompt_bytes += prompt_bytes
        self._output_tokens += output_tokens

    def _report(self) -> None:
        if self._requests:
            self._say(Requests(self._requests, self._prompt_bytes, self._output_tokens))
            self._requests = self._prompt_bytes = self._output_tokens = 0

    async def _tick(self) -> None:
        """Now and then: a sign of life, whether what others gave back helps those who wait, and finished requests."""
        elapsed_s = 0.0
        while True:
            await asyncio.sleep(LOOK_AROUND_S)
            self._board.beat()
            if self._scheduler.queued:
                self._scheduler.look_around()
            elapsed_s += LOOK_AROUND_S
            if elapsed_s >= REPORT_S:
                elapsed_s = 0.0
                self._report()


class _Unwatched:
    """Nobody asks here whether links are open: the supervisor knows, and its views say who can be used."""

    def linked(self) -> None:
        """See core.ports.Watcher."""

    def unlinked(self, reason: str) -> None:
        """See core.ports.Watcher."""
