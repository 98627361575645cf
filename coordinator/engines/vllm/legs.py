"""The two kinds of calls: one whose whole reply is awaited, and a stream with something to add at its end."""

import asyncio
import math
import time

from msgspec import Raw

from coordinator.core.instance import Instance
from coordinator.core.ports import Out, Stages
from coordinator.core.request import Headers
from coordinator.engines.http_leg import StreamLeg
from coordinator.transport.client import MAX_ERROR_BYTES, MAX_REPLY_BYTES, HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.stream import Stream
from coordinator.transport.unary import Collector
from coordinator.wire.events import UsageEditor

LINGER_S = 0.25


class Farewells:
    """Closes connections to decode not before it had the time to take the request on.

    An engine that sees the client leave in the very moment of the request's arrival drops it before its KV connector
    knows of it, and prefill's blocks stay pinned. Once it has taken the request on, its abort frees them.

    Attributes:
        linger_s: from the sending of a request to the earliest close.
    """

    def __init__(self) -> None:
        self.linger_s = LINGER_S
        self._parting: dict[Stream, asyncio.TimerHandle] = {}

    def part(self, stream: Stream, sent_s: float) -> None:
        """Close the stream of a request that went out at `sent_s` (monotonic), at once or as soon as it is old."""
        left_s = self.left_s(sent_s)
        if left_s > 0:
            self._parting[stream] = asyncio.get_running_loop().call_later(left_s, self._close, stream)
        else:
            stream.close()

    def left_s(self, sent_s: float) -> float:
        """How long a request that went out at `sent_s` (monotonic) still has."""
        return max(0.0, sent_s + self.linger_s - time.monotonic())

    def _close(self, stream: Stream) -> None:
        self._parting.pop(stream).cancel()
        stream.close()

    def close(self) -> None:
        """Close all that is left."""
        for stream in tuple(self._parting):
            self._close(stream)


class WholeCall:
    """One POST of which it is known, also after a cancellation, whether it went out and what came back.

    It is the sink of its own reply: a cancellation reaches the waiting task a turn of the loop later, and a reply that
    comes in between is kept.

    Args:
        loop: the running one.
        farewells: parts with the connection where we leave before there is a reply; None: it is closed at once.

    Attributes:
        sent_s: when it went out (monotonic); infinity until then.
        status: of the reply, as soon as its head is there; else 0.
    """

    __slots__ = ("_collector", "_farewells", "_future", "_waiter", "sent_s", "status")

    def __init__(self, loop: asyncio.AbstractEventLoop, farewells: Farewells | None = None) -> None:
        self.sent_s = math.inf
        self.status = 0
        self._farewells = farewells
        self._future: asyncio.Future[Reply] = loop.create_future()
        self._waiter: asyncio.Future[None] = loop.create_future()
        self._collector = Collector(self._future, MAX_REPLY_BYTES, MAX_ERROR_BYTES)

    @property
    def reply(self) -> Reply | None:
        """The reply, if it has come, be it in the moment of the cancellation."""
        future = self._future
        return future.result() if future.done() and future.exception() is None else None

    @property
    def left(self) -> bool:
        """Whether the request went out, and we left before there was a reply or failure."""
        return self._waiter.cancelled() and not self._future.done()

    async def run(self, client: HttpClient, instance: Instance, target: str, headers: Headers, body: bytes) -> Reply:
        """Send it and return the whole reply, of any status; the request's deadlines are its caller's business.

        Cancellation closes the connection, which ends the request at the engine.

        Raises:
            TransportError: there is no whole reply.
        """
        stream = await client.open_stream(instance.address, b"POST", target, headers, body, sink=self)
        self.sent_s = time.monotonic()
        try:
            await self._waiter
            return self._future.result()
        finally:
            if self._farewells is not None and self.left:
                self._farewells.part(stream, self.sent_s)
            else:
                stream.close()

    # --- from the socket

    def head(self, status: int, headers: Headers) -> None:
        """Take the head."""
        self.status = status
        self._collector.head(status, headers)

    def data(self, data: bytes, now_s: float) -> None:
        """Take a part of the body."""
        self._collector.data(data, now_s)
        if self._future.done():
            self._wake()

    def end(self, now_s: float) -> None:
        """The reply is whole."""
        self._collector.end(now_s)
        self._wake()

    def lost(self, error: TransportError) -> None:
        """There is no whole reply."""
        self._collector.lost(error)
        self._wake()

    def _wake(self) -> None:
        self._future.exception()  # seen, also where nobody waits any more
        if not self._waiter.done():
            self._waiter.set_result(None)


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
