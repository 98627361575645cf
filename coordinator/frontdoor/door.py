"""The front door: from a client's HTTP request to a request for the dispatcher, and from any error to its answer."""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from coordinator.api.bodies import LONG_BYTES, Body, Walked, walk
from coordinator.api.family import Family
from coordinator.api.routes import Match, RouteTable, choose
from coordinator.core.errors import (
    ClientGone,
    InternalError,
    InvalidKey,
    KeyLimitReached,
    RequestError,
    UnknownPath,
    WrongMethod,
)
from coordinator.core.request import Deadlines, Headers, Request
from coordinator.dispatch import Dispatcher
from coordinator.frontdoor.caller import OPEN, Caller, caller_of, key_of, let_in
from coordinator.frontdoor.models import ModelNames
from coordinator.frontdoor.own import OwnAnswers
from coordinator.frontdoor.reading import BodyReader
from coordinator.observability.access import AccessLog, RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.observability.recent import Recent
from coordinator.observability.tracing import Tracer
from coordinator.relay import Relay
from coordinator.security.guard import Guard
from coordinator.security.keys import Key
from coordinator.security.proxies import TrustedProxies
from coordinator.server.exchange import Exchange
from coordinator.wire.json_edit import IndexedRequest

ID_MASK = (1 << 64) - 1
SPREAD = 0x9E3779B97F4A7C15  # odd, so no two of 2**64 ids are equal; neighbours look nothing alike
NO_KEY = "-"
TRACE = logging.getLogger("pd_coordinator.api")


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """What the front door reads from the configuration; times in seconds, infinity where off."""

    schedule_s: float
    first_token_s: float
    inter_token_s: float
    request_s: float
    stream_buffer_bytes: int
    tell_route: bool
    version: str


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Who is told of finished requests; `traffic` takes prompt bytes and events."""

    metrics: Metrics
    access: AccessLog
    traffic: Callable[[int, int], None]
    recent: Recent = field(default_factory=Recent)


class FrontDoor:
    """Handles every request of the data plane; its `handle` is the server's handler.

    Args:
        ready: whether a request could be placed now, and the sentence that says why (not).

    Attributes:
        guard: says who may call; everybody, unless it is given keys.
        proxies: whose word counts about the addresses of clients.
        tracer: traces requests; None: they are not traced.
    """

    def __init__(
        self,
        table: RouteTable,
        dispatcher: Dispatcher,
        models: ModelNames,
        telemetry: Telemetry,
        settings: DoorSettings,
        ready: Callable[[], tuple[bool, str]],
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._models = models
        self._metrics = telemetry.metrics
        self._telemetry = telemetry
        self.tracer: Tracer | None = None
        self.settings = settings
        self._own = OwnAnswers(models, ready, settings.version)
        self.guard = Guard()
        self.proxies = TrustedProxies()
        self._bodies = BodyReader()
        self._ids = itertools.count(secrets.randbits(63))

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request, whatever it is; cancelled when its client leaves."""
        if exchange.refusal is not None:
            self._refuse(exchange, exchange.refusal)
            return
        try:
            match = self._table.match(exchange.method, exchange.path)
        except (UnknownPath, WrongMethod) as error:
            self._metrics.unrouted.labels(error.code).inc()
            family = self._table.family_of(exchange.path)
            self._relay(exchange, family, self._record(exchange, family)).fail(error)
            return
        guard = self.guard
        try:
            key = key_of(exchange, guard) if match.operation not in OPEN else None
        except InvalidKey as error:
            self._refuse(exchange, error)
            return
        if match.operation not in ("infer", "tokenize"):
            self._answer_self(exchange, match)
            return
        if key is None:
            await self._engine_call(exchange, match, None)
            return
        try:
            use = guard.uses.admit(key)
        except KeyLimitReached as error:
            self._refuse(exchange, error, key)
            return
        try:
            await self._engine_call(exchange, match, key)
        finally:
            guard.uses.release(use)

    def gate(self, method: str, path: str, headers: Headers) -> Caller | None:
        """Refuse a request before its body is read: a stranger must not have us keep one.

        Args:
            method: as received.
            path: without query.
            headers: names in lower case.

        Returns:
            Who calls, if it has a valid key.

        Raises:
            InvalidKey: it needs a key and has none that is valid.
        """
        return let_in(self.guard, self._table, method, path, headers)

    def _refuse(self, exchange: Exchange, error: RequestError, key: Key | None = None) -> None:
        """Answer what is wrong before any family could read it."""
        family = self._table.family_of(exchange.path)
        record = self._record(exchange, family, key)
        record.failed(error)
        self._relay(exchange, family, record).fail(error)
        self._account(exchange, family, record)

    # --- calls that go to an engine

    async def _engine_call(self, exchange: Exchange, match: Match, key: Key | None) -> None:
        body = await self._body(exchange, match, key)
        if body is None:
            return
        family = choose(match, exchange.path, body)
        record = self._record(exchange, family, key)
        relay = self._relay(exchange, family, record)
        try:
            request = await self._request(exchange, family, record, body)
            body = b""  # what came is not kept beside what goes to the engine
            if match.operation == "infer":
                await self._dispatcher.run(request, relay, record)
            else:
                answer = await self._dispatcher.call(request)
                relay.answer(answer.status, answer.body, answer.content_type)
        except RequestError as error:
            record.failed(error)
            relay.fail(error)
        except asyncio.CancelledError:
            record.failed(ClientGone("the client has left"))
            raise
        except Exception as error:  # noqa: BLE001  # the border: one request's fault must not hurt another
            TRACE.exception("request %s failed inside the coordinator", record.id, extra=record.fields())
            failure = InternalError(type(error).__name__)
            record.failed(failure)
            relay.fail(failure)
        finally:
            self._account(exchange, family, record)

    async def _body(self, exchange: Exchange, match: Match, key: Key | None) -> Body | None:
        """The body as its families can read it without walking it more than once; None: it was refused."""
        body = exchange.body
        try:
            if len(body) >= LONG_BYTES:
                exchange.body = b""  # whoever walks a long body is the only one to keep it
                return await self._bodies.walk(body, self.settings.schedule_s)
            return body if len(match.families) == 1 else walk(body)
        except RequestError as error:
            self._refuse(exchange, error, key)
            return None
        except asyncio.CancelledError:
            family = match.families[0]
            record = self._record(exchange, family, key)
            record.failed(ClientGone("the client has left"))
            self._account(exchange, family, record)
            raise

    async def _request(self, exchange: Exchange, family: Family, record: RequestRecord, body: Body) -> Request:
        family.check_headers(exchange.headers)
        ask = family.parse(exchange.path, body)
        record.stream, record.model, record.prompt_bytes = ask.stream, ask.model, ask.prompt_bytes
        path = family.engine_path(exchange.path)
        model = self._models.resolve(ask.model)
        if model is not None and model != ask.model:
            path, body = family.renamed(path, body, model)
            ask = replace(ask, model=model)
        arrived_s, settings = exchange.arrived_s, self.settings
        headers = caller_of(exchange, self.guard).headers
        request = Request(
            id=record.id,
            api=family.name,
            path=path,
            query=exchange.query,
            headers=headers if record.trace is None else record.trace.carried_by(headers),
            body=body.written() if isinstance(body, Walked) else body,
            ask=ask,
            arrived_s=arrived_s,
            deadlines=Deadlines(
                scheduled_s=arrived_s + settings.schedule_s,
                first_token_s=arrived_s + settings.first_token_s,
                finished_s=arrived_s + settings.request_s,
                inter_token_s=settings.inter_token_s,
            ),
        )
        if isinstance(body, Walked) and body.spans is not None:
            return IndexedRequest.of(request, body.text, body.spans, body.changed)
        return request

    def _account(self, exchange: Exchange, family: Family, record: RequestRecord) -> None:
        record.duration_s = time.monotonic() - exchange.arrived_s
        cells = self._metrics.for_api(family.name)
        cells.outcome(record.outcome).inc()
        cells.duration.observe(record.duration_s)
        if self.guard.on:
            self._metrics.key_outcome(record.key or NO_KEY, record.outcome)
        self._telemetry.traffic(record.prompt_bytes, record.events)
        self._telemetry.recent.take(record)
        self._telemetry.access.finished(record)
        if self.tracer is not None:
            self.tracer.finished(record)

    # --- answers of our own

    def _answer_self(self, exchange: Exchange, match: Match) -> None:
        family = match.families[0]
        record = self._record(exchange, family)
        relay = self._relay(exchange, family, record)
        try:
            status, body = self._own.answer(match, family)
        except RequestError as error:
            relay.fail(error)
        else:
            relay.answer(status, body)

    # --- both

    def _record(self, exchange: Exchange, family: Family, key: Key | None = None) -> RequestRecord:
        ident = caller_of(exchange, self.guard).ident or f"{next(self._ids) * SPREAD & ID_MASK:016x}"
        client = self.proxies.client(exchange.peer, exchange.headers)
        record = RequestRecord(ident, family.name, exchange.path, client, "" if key is None else key.name)
        if self.tracer is not None:
            record.trace = self.tracer.begin(exchange.headers, exchange.method, exchange.arrived_s)
        return record

    def _relay(self, exchange: Exchange, family: Family, record: RequestRecord) -> Relay:
        return Relay(
            exchange,
            family,
            self._metrics.for_api(family.name),
            record,
            limit_bytes=self.settings.stream_buffer_bytes,
            tell_route=self.settings.tell_route,
        )
