"""One request's share of a decode instance's result stream."""

import asyncio
from collections.abc import Callable

from coordinator.core.errors import EngineFailed, RequestError, Side
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Outcome, Resume, Stages
from coordinator.engines.mindie.envelope import FirstToken
from coordinator.wire.mindie import Kind

MAX_HELD_BYTES = 67108864
MAX_DETAIL_CHARS = 300
OVERTAKEN_S = 0.25  # how long an error of decode waits for prefill's reply, in whose place it would else come


class Mailbox:
    """Passes decode's messages on to the client in order, and holds them until prefill's first token is out.

    Everything is synchronous: a message goes from the link's socket callback to the client's socket without a task
    switch. `done` resolves once: completed, given back, or failed. `stream`: whether the answer is one.
    """

    __slots__ = (
        "_decode_id", "_decoding", "_flowing", "_held", "_held_bytes", "_out", "_stages", "_wire_id", "done",
        "on_settled", "stream",
    )  # fmt: skip

    def __init__(self, wire_id: str, decode_id: str, out: Out, stages: Stages, *, stream: bool) -> None:
        self._wire_id = wire_id
        self._decode_id = decode_id
        self._out = out
        self._stages = stages
        self.stream = stream
        self._flowing = False  # the hot path is open: prefill's token is out, decode has begun
        self._decoding = False
        self._held: list[tuple[Kind, bytes, float]] | None = []  # None: prefill has answered
        self._held_bytes = 0
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.on_settled: Callable[[], None] | None = None

    @property
    def settled(self) -> bool:
        """Whether `done` has its result."""
        return self.done.done()

    # --- from the link

    def data(self, body: bytes, now_s: float) -> None:
        """Take a piece of the stream; hot."""
        if self._flowing:
            self._out.piece(body, now_s)
        else:
            self.message(Kind.DATA, body, now_s)

    def message(self, kind: Kind, body: bytes, now_s: float) -> None:
        """Take any message of this request."""
        if self.done.done():
            return
        if kind is Kind.ERROR and (self._held is None or not self.stream):
            self._refused(body)
        elif kind is Kind.OVERSIZED:
            self._fail("message_too_large", "")
        elif self._held is None or (kind is Kind.LAST_DATA and not self.stream):
            self._deliver(kind, body, now_s)
        else:
            self._hold(kind, body, now_s)

    def _hold(self, kind: Kind, body: bytes, now_s: float) -> None:
        assert self._held is not None
        self._held.append((kind, body, now_s))
        if kind is Kind.ERROR:
            # it was said after prefill's reply and has overtaken it; where there is no reply, the failure stands
            asyncio.get_running_loop().call_later(OVERTAKEN_S, self._refused, body)
        self._held_bytes += len(body)
        if self._held_bytes > MAX_HELD_BYTES:
            self._fail("message_too_large", "decode is far ahead of prefill's reply")

    def _deliver(self, kind: Kind, body: bytes, now_s: float) -> None:
        if kind is Kind.RETRY:
            self._settle(Resume(body, self._wire_id))
            return
        if kind is Kind.ERROR:
            self._refused(body)
            return
        if kind not in (Kind.DATA, Kind.LAST_DATA):
            return
        if not self._decoding:
            self._decoding = True
            self._flowing = self.stream and self._held is None
            self._stages.decoding(now_s)
            # decode opens an OpenAI chat stream again although prefill has done so (protocol page §5.5)
            if kind is Kind.DATA and self.stream and self._out.only_opens(body):
                if not self._out.started:
                    self._out.piece(body, now_s, token=False)
                return
        if kind is Kind.LAST_DATA:
            self._complete(body, now_s)
        elif self.stream:
            self._out.piece(body, now_s)

    def _complete(self, body: bytes, now_s: float) -> None:
        if self.stream:
            self._out.finish(body, now_s)
        elif body:
            self._out.whole(body, now_s)
        else:
            self._fail("bad_reply", "the answer is empty")
            return
        self._settle(COMPLETED)

    def hold(self) -> None:
        """See core.gather: several messages of this request have come in one read."""
        self._out.hold()

    def flush(self) -> None:
        """See core.gather."""
        self._out.flush()

    # --- from the request

    def prefilled(self, first: FirstToken, now_s: float) -> None:
        """Prefill has answered: send its token, then what decode has said meanwhile."""
        self._stages.prefilled(now_s)
        held, self._held = self._held or (), None
        if self.done.done():
            return
        if first.last:
            self._stages.decoding(now_s)
            self._complete(first.output, now_s)
            return
        if held:
            self._out.hold()
        if first.output:
            self._out.piece(first.output, now_s, token=not self._out.only_opens(first.output))
        for kind, body, arrived_s in held:
            if not self.done.done():
                self._deliver(kind, body, arrived_s)
        if held:
            self._out.flush()

    def fail(self, error: RequestError) -> None:
        """End the wait with an error; a settled mailbox stays as it is."""
        if not self.done.done():
            self._flowing = False
            self.done.set_exception(error)
            self.done.exception()  # whoever waits gets it; nobody may be waiting any more
            if self.on_settled is not None:
                self.on_settled()

    def _refused(self, text: bytes) -> None:
        self._fail("engine_error", text.decode("utf-8", "replace")[:MAX_DETAIL_CHARS])

    def _fail(self, reason: str, detail: str) -> None:
        self.fail(EngineFailed(Side.DECODE, self._decode_id, reason, detail=detail))

    def _settle(self, outcome: Outcome) -> None:
        self._flowing = False
        self.done.set_result(outcome)
        if self.on_settled is not None:
            self.on_settled()
