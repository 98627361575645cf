"""One prompt's way over a pair (vLLM protocol page §1)."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Raw
from msgspec.structs import replace

from coordinator.core.body import RequestBody
from coordinator.core.errors import EngineFailed, RequestError
from coordinator.core.ids import WireIds
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Placement
from coordinator.core.request import Request
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import StreamLeg, failed, refusal, run_stream, side_of
from coordinator.engines.vllm.legs import Farewells, MergingLeg, WholeCall
from coordinator.engines.vllm.missing import MissingKv
from coordinator.engines.vllm.releases import KvReleases, Orphan
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.request import HeaderBlock
from coordinator.transport.stream import Stream
from coordinator.wire.events import wants_usage
from coordinator.wire.json_edit import Fields
from coordinator.wire.merge import with_prefill
from coordinator.wire.vllm import decode_body, prefill_body, release_body
from coordinator.wire.vllm_answers import EngineSaid, Prefilled, check_answer, read_prefill

ERROR = "error"
OK = 200
UNSURE_S = 5.0  # an answer that is no stream tells nothing until its end; a decode that works has begun by then


@dataclass(frozen=True, slots=True)
class Means:
    """What all handoffs of the engine work with.

    Attributes:
        fetchers: the decode instances that could fetch KV from a prefill instance, given with the request's decode.
    """

    client: HttpClient
    ids: WireIds
    releases: KvReleases
    farewells: Farewells
    missing: MissingKv
    fetchers: Callable[[Instance, Instance], Sequence[Instance]]


class Handoff:
    """Prefill, then decode, under one id that no other attempt has.

    From prefill's answer on it is in charge of the KV there: until decode has it, every way out sees it released.

    Args:
        fields: the outermost fields of the body to serve.
    """

    __slots__ = ("_fields", "_headers", "_means", "_placement", "_request", "wire_id")

    def __init__(self, means: Means, request: Request, placement: Placement, fields: Fields) -> None:
        self._means = means
        self._request = request
        self._placement = placement
        self._fields = fields
        self.wire_id = means.ids.next()
        self._headers = HeaderBlock(engine_headers(request, self.wire_id))

    async def prefill(self) -> Prefilled:
        """Have the prompt prefilled; the caller goes on to decode without an await in between.

        Raises:
            RequestError: a refusal or failure of prefill, or no record where `on_missing_kv` is `error`.

        Cancellation ends the request at prefill; an answer that comes in that moment is not lost.
        """
        instance = self._placement.prefill
        call = WholeCall(self._means.client.loop, self._means.farewells.read_on)
        self._placement.prefill_sent(self.wire_id)
        try:
            reply = await self._post(call, instance, prefill_body(self._fields))
        except TransportError as error:
            raise failed(instance, error) from error
        except BaseException:
            if call.reply is not None:
                self._release_answered(call.reply)
            else:
                call.on_late = self._release_answered
            raise
        prefilled = self._read(reply)
        if prefilled.params is None:
            self._means.missing.returned_none(instance)
            if instance.options.get("on_missing_kv") == ERROR and not prefilled.ended:
                raise EngineFailed(side_of(instance), instance.id, "missing_kv", detail="no kv_transfer_params")
        return prefilled

    async def stream(self, prefilled: Prefilled, out: Out) -> None:
        """Decode, and relay its stream as it comes. Raises RequestError."""
        decode, farewells = self._placement.decode, self._means.farewells
        leg = self._leg(prefilled, out)
        request = replace(self._request, body=decode_body(self._fields, prefilled.params))

        def part(stream: Stream) -> None:
            if prefilled.params is None or leg.decoding or not leg.left:
                stream.close()
            else:
                farewells.part(stream, leg.sent_s)

        try:
            await run_stream(self._means.client, request, self._headers, leg, part)
        except BaseException as error:
            if not (leg.decoding or leg.left):
                self._release(prefilled.params, error, reached=leg.sent_s > 0)
            elif leg.left and leg.status != OK:  # it has not even begun to answer: it may not know of the KV
                self._release(prefilled.params, error, reached=True, wait_s=farewells.left_s(leg.sent_s))
            if isinstance(error, TransportError):
                raise failed(decode, error) from error
            raise

    async def whole(self, prefilled: Prefilled) -> bytes:
        """Decode, and return its answer with what prefill adds to it. Raises RequestError."""
        decode, farewells = self._placement.decode, self._means.farewells
        call = WholeCall(self._means.client.loop, _close if prefilled.params is None else farewells.part)
        try:
            reply = await self._post(call, decode, decode_body(self._fields, prefilled.params))
        except BaseException as error:
            if not (call.left or (call.reply is not None and call.reply.status == OK)):
                self._release(prefilled.params, error, reached=call.sent_s < math.inf)
            elif call.left and call.status != OK and time.monotonic() - call.sent_s < UNSURE_S:
                self._release(prefilled.params, error, reached=True, wait_s=farewells.patience_s)
            if isinstance(error, TransportError):
                raise failed(decode, error) from error
            raise
        if reply.status != OK:
            self._release(prefilled.params, reached=True)
            raise refusal(decode, reply.status, reply.headers, reply.body)
        try:
            check_answer(reply.body)
            return with_prefill(reply.body, prefilled)
        except ValueError as error:
            raise _misspoken(decode, error) from error

    # --- inside

    async def _post(self, call: WholeCall, instance: Instance, body: RequestBody) -> Reply:
        return await call.run(self._means.client, instance, self._request.target, self._headers, body)

    def _leg(self, prefilled: Prefilled, out: Out) -> StreamLeg:
        decode, cached = self._placement.decode, prefilled.cached_tokens
        if cached is not None and wants_usage(self._fields.get("stream_options")):
            return MergingLeg(decode, self._placement, out, cached)
        return StreamLeg(decode, self._placement, out)

    def _read(self, reply: Reply) -> Prefilled:
        instance = self._placement.prefill
        if reply.status != OK:
            raise refusal(instance, reply.status, reply.headers, reply.body)
        try:
            return read_prefill(reply.body)
        except ValueError as error:
            raise _misspoken(instance, error) from error

    # --- KV that nobody came for

    def _release_answered(self, reply: Reply) -> None:
        """Prefill has answered in the moment of our leaving, or after it."""
        try:
            prefilled = self._read(reply)
        except RequestError:
            return
        self._release(prefilled.params)

    def _release(
        self, params: Raw | None, error: BaseException | None = None, *, reached: bool = False, wait_s: float = 0.0
    ) -> None:
        """Have the KV fetched, for decode has not, or may not even know of it (protocol page §1.5, §1.6).

        Args:
            params: prefill's record, if there is one.
            error: why decode's leg is over; None: it never began.
            reached: decode was sent the request. If it knows of the KV, it has read it or frees it, and what is asked
                for here is refused or read in vain.
            wait_s: how long it keeps the request.
        """
        if params is None:
            return
        last = reached or isinstance(error, RequestError | TransportError)
        prefill, decode = self._placement.prefill, self._placement.decode
        others = [instance for instance in self._means.fetchers(prefill, decode) if instance.key != decode.key]
        self._means.releases.release(
            Orphan(
                prefill=prefill,
                decodes=[*others, decode] if last else [decode, *others],
                wire_id=self.wire_id,
                target=self._request.target,
                headers=self._headers,
                body=release_body(self._fields, params, self.wire_id),
                wait_s=wait_s,
                doubtful=reached,
            )
        )


def _close(stream: Stream, sent_s: float) -> None:  # noqa: ARG001  # no KV waits for it
    stream.close()


def _misspoken(instance: Instance, error: ValueError) -> EngineFailed:
    reason = "engine_error" if isinstance(error, EngineSaid) else "bad_reply"
    return EngineFailed(side_of(instance), instance.id, reason, detail=str(error)[:300])
