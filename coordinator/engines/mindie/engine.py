"""The choreography of one MindIE request (MindIE protocol page §4-§8)."""

import asyncio
import math
import time
from collections.abc import Mapping

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import Answer, Outcome, Placement, Watcher
from coordinator.core.request import Headers, Request
from coordinator.engines.context import EngineContext
from coordinator.engines.health import alive
from coordinator.engines.http_leg import failed, refusal
from coordinator.engines.mindie.blame import doubt, handoff_failed, not_handed_over
from coordinator.engines.mindie.envelope import EnvelopeError, FirstToken, read_envelope
from coordinator.engines.mindie.link import DecodeLink, LinkSettings
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.engines.mindie.split import LinkOffice, RemoteLink, RemoteLinks, Tell
from coordinator.engines.mindie.stops import Stops
from coordinator.engines.mindie.strays import Strays
from coordinator.engines.plain_call import relay_plain
from coordinator.engines.port_options import port_options
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.scope import Scope
from coordinator.wire.models import first_model

RESENDS = 6  # protocol page §8.3: max_retry + 1 with its default of 5
RESEND_PAUSE_S = 1.0
PREFILL_GRACE_S = 2.0  # how long prefill's reply is awaited once the answer is complete without it
STOPS_AT_CLOSE_S = 3.0
HEALTH_PATH = "/v1/models"
OPTIONS = ("inter_comm_port",)
STILL_REGISTERED = (424, 500, 503)  # what prefill answers while it still knows the id of a recompute


