"""The two sinks of an attempt: prefill's answer is drained, decode's goes to the client."""

import re
import time
from collections.abc import Callable

from coordinator.core.errors import EngineFailed, EngineRefused, RequestError, Side
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Stages
from coordinator.core.request import Headers
from coordinator.engines.http_leg import MAX_ERROR_BYTES, StreamLeg, failed, refusal, side_of
from coordinator.transport.errors import TransportError
from coordinator.transport.sink import ReplySink
from coordinator.wire.events import ErrorEvent
from coordinator.wire.sglang_answers import blames_peer, failure_in

STALE_WITHIN_S = 1.0  # a kept connection that the engine had closed shows it within a round trip
OK = 200
# how decode instances say that the KV did not come (SGLang protocol page §3)
_WAITED = re.compile(r"in time|tim(?:ed|e)[ -]?out|WaitingForInput", re.IGNORECASE)


class PrefillLeg(ReplySink):
    """The sink of prefill's answer: read to its end, because closing it aborts the transfer of the KV.

    Args:
        keep_bytes: how much of the answer is kept; the rest is dropped as it comes.
        status: where it takes an answer over, that of its head.

    Attributes:
        over: the answer has ended, well or not.
        stale: it failed because the engine had closed a kept connection; the request was not processed.
        status: of the answer, as soon as its head is there; else 0.
        on_doomed: called with the head of an answer that can only be a failure.
        on_over: called once, with the monotonic time and the failure, if it is one.
    """

    __slots__ = (
        "_headers", "_keep_bytes", "_parts", "_sent_s", "_stream", "instance", "on_doomed", "on_over", "over",
        "stale", "status",
    )  # fmt: skip

    def __init__(
        self,
        instance: Instance,
        *,
        stream: bool,
        keep_bytes: int,
        on_doomed: Callable[[], None],
        on_over: Callable[[float, RequestError | None], None],
        status: int = 0,
    ) -> None:
        self.instance = instance
        self.over = False
        self.stale = False
        self.on_doomed = on_doomed
        self.on_over = on_over
        self._stream = stream
        self._keep_bytes = keep_bytes
        self._parts: list[bytes] = []
        self.status = status
        self._headers: Headers = ()
        self._sent_s = time.monotonic()

    @property
    def body(self) -> bytes:
        """The answer, as far as it is kept."""
        return b"".join(self._parts)

    def part(self) -> None:
        """Tell nobody from here on."""
        self.on_doomed, self.on_over = _nothing, _nobody

    # --- transport.sink.ReplySink

    def head(self, status: int, headers: Headers) -> None:
        """Take the status."""
        self.status = status
        if status != OK:
            self._headers = headers
            self._keep_bytes = MAX_ERROR_BYTES
            self.on_doomed()

    def data(self, data: bytes, now_s: float) -> None:
        """Keep the beginning; a failure is told as soon as there is enough of it."""
        if self._keep_bytes > 0:
            self._parts.append(data[: self._keep_bytes])
            self._keep_bytes -= len(data)
        elif self.status != OK:
            self.give_up(now_s)

    def end(self, now_s: float) -> None:
        """The answer is complete."""
        self._close(now_s, self._refusal() if self.status != OK else self._failure())

    def lost(self, error: TransportError) -> None:
        """The connection broke."""
        now_s = time.monotonic()
        self.stale = error.unsent and now_s - self._sent_s < STALE_WITHIN_S
        self._close(now_s, failed(self.instance, error))

    def give_up(self, now_s: float) -> None:
        """Tell a failure by what has come of it; nothing after a good head."""
        if self.status not in (0, OK):
            self._close(now_s, self._refusal())

    # --- inside

    def _close(self, now_s: float, error: RequestError | None) -> None:
        if not self.over:
            self.over = True
            self.on_over(now_s, error)

    def _refusal(self) -> RequestError:
        return refusal(self.instance, self.status, self._headers, self.body)

    def _failure(self) -> RequestError | None:
        """A 200 is not yet a success (rules for all flavours: 3, 12)."""
        body = self.body
        if not body or body.isspace():
            return EngineFailed(side_of(self.instance), self.instance.id, "bad_reply", detail="empty answer")
        told = failure_in(body, stream=self._stream)
        return None if told is None else _reported(self.instance, told)


class DecodeLeg(StreamLeg):
    """The sink of decode's answer, streamed or whole.

    Attributes:
        stale: as PrefillLeg's.
    """

    def __init__(self, instance: Instance, stages: Stages, out: Out) -> None:
        super().__init__(instance, stages, out)
        self.stale = False
        self._sent_s = time.monotonic()

    def lost(self, error: TransportError) -> None:
        """The connection broke."""
        self.stale = error.unsent and time.monotonic() - self._sent_s < STALE_WITHIN_S
        super().lost(error)


def _nothing() -> None:
    """Who hears of a doomed answer when nobody asks any more."""


def _nobody(now_s: float, error: RequestError | None) -> None:
    """Who hears of an end when nobody asks any more."""


def _reported(instance: Instance, told: ErrorEvent) -> RequestError:
    if 400 <= told.code < 500:
        return EngineRefused(told.code, told.message or f"the engine refused the request with status {told.code}")
    return EngineFailed(side_of(instance), instance.id, "engine_error", detail=told.message[:300])


def settled(instance: Instance, error: RequestError) -> tuple[RequestError, bool]:
    """A leg's failure as what it is, and whether the other leg may be its cause.

    An engine that gave the hand-over up may say so with a 4xx; that is nothing the client did.
    """
    message = error.detail if isinstance(error, EngineFailed) else error.message
    if not blames_peer(message):
        return error, False
    if isinstance(error, EngineRefused):
        detail = f"status {error.status}: {message[:200]}"
        error = EngineFailed(side_of(instance), instance.id, "engine_error", detail=detail)
    return error, True


def late(prefill: Instance, error: RequestError) -> EngineFailed | None:
    """The failure of a prefill that decode has waited for until its time was up; None if decode says no such thing."""
    message = error.detail or error.message
    if _WAITED.search(message) is None:
        return None
    return EngineFailed(Side.PREFILL, prefill.id, "timeout", detail=f"decode waited for it: {message}")
