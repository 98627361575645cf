"""The two kinds of calls: one whose whole reply is awaited, and a stream with something to add at its end."""

import asyncio

from msgspec import Raw

from coordinator.core.instance import Instance
from coordinator.core.ports import Out, Stages
from coordinator.core.request import Headers
from coordinator.engines.http_leg import StreamLeg
from coordinator.transport.client import MAX_ERROR_BYTES, MAX_REPLY_BYTES, HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.transport.unary import Collector
from coordinator.wire.events import UsageEditor


class WholeCall:
    """One POST of which it is known, also after a cancellation, whether it went out and what came back.

    Attributes:
        sent: the request was handed to a connection.
    """

    __slots__ = ("_future", "sent")

    def __init__(self) -> None:
        self._future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.sent = False

    @property
    def reply(self) -> Reply | None:
        """The reply, if it has come, be it in the moment of the cancellation."""
        future = self._future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    async def run(self, client: HttpClient, instance: Instance, target: str, headers: Headers, body: bytes) -> Reply:
        """Send it and return the whole reply, of any status; the request's deadlines are its caller's business.

        Cancellation closes the connection, which ends the request at the engine.

        Raises:
            TransportError: there is no whole reply.
        """
        collector = Collector(self._future, MAX_REPLY_BYTES, MAX_ERROR_BYTES)
        stream = await client.open_stream(instance.address, b"POST", target, headers, body, sink=collector)
        self.sent = True
        try:
            return await self._future
        finally:
            stream.close()
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # known here, so that a cancellation does not leave it unseen


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
