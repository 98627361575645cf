"""The two kinds of calls: one whose whole reply is awaited, and a stream with something to add at its end."""

import asyncio
import math
import time
from collections.abc import Callable

from msgspec import Raw

from coordinator.core.body import RequestBody
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Stages
from coordinator.engines.http_leg import StreamLeg
from coordinator.transport.client import MAX_ERROR_BYTES, MAX_REPLY_BYTES, HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.request import GivenHeaders
from coordinator.transport.stream import Stream
from coordinator.transport.unary import Collector
from coordinator.wire.events import UsageEditor

LINGER_S = 0.25
PATIENCE_S = 1.5
READ_ON_S = 0.02
LAST_LOOK_S = 0.002  # timers count in milliseconds: the loop reads its sockets in between


class Farewells:
    """Closes connections of requests that were left: not at once, so that no KV stays pinned for it.

    Attributes:
        linger_s: from the sending of a request to decode to the earliest close. An engine that sees the client leave in
            the very moment of the request's arrival drops it before its KV connector knows of it, and prefill's blocks
            stay pinned; once it has taken the request on, its abort frees them.
        patience_s: from leaving decode, where it may have begun, to a release. One that has begun has freed the KV by
            then, and nobody need be troubled sooner.
        read_on_s: from leaving prefill to the close. Its answer may be on its way, and nobody else has the record.
    """

    def __init__(self) -> None:
        self.linger_s = LINGER_S
        self.patience_s = PATIENCE_S
        self.read_on_s = READ_ON_S
        self.parting: dict[Stream, asyncio.TimerHandle] = {}

    def part(self, stream: Stream, sent_s: float) -> None:
        """Close decode's stream of a request that went out at `sent_s` (monotonic), as soon as that is long ago."""
        left_s = self.left_s(sent_s)
        if left_s > 0:
            self._close_in(stream, left_s)
        else:
            stream.close()

    def read_on(self, stream: Stream, sent_s: float) -> None:  # noqa: ARG002  # whenever it was sent
        """Close prefill's stream soon."""
        self._close_in(stream, self.read_on_s)

    def _close_in(self, stream: Stream, seconds: float) -> None:
        self.parting[stream] = asyncio.get_running_loop().call_later(seconds, self._last_look, stream)

    def _last_look(self, stream: Stream) -> None:
        """Read what has come by now: in a busy process the timer is late, and the loop turns to timers first."""
        self.parting[stream] = asyncio.get_running_loop().call_later(LAST_LOOK_S, self._close, stream)

    def left_s(self, sent_s: float) -> float:
        """How long a request that went out at `sent_s` (monotonic) still has."""
        return max(0.0, sent_s + self.linger_s - time.monotonic())

    def _close(self, stream: Stream) -> None:
        self.parting.pop(stream).cancel()
        stream.close()

    def close(self) -> None:
        """Close all that is left."""
        for stream in tuple(self.parting):
            self._close(stream)


class WholeCall(Collector):
    """One POST of which it is known, also after a cancellation, whether it went out and what came back.

    It is the sink of its own reply: a cancellation reaches the waiting task a turn of the loop later, and a reply that
    comes in between is kept.

    Args:
        loop: the running one.
        part: closes the connection where we leave before there is a reply, at once or soon; told when the request went
            out (monotonic seconds).

    Attributes:
        on_late: called with a reply that comes after we have left.
        sent_s: when it went out (monotonic); infinity until then.
    """

    __slots__ = ("_part", "_waiter", "on_late", "sent_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, part: Callable[[Stream, float], None]) -> None:
        super().__init__(MAX_REPLY_BYTES, MAX_ERROR_BYTES)
        self.on_late: Callable[[Reply], None] | None = None
        self.sent_s = math.inf
        self._part = part
        self._waiter: asyncio.Future[None] = loop.create_future()

    @property
    def reply(self) -> Reply | None:
        """The reply, if it has come, be it in the moment of the cancellation."""
        return self.outcome if isinstance(self.outcome, Reply) else None

    @property
    def left(self) -> bool:
        """Whether the request went out, and we left before there was a reply or failure."""
        return self.outcome is None and self._waiter.cancelled()

    async def run(
        self, client: HttpClient, instance: Instance, target: str, headers: GivenHeaders, body: RequestBody
    ) -> Reply:
        """Send it and return the whole reply, of any status; the request's deadlines are its caller's business.

        Cancellation closes the connection, which ends the request at the engine.

        Raises:
            TransportError: there is no whole reply.
        """
        stream = await client.open_stream(instance.address, b"POST", target, headers, body, sink=self)
        self.sent_s = time.monotonic()
        try:
            await self._waiter
        finally:
            if self.left:
                self._part(stream, self.sent_s)
            else:
                stream.close()
        if isinstance(self.outcome, Reply):
            return self.outcome
        raise self._failure()

    def _failure(self) -> TransportError:
        """What went wrong; it is not kept, for its traceback knows who holds this call, which would be a cycle."""
        outcome, self.outcome = self.outcome, None
        assert isinstance(outcome, TransportError), "woken without an outcome"
        return outcome

    def settled(self, outcome: Reply | TransportError) -> None:
        """Wake whoever waits."""
        if not self._waiter.done():
            self._waiter.set_result(None)
        elif self.on_late is not None and isinstance(outcome, Reply):
            self.on_late(outcome)


class MergingLeg(StreamLeg):
    """A stream whose last usage tells prefill's cached tokens; decode would call the tokens it has pulled cached."""

    def __init__(self, instance: Instance, stages: Stages, out: Out, cached_tokens: Raw) -> None:
        super().__init__(instance, stages, out)
        self._editor = UsageEditor(cached_tokens)

    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes."""
        ready = self._editor.feed(data)
        if ready:
            super().data(ready, now_s)

    def end(self, now_s: float) -> None:
        """The body ended by its own framing."""
        self._flush(now_s)
        super().end(now_s)

    def lost(self, error: TransportError) -> None:
        """The connection broke: the piece of an event that is held back is of no use to the client."""
        self._editor.rest()
        super().lost(error)

    def _flush(self, now_s: float) -> None:
        rest = self._editor.rest()
        if rest:
            super().data(rest, now_s)