class MindieEngine:
    """Engine protocol `mindie`: implements core.ports.EngineProtocol."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._client = context.client
        self._ids = context.ids
        self._link_settings = LinkSettings()
        aborts = context.metrics.aborts
        self._late_frames = context.metrics.late_frames.labels()
        self._stops = Stops(context.client, context.log, on_result=lambda result: aborts.labels(result).inc())
        self._links: dict[object, DecodeLink] = {}
        self._office: LinkOffice | None = None
        self._remote: RemoteLinks | None = None
        self._strays: Strays | None = None
        self._models: dict[object, str] = {}

    # --- instances

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate `inter_comm_port`, the one key of this engine's instances."""
        return port_options(given, OPTIONS)

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """Open the result stream of a decode instance; the others, and followers, need nothing standing."""
        if instance.role is not Role.DECODE or self._remote is not None:
            watcher.linked()
            return
        reconnects = self._context.metrics.link_reconnects
        self._links[instance.key] = DecodeLink(
            instance,
            watcher,
            self._link_settings,
            self._context,
            on_late=self._late_frames.inc,
            on_reopened=lambda: reconnects.labels(instance.id).inc(),
            office=self._office,
        )

    async def detach(self, instance: Instance) -> None:
        """Close the result stream and idle connections of an instance."""
        self._models.pop(instance.key, None)
        if self._office is not None:
            self._office.forget(instance)
        link = self._links.pop(instance.key, None)
        if link is not None:
            await link.aclose()
        self._client.close_address(instance.address)

    async def probe(self, instance: Instance) -> str | None:
        """Ask for the model list: alive is whoever answers without a 5xx; returns the first model's name."""
        deadline_s = time.monotonic() + self._context.health_timeout_s
        path = self._context.health_path or HEALTH_PATH
        reply = await alive(self._client, instance, path, deadline_s)
        name = first_model(reply.body) if reply.status == 200 else None
        if name is not None:
            self.learn(instance, name)
            if self._office is not None:
                self._office.serves(instance, name)
        return name

    # --- over several processes (core.ports.SplitEngine)

    def own(self, tell: Tell) -> None:
        """Become the half that holds the result streams."""
        self._office = LinkOffice(tell)

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started which streams are open."""
        if self._office is not None:
            self._office.introduce(worker)

    def follow(self) -> None:
        """Become a half that is told what comes in on the streams."""
        self._remote = RemoteLinks(self._context.log, self, on_late=self._late_frames.inc)
        self._strays = Strays(self._ids, lambda wire_id, instance: self._stop(wire_id, None, instance))

    def told(self, data: bytes) -> None:
        """Take a message of the half that holds the streams."""
        if self._remote is not None:
            self._remote.told(data, time.monotonic())

    def learn(self, instance: Instance, name: str) -> None:
        """See split.Listener."""
        self._models[instance.key] = name

    def stray(self, instance: Instance, wire_id: bytes) -> None:
        """See split.Listener."""
        if self._strays is not None:
            self._strays.met(instance, wire_id)

    def _link(self, decode: Instance) -> DecodeLink | RemoteLink | None:
        return self._links.get(decode.key) if self._remote is None else self._remote.by_key.get(decode.key)

    # --- requests

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: prefill over HTTP, decode's output from its result stream.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancelled, or failed after prefill got the request, both instances are told to stop.
        """
        prefill, decode = placement.prefill, placement.decode
        wire_id = request.wire_id or self._ids.next()
        if prefill.address == decode.address:
            return await self._serve_alone(request, placement, wire_id, out)
        link = self._link(decode)
        if link is None or not link.up:
            raise EngineFailed(Side.DECODE, decode.id, "link_lost", detail="its result stream is not open")
        box = Mailbox(wire_id, decode.id, out, placement, stream=request.ask.stream)
        with link.boxes.registered(wire_id.encode(), box):
            try:
                first = await self._prefill(request, placement, wire_id, box)
                if first is not None:
                    box.prefilled(first, time.monotonic())
                return await box.done
            except EngineRefused:
                raise  # prefill took nothing on, so nothing is left to stop
            except BaseException as error:
                doubt(error, prefill)
                if not _answered(box) and not _unsent(error):
                    self._stop(wire_id, request, prefill, decode)
                raise
            finally:
                del box  # the error in it knows this frame, which would be a cycle

    async def _prefill(self, request: Request, placement: Placement, wire_id: str, box: Mailbox) -> FirstToken | None:
        """Send the request to prefill and read its envelope; None when the answer was complete without it."""
        grace: asyncio.TimerHandle | None = None
        try:
            async with Scope() as scope:
                loop = asyncio.get_running_loop()

                def settled() -> None:
                    nonlocal grace
                    grace = loop.call_later(PREFILL_GRACE_S if _answered(box) else 0, scope.interrupt, _Settled())

                box.on_settled = settled
                return await self._ask_prefill(request, placement, wire_id)
        except _Settled:
            return None
        except RequestError:
            if _answered(box):
                return None  # the client has its whole answer from decode
            raise
        finally:
            box.on_settled = None
            if grace is not None:
                grace.cancel()

    async def _ask_prefill(self, request: Request, placement: Placement, wire_id: str) -> FirstToken:
        prefill = placement.prefill
        headers = self._headers(request, wire_id, placement.decode)
        if request.wire_id:
            await self._stops.over(wire_id)
        placement.prefill_sent(wire_id)
        reply = await self._post(prefill, request, headers)
        resends_left = RESENDS if request.wire_id else 0
        while reply.status in STILL_REGISTERED and resends_left and not not_handed_over(reply.status, reply.body):
            resends_left -= 1
            await asyncio.sleep(RESEND_PAUSE_S)
            reply = await self._post(prefill, request, headers)
        if reply.status != 200:
            if not_handed_over(reply.status, reply.body):
                raise handoff_failed(prefill, placement.decode)
            raise refusal(prefill, reply.status, reply.headers, reply.body)
        try:
            return read_envelope(reply.body, wire_id, stream=request.ask.stream)
        except EnvelopeError as error:
            raise EngineFailed(Side.PREFILL, prefill.id, "bad_reply", detail=str(error)) from error

    async def _post(self, instance: Instance, request: Request, headers: Headers) -> Reply:
        try:
            return await self._client.fetch(
                instance.address,
                b"POST",
                request.target,
                headers,
                request.body,
                deadline_s=math.inf,  # the dispatcher watches the request's deadlines
                keep=True,
            )
        except TransportError as error:
            raise failed(instance, error) from error

    def _headers(self, request: Request, wire_id: str, decode: Instance) -> Headers:
        target = decode.address.host
        port = decode.options.get("inter_comm_port")
        if port is not None:
            target = f"{target};{port}"
        control: Headers = (
            (b"req-id", wire_id.encode()),
            (b"req-type", b"prefill"),
            (b"d-target", target.encode()),
            (b"d-port", b"%d" % decode.address.port),
        )
        if request.wire_id:
            control += ((b"is-recompute", b"true"),)
        return request.headers + control

    async def _serve_alone(self, request: Request, placement: Placement, wire_id: str, out: Out) -> Outcome:
        """One instance does both: its ordinary answer is passed through (protocol page §4.5)."""
        instance = placement.prefill
        if instance.role is Role.HYBRID:
            headers: Headers = (*request.headers, (b"req-id", wire_id.encode()))
        else:
            headers = self._headers(request, wire_id, placement.decode)
        placement.prefill_sent(wire_id)
        try:
            return await relay_plain(self._client, request, headers, instance, placement, out)
        except EngineRefused:
            raise
        except BaseException as error:
            if not _unsent(error):
                self._stop(wire_id, request, instance)
            raise

    async def call(self, request: Request, instance: Instance) -> Answer:
        """Pass a tokenizer call to one instance."""
        headers: Headers = (*request.headers, (b"req-id", self._ids.next().encode()))
        reply = await self._post(instance, request, headers)
        if reply.status >= 400:
            raise refusal(instance, reply.status, reply.headers, reply.body)
        return Answer(reply.status, reply.header(b"content-type") or b"application/json", reply.body)

    # --- ends

    def _stop(self, wire_id: str, request: Request | None, *instances: Instance) -> None:
        asked = (request.ask.model if request is not None else None) or "model"
        self._stops.stop(wire_id, [(i, i.model or self._models.get(i.key) or asked) for i in instances])

    async def aclose(self) -> None:
        """Send the stops that are still due, then close every link."""
        await self._stops.aclose(STOPS_AT_CLOSE_S)
        for link in list(self._links.values()):
            await link.aclose()
        self._links.clear()


class _Settled(Exception):
    """The mailbox has its result: prefill's reply decides nothing any more."""


def _answered(box: Mailbox) -> bool:
    """Whether the client has its whole answer, or decode gave the request back: nobody works on it any more."""
    return box.done.done() and not box.done.cancelled() and box.done.exception() is None


def _unsent(error: BaseException) -> bool:
    """Whether no instance has seen the request."""
    return isinstance(error, EngineFailed) and error.connecting
