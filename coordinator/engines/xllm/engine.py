"""The engine protocol `xllm`: a request goes to prefill, its results come back as calls (xLLM protocol page §5, §6)."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from coordinator.api.writers import writer_of
from coordinator.core.abilities import Host, News
from coordinator.core.errors import EngineFailed, RequestError
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import Answer, Outcome, Placement, Watcher
from coordinator.core.request import Prepared, Request
from coordinator.engines.context import EngineContext
from coordinator.engines.plain_call import pass_through, serve_alone
from coordinator.engines.token_prompts import TokenRequest
from coordinator.engines.xllm import info, settings
from coordinator.engines.xllm.answer import PushedAnswer
from coordinator.engines.xllm.boxes import Boxes
from coordinator.engines.xllm.bulletin import Bulletin
from coordinator.engines.xllm.calls import EngineCalls
from coordinator.engines.xllm.discovery import Discovery
from coordinator.engines.xllm.fleet import Fleet
from coordinator.engines.xllm.inbound import Inbound
from coordinator.engines.xllm.linking import Linker
from coordinator.engines.xllm.mailbox import Mailbox
from coordinator.engines.xllm.models import Models
from coordinator.engines.xllm.preparing import Way, completion_body, read_request
from coordinator.engines.xllm.presence import Presence
from coordinator.engines.xllm.registry import Beat
from coordinator.engines.xllm.split import Office, Serving, Tell
from coordinator.policies.block_hashes import block_hashes
from coordinator.transport.scope import Scope

if TYPE_CHECKING:
    from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGeneration

HEALTH_PATH = "/health"


class XllmEngine:
    """Engine protocol `xllm`: implements core.ports.EngineProtocol."""

    renewable = settings.RENEWABLE
    check = staticmethod(info.flaws)

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._client = context.client
        self._log = context.log
        self._settings = settings.settings_of(context.settings or settings.read_settings({}))
        self._late = context.metrics.late_frames.labels()
        self._boxes = Boxes(context.log, on_late=self._late.inc)
        self._calls = EngineCalls(context.client, self._settings.call_timeout_s)
        self._linker = Linker(self._calls, context.log)
        self._fleet = Fleet(self._linker, self._lose, context.log)
        self._inbound = Inbound(self._settings, self._fleet, self._deliver, context.log)
        self._linker.ready = self._inbound.open
        self._models = Models(context.client)
        self._pairable: set[object] = set()
        self._discovery: Discovery | None = None
        self._presence: Presence | None = None
        self._office: Office | None = None
        self._serving: Serving | None = None
        self._bulletin = Bulletin()
        self._fleet.heard = self._hear

    # --- instances

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the keys of this engine's instances."""
        return info.options(given)

    @staticmethod
    def settings(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the section `engines.xllm`."""
        return settings.read_settings(given)

    def renew(self, given: Mapping[str, object]) -> None:
        """Wait and judge by these from here on."""
        self._settings = settings.settings_of(given)
        self._calls.call_s = self._settings.call_timeout_s
        if self._discovery is not None:
            self._discovery.renew(self._settings)

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Link an instance with those that it needs; it can be used once that is done."""
        self._context.tokenizers.expect(instance)
        if instance.role is not Role.HYBRID:
            self._pairable.add(instance.key)
        self._bulletin.add(instance)
        if self._serving is not None:
            watcher.linked()
            return
        self._inbound.want()
        self._fleet.attach(instance, watcher)

    async def detach(self, instance: Instance) -> None:
        """Undo its links and close idle connections."""
        self._pairable.discard(instance.key)
        self._models.forget(instance)
        self._bulletin.remove(instance)
        if self._office is not None:
            self._office.forget(instance)
        await self._fleet.detach(instance)
        self._client.close_address(instance.address)

    async def probe(self, instance: Instance) -> str | None:
        """Ask for health, and now and then for the model's name."""
        path = self._context.health_path or HEALTH_PATH
        try:
            await self._calls.health(instance, path, self._context.health_timeout_s)
        except EngineFailed as error:
            if error.connecting:
                self._fleet.unreached(instance, refused=error.reason == "connect_refused")
            raise
        self._fleet.reached(instance)
        name = await self._models.of(instance, self._context.health_timeout_s)
        if name is not None and self._office is not None:
            self._office.serves(instance, name)
        return name

    async def discover(self, host: Host) -> None:
        """Register in etcd and follow who else does; see core.abilities.DiscoveringEngine."""
        if not self._settings.etcd_endpoints:
            return
        await self._inbound.listen()
        self._discovery = Discovery(self._settings, self._fleet, host, self._calls, self._log)
        self._fleet.registered = self._discovery
        self._discovery.start()
        self._presence = Presence(self._settings, self._inbound.address, self._client, self._discovery, self._log)
        self._presence.start()

    def _hear(self, beat: Beat) -> None:
        self._bulletin.note(beat)
        if self._office is not None:
            self._office.beaten(beat)

    @property
    def news(self) -> Mapping[str, News]:
        """What instances tell about themselves; see core.abilities.InformingEngine."""
        return self._bulletin.news

    # --- over several processes (core.ports.SplitEngine, core.abilities.AnsweringEngine)

    def own(self, tell: Tell) -> None:
        """Become the half that instances call."""
        self._office = Office(tell, on_late=self._late.inc)
        self._inbound.on_open = self._office.opened

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started what the others know."""
        if self._office is not None:
            self._office.introduce(worker)

    def follow(self) -> None:
        """Become a half that is told what instances say."""
        self._serving = Serving(self._boxes, self._log, learn=self._models.learn, heard=self._bulletin.note)

    def told(self, data: bytes) -> None:
        """Take a message of the half that instances call."""
        if self._serving is not None:
            self._serving.told(data)

    def answer_with(self, say: Callable[[bytes], None]) -> None:
        """Tell the half that instances call which requests are over."""
        if self._serving is not None:
            self._serving.say = say

    def answered(self, data: bytes) -> None:
        """Take a message of a serving half."""
        if self._office is not None:
            self._office.heard(data)

    def _deliver(self, results: "Iterable[DisaggStreamGeneration]", now_s: float, sender: str) -> list[bool]:
        receiver = self._boxes if self._office is None else self._office
        return receiver.deliver(results, now_s, sender)

    def _lose(self, instance_id: str, why: str) -> None:
        self._boxes.lose(instance_id, why)
        if self._office is not None:
            self._office.lost(instance_id, why)

    # --- requests

    @property
    def prepares(self) -> bool:
        """Whether there are instances that take token ids; see core.abilities.PreparingEngine."""
        return bool(self._pairable)

    async def prepare(self, request: Request) -> Request:
        """Tokenise a request, so that policies know its length; see core.abilities.PreparingEngine."""
        try:
            asked = await read_request(request, self._context.tokenizers.for_model(request.ask.model))
        except RequestError:
            return request
        ids = asked.prompt.ids
        hashes = block_hashes(ids) if self._bulletin.has_blocks else ()
        return replace(request, ask=replace(request.ask, prompt_tokens=len(ids)), prepared=Prepared(ids, hashes, asked))

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: dispatch to prefill, results from both as they are pushed.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancelled or failed, the request is not known here any more: the answer to the next result says so, which ends
        it at the instance. There is no other way (protocol page §5.5).
        """
        if placement.decode is placement.prefill:
            return await serve_alone(self._context, request, placement, placement.prefill, out)
        prepared = request.prepared.content if request.prepared is not None else None
        if isinstance(prepared, TokenRequest):
            asked = prepared
        else:
            asked = await read_request(request, self._context.tokenizers.of(placement.prefill))
        wire_id = self._context.ids.next()
        box = self._box(request, asked, placement, out)
        try:
            with self._boxes.registered(wire_id, box):
                placement.prefill_sent(wire_id)
                await self._start(request, asked, placement, wire_id, box)
                return await box.done
        except BaseException:
            if self._serving is not None:
                self._serving.over(wire_id)
            raise
        finally:
            del box  # the error in it knows this frame: without a cycle, all that belongs to the request is freed now

    def _box(self, request: Request, asked: TokenRequest, placement: Placement, out: Out) -> Mailbox:
        model = request.ask.model or self._models.known(placement.prefill) or ""
        writer = writer_of(request, asked.generation, model, int(time.time()))
        made = PushedAnswer(asked, writer, out)
        return Mailbox(made, placement, out, stream=asked.generation.stream, hold_s=self._settings.order_wait_s)

    async def _start(
        self, request: Request, asked: TokenRequest, placement: Placement, wire_id: str, box: Mailbox
    ) -> None:
        """Give the request to prefill; its reply decides nothing any more once the answer is complete or failed."""
        way = Way(
            wire_id,
            placement.prefill.address.netloc,
            placement.decode.address.netloc,
            self._service_address(),
            self._models.known(placement.prefill) or request.ask.model or "",
        )
        body = completion_body(asked, way)
        try:
            async with Scope() as scope:
                box.on_settled = lambda: scope.interrupt(_Settled())
                await self._calls.start(placement.prefill, body, request.deadlines.finished_s)
        except _Settled:
            return
        except EngineFailed as error:
            if error.reason != "timeout" or not box.begun:
                raise
        finally:
            box.on_settled = None

    def _service_address(self) -> str:
        return self._inbound.address if self._serving is None else self._serving.service

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass a call that is no inference through."""
        return await pass_through(self._context, request, instance)

    async def aclose(self) -> None:
        """Stop linking, and close the server: instances get no more answers, which ends what they still push."""
        for part in (self._presence, self._discovery):
            if part is not None:
                await part.aclose()
        await self._linker.aclose()
        await self._inbound.aclose()


class _Settled(Exception):
    """The mailbox has its result: prefill's reply decides nothing any more."""
