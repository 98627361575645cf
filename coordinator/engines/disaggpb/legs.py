"""The two calls of a request: KV from prefill, tokens from decode."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.api.writers import LENGTH, STOP
from coordinator.core.errors import EngineFailed, KvTooLarge
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Placement
from coordinator.engines.disaggpb.budget import Room
from coordinator.engines.disaggpb.kv import KvBuffer, Payload
from coordinator.engines.http_leg import side_of
from coordinator.engines.token_answers import TokenAnswers
from coordinator.wire.disaggpb import (
    DECODE_METHOD,
    PREFILL_METHOD,
    Token,
    WireError,
    decode_tail,
    pack_ids,
    prefill_request,
    read_token,
)

if TYPE_CHECKING:  # the module needs gRPC, which need not be there
    from coordinator.engines.disaggpb.channel import Worker

IDS_A_TURN: Final = 8192


@dataclass(frozen=True, slots=True)
class Job:
    """What both workers are told of one request.

    Attributes:
        wire_id: the id on both wires.
        packed_ids: the prompt.
        finished_s: when all must be over (monotonic).
    """

    wire_id: str
    packed_ids: bytes
    max_new_tokens: int
    temperature: float
    finished_s: float


async def packed(ids: Sequence[int]) -> bytes:
    """Token ids as the workers get them; the loop makes a turn after some thousands."""
    parts = []
    for at in range(0, len(ids), IDS_A_TURN):
        if at:
            await asyncio.sleep(0)
        parts.append(pack_ids(ids[at : at + IDS_A_TURN]))
    return b"".join(parts)


async def fetch_kv(worker: "Worker", job: Job, make_buffer: Callable[[str], KvBuffer]) -> Payload:
    """Have the prompt computed and collect its KV, in a buffer for the request's id; returns the request for decode.

    Cancellation, or a failure, cancels the call.

    Raises:
        RequestError: the call failed, the KV is not whole, or it is too much.
    """
    body = prefill_request(job.wire_id, job.packed_ids, job.max_new_tokens, job.temperature)
    buffer = make_buffer(job.wire_id)
    call = await worker.call(PREFILL_METHOD, lambda: body, job.finished_s)
    try:
        while not await buffer.add(await call.read()):
            pass
        request = buffer.request(decode_tail(job.packed_ids, job.max_new_tokens, job.temperature))
    except BaseException:
        call.cancel()
        raise
    call.part()
    return Payload(request)


class DecodeLeg:
    """One request at one decode worker.

    Args:
        worker: of the placement's decode instance.
        payload: the request; let go of at the first token, and the room with it.
        answers: take the tokens.
    """

    def __init__(self, worker: "Worker", job: Job, payload: Payload, room: Room, answers: TokenAnswers) -> None:
        self._worker = worker
        self._job = job
        self._payload = payload
        self._room = room
        self._answers = answers
        self._wire_id = job.wire_id.encode()
        self._tokens = 0

    async def run(self, placement: Placement, out: Out) -> None:
        """Send the request and take tokens until the answer is complete; the call is cancelled where it is not over.

        Raises:
            EngineFailed: the call failed or ended without its sign of a whole answer.
            KvTooLarge: the worker takes no request of this length.
            RequestError: it refused.
        """
        if self._payload.size_bytes > self._worker.send_bytes:
            raise KvTooLarge("the prompt is too long: its KV is above what one message of decode may hold")
        call = await self._worker.call(DECODE_METHOD, self._payload, self._job.finished_s)
        pace = _Pace()
        out.paced_by(pace.pause, pace.resume)
        try:
            complete = done = False
            while not complete:
                token = self._read(await call.read())
                done = token.done
                now_s = time.monotonic()
                if not self._tokens:
                    placement.decoding(now_s)
                    self._payload.drop()
                    self._room.release()
                self._tokens += 1
                complete = self._answers.tokens(0, (token.token_id,), now_s, finish_reason=self._reason(token))
                if pace.paused:
                    await pace.wait()
        except BaseException:
            call.cancel()
            raise
        if done:
            call.part()
        else:
            call.cancel()

    def _read(self, message: bytes | None) -> Token:
        if message is None:
            raise self._failed("ended_early", "tokens without end")
        try:
            token = read_token(message)
        except WireError as error:
            raise self._failed("bad_reply", str(error)) from error
        if token.request_id not in (self._wire_id, b""):
            raise self._failed("bad_reply", "a token of another request")
        if token.token_id < 0:
            raise self._failed("bad_reply", f"token id {token.token_id}")
        return token

    def _reason(self, token: Token) -> str | None:
        if not token.done:
            return None
        return token.finish_reason or (LENGTH if self._tokens >= self._job.max_new_tokens else STOP)

    def _failed(self, reason: str, detail: str) -> EngineFailed:
        instance: Instance = self._worker.instance
        return EngineFailed(side_of(instance), instance.id, reason, detail=detail)


class _Pace:
    """Stops reading while the client is slow; gRPC then stops the worker."""

    def __init__(self) -> None:
        self._going = asyncio.Event()
        self._going.set()

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

    def pause(self) -> None:
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    async def wait(self) -> None:
        """Until the client has read; its deadlines are the dispatcher's business."""
        await self._going.wait()
