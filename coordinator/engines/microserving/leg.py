"""The stream of one engine, edited on its way to the client; it may end in `preempt`."""

from collections.abc import Callable

from coordinator.core.errors import EngineFailed, RequestError
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import Stages
from coordinator.core.request import Headers
from coordinator.engines.http_leg import StreamLeg, refusal, side_of
from coordinator.transport.errors import TransportError
from coordinator.wire.completion_stream import CompletionEditor, EventCutter
from coordinator.wire.microserving import plain_refusal

OK = 200
MAX_ERROR_BYTES = 65536


class GenerateLeg(StreamLeg):
    """A stream whose events go through an editor, whole ones at a time.

    A read that holds whole events costs no copy but the editor's own; nothing waits for more.

    Attributes:
        preempted: the engine has given the request back; what it had sent before has passed.
        on_head: called when the head is there.
    """

    def __init__(self, instance: Instance, stages: Stages, out: Out, editor: CompletionEditor) -> None:
        super().__init__(instance, stages, out)
        self.preempted = False
        self.on_head: Callable[[], None] | None = None
        self._editor = editor
        self._cutter = EventCutter()
        self._refusal = b""
        self._head: Headers = ()

    async def ended(self) -> None:
        """Wait for the end of the answer; raises RequestError."""
        try:
            await self.done
        except RequestError:
            self.let_go()
            raise

    def head(self, status: int, headers: Headers) -> None:
        """Take the status and headers."""
        self._head = headers
        super().head(status, headers)
        if self.on_head is not None:
            self.on_head()

    def data(self, data: bytes, now_s: float) -> None:
        """Take body bytes; hot."""
        if self.status != OK:
            self._refusal += data[: MAX_ERROR_BYTES - len(self._refusal)]
            return
        try:
            whole = self._cutter.feed(data)
        except ValueError as error:
            self._fail(EngineFailed(side_of(self.instance), self.instance.id, "reply_too_large", detail=str(error)))
            return
        if whole:
            self._take(whole, now_s)

    def _take(self, whole: bytes, now_s: float) -> None:
        if self.preempted or self.done.done():
            return
        editor = self._editor
        ready = editor.feed(whole)
        if ready:
            super().data(ready, now_s)
        if editor.preempted:
            self.preempted = True
            self._resolve()

    def end(self, now_s: float) -> None:
        """The body ended by its own framing."""
        if self.status != OK:
            self._fail(refusal(self.instance, self.status, self._head, plain_refusal(self._refusal)))
            return
        rest = self._cutter.rest()
        if rest:
            self._take(rest, now_s)
        super().end(now_s)

    def lost(self, error: TransportError) -> None:
        """The connection broke: the piece of an event that is held back is of no use to the client."""
        self._cutter.rest()
        super().lost(error)
