"""The three calls of one attempt (microserving protocol page §3, §9, §10)."""

import math
import time
from collections.abc import Callable

from coordinator.core.errors import EngineFailed, EngineRefused, InternalError
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Outcome, Placement
from coordinator.core.request import Headers, Request
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import check_whole, failed, side_of
from coordinator.engines.microserving.ends import given_back, with_length
from coordinator.engines.microserving.errands import ReplyTask, Reservation
from coordinator.engines.microserving.leg import OK, GenerateLeg
from coordinator.engines.microserving.means import Means, editor_of, explained
from coordinator.engines.microserving.task import Task
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.stream import Stream
from coordinator.wire.chat_shape import whole_answer
from coordinator.wire.json_edit import read_fields
from coordinator.wire.microserving import (
    GENERATE,
    PREPARE,
    SEND,
    Prepared,
    free_body,
    generate_body,
    prepare_body,
    read_prepared,
    send_body,
)

ALL_BUT_LAST = -1
FIRST_REFUSAL, FIRST_FAILURE = 400, 500
Left = Callable[[ReplyTask], None]


class Handoff:
    """One attempt over a pair, under one `user` that no other attempt has.

    From decode's answer to prep_recv on it is in charge of the reservation there: until start_generate has reached
    decode, every way out sees it freed.
    """

    def __init__(self, means: Means, request: Request, placement: Placement, task: Task, out: Out) -> None:
        self._means = means
        self._request = request
        self._placement = placement
        self._task = task
        self._out = out
        self._wire_id = ""
        self._headers: Headers = ()
        self._end = self._window_end()
        self._begun = False
        self._sending: ReplyTask | None = None

    def _window_end(self) -> int:
        """Where the part of the prompt ends that prefill computes; -1: before the last token, which decode takes."""
        factor, tokens = self._means.settings.pd_balance_factor, self._task.prompt_tokens
        if not self._means.settings.balanced or tokens is None:
            return ALL_BUT_LAST
        return max(0, min(tokens - 1, int((1 - factor) * tokens)))

    async def run(self) -> Outcome:
        """Make the calls and pass decode's answer on.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Failed or cancelled before decode generates, its reservation is freed in the background.
        """
        rank = self._placement.decode.options.get("recv_rank")
        if not isinstance(rank, int):
            raise InternalError(f"instance {self._placement.decode.id} has no recv_rank")
        prepared = await self._prepare()
        try:
            await self._send(prepared, rank)
            if self._task.stream:
                return await self._stream()
            return await self._whole()
        except BaseException:
            if not self._begun:
                self._means.errands.free(self._reservation(), self._sending)
            raise

    # --- the calls

    async def _prepare(self) -> Prepared:
        decode, errands = self._placement.decode, self._means.errands
        try:
            reply = await self._ask_for_room()
        except EngineFailed as error:
            if not _was_stale(error):
                raise
            reply = await self._ask_for_room()
        try:
            prepared = read_prepared(reply.body)
            self._check_window(prepared)
        except ValueError as error:
            errands.free(self._reservation())
            raise EngineFailed(side_of(decode), decode.id, "bad_reply", detail=str(error)) from error
        if self._end == ALL_BUT_LAST:
            self._task = with_length(self._task, prepared.window + 1)
        elif self._task.prompt_tokens is not None:
            self._task = with_length(self._task, self._task.prompt_tokens)
        return prepared

    async def _ask_for_room(self) -> Reply:
        """prep_recv under a new `user`: a second call under the same one would not be one of its own (§7)."""
        self._wire_id = self._means.ids.next()
        self._headers = engine_headers(self._request, self._wire_id)
        body = prepare_body(self._task.fields, self._wire_id, self._end)
        errands = self._means.errands
        return await self._call(
            self._placement.decode,
            PREPARE,
            body,
            self._means.settings.prep_recv_s,
            lambda task: errands.free_late(self._reservation(), task),
        )

    async def _send(self, prepared: Prepared, rank: int) -> None:
        """Have prefill compute and send what decode lacks; its share of the load ends with its answer."""
        placement = self._placement
        if not prepared.missing:  # begin >= end would kill prefill's engine
            placement.skip_prefill()
            placement.prefill_sent(self._wire_id)
            return
        placement.prefill_sent(self._wire_id)
        body = send_body(self._task.fields, self._wire_id, prepared, self._end, rank)
        reply = await self._call(placement.prefill, SEND, body, self._means.settings.remote_send_s, self._left_sending)
        try:
            read_fields(reply.body)
        except ValueError as error:
            raise EngineFailed(
                side_of(placement.prefill), placement.prefill.id, "bad_reply", detail=str(error)
            ) from error
        placement.prefilled(time.monotonic(), pinned=False)

    def _left_sending(self, task: ReplyTask) -> None:
        self._sending = task

    async def _stream(self) -> Outcome:
        decode, errands = self._placement.decode, self._means.errands
        editor = editor_of(self._task, self._wire_id)
        leg = GenerateLeg(decode, self._placement, self._out, editor)

        def part(stream: Stream) -> None:
            if leg.left and not leg.status:
                leg.on_head = lambda: errands.close(stream)
                errands.part(stream)
            else:
                stream.close()

        try:
            await self._run(leg, part)
        except TransportError as error:
            self._begun = True  # there was no connection: nobody is there who would keep anything
            raise failed(decode, error) from error
        except BaseException:
            self._begun = leg.sent_s > 0 and not FIRST_REFUSAL <= leg.status < FIRST_FAILURE
            raise
        self._begun = True
        if leg.preempted:
            return await given_back(self._means, self._task, decode, self._out, editor)
        return COMPLETED

    async def _run(self, leg: GenerateLeg, part: Callable[[Stream], None]) -> None:
        stream = await self._means.client.open_stream(
            leg.instance.address, b"POST", GENERATE, self._headers, self._generate_body(), sink=leg, retry_stale=False
        )
        try:
            leg.started_by(stream)
            await leg.ended()
        finally:
            part(stream)

    async def _whole(self) -> Outcome:
        decode, placement = self._placement.decode, self._placement
        self._begun = True
        try:
            reply = await self._call(decode, GENERATE, self._generate_body(), math.inf, self._means.errands.cancel_soon)
        except EngineRefused:
            self._begun = False
            raise
        check_whole(decode, reply.body)
        now_s = time.monotonic()
        try:
            body, preempted = whole_answer(reply.body, self._task.reading(self._wire_id), chat=self._task.chat)
        except ValueError as error:
            raise EngineFailed(side_of(decode), decode.id, "bad_reply", detail=str(error)) from error
        if preempted:
            return await given_back(self._means, self._task, decode, self._out)
        placement.decoding(now_s)
        self._out.whole(body, now_s)
        return COMPLETED

    # --- inside

    def _check_window(self, prepared: Prepared) -> None:
        """What decode has and what it asks for must make up the window; begin and end of all calls follow from that."""
        end = self._end
        if end < 0:
            return
        whole = prepared.window == end if prepared.missing else prepared.prefix >= end
        if not whole:
            raise ValueError(f"it has {prepared.prefix} tokens and asks for {prepared.missing}, of a window of {end}")

    def _generate_body(self) -> bytes:
        return generate_body(self._task.fields, self._task.last, self._wire_id, self._end)

    def _reservation(self) -> Reservation:
        body = free_body(self._task.fields, self._wire_id, self._end)
        return Reservation(self._placement.decode, self._wire_id, self._headers, body)

    async def _call(self, instance: Instance, path: str, body: bytes, within_s: float, left: Left) -> Reply:
        """One call; its reply if that is a 200.

        Raises:
            RequestError: any other reply, and none.
        """
        again = path == SEND  # decode would be asked twice under one `user`, which is fatal for start_generate
        work = self._means.client.fetch(
            instance.address, b"POST", path, self._headers, body, deadline_s=math.inf, retry_stale=again
        )
        name = f"{path.rpartition('/')[2]} {self._wire_id}"
        try:
            reply = await self._means.errands.call(name, work, within_s, left)
        except TransportError as error:
            raise failed(instance, error) from error
        if reply.status != OK:
            raise explained(instance, reply)
        return reply


def _was_stale(error: EngineFailed) -> bool:
    """Whether a kept connection was closed just as the call went out, so that nobody has read it."""
    cause = error.__cause__
    return isinstance(cause, TransportError) and cause.unsent and not cause.connecting
