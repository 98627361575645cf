"""One request's share of what instances push (xLLM protocol page §5.5, §6)."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.core.errors import EngineFailed, RequestError, Side
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Completed, Placement
from coordinator.engines.xllm.answer import PushedAnswer
from coordinator.engines.xllm.statuses import error_of, error_of_prefill

if TYPE_CHECKING:
    from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGeneration, OutputUsage

MAX_HELD = 4096  # deltas of decode that wait for prefill's token


class Mailbox:
    """Passes results on to the client in order: prefill's token first, then what decode says.

    Both sides push on connections of their own, and nothing numbers their messages, so decode's can overtake
    prefill's. They are held until prefill has said something, but no longer than `hold_s`. Everything is synchronous: a
    result goes from the socket's callback to the client's socket without a task switch.

    Attributes:
        done: resolves once, when the answer is complete, or fails.
        on_settled: called when it does.
    """

    __slots__ = (
        "_answer", "_decoding", "_first_seen", "_held", "_hold", "_hold_s", "_out", "_overtaken", "_placement",
        "_prefilled", "_stream", "done", "on_settled",
    )  # fmt: skip

    def __init__(self, answer: PushedAnswer, placement: Placement, out: Out, *, stream: bool, hold_s: float) -> None:
        self._answer = answer
        self._placement = placement
        self._out = out
        self._stream = stream
        self._hold_s = hold_s
        self._hold: asyncio.TimerHandle | None = None
        self._held: list[tuple[DisaggStreamGeneration, float]] = []
        self._prefilled = False
        self._first_seen = False
        self._overtaken = False  # decode's output went out although prefill had said nothing
        self._decoding = False
        self.done: asyncio.Future[Completed] = asyncio.get_running_loop().create_future()
        self.on_settled: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether an instance has said anything about the request."""
        return self._prefilled or bool(self._held)

    def runs_on(self, instance_id: str) -> bool:
        """Whether an instance still has work with it: prefill until its token is there, decode until the end."""
        placement = self._placement
        return placement.decode.id == instance_id or (placement.prefill.id == instance_id and not self._prefilled)

    def take(self, told: "DisaggStreamGeneration", now_s: float, sender: str = "") -> bool:
        """Take a result; returns whether the request is still wanted. Hot. `sender`: its name, if it is known."""
        if self.done.done():
            return False
        if told.gen_status.status_code:
            self._refuse(told.gen_status.status_code, told.gen_status.status_msg)
        elif told.finished_on_prefill_instance:
            self._first(told, now_s)
        elif self._prefilled:
            self._deliver(told, now_s)
        elif self._stream and not (told.outputs or told.finished):
            # from prefill: its token is a part of a character, which decode will send; from decode: one step of it
            if sender == self._placement.prefill.address.netloc != self._placement.decode.address.netloc:
                self._prefill_over(now_s)
        elif self._stream:
            self._hold_back(told, now_s)
        elif told.finished:
            self._prefill_over(now_s)
            self._deliver(told, now_s)
        return True

    def fail(self, error: RequestError) -> None:
        """End the wait with an error; a settled mailbox stays as it is."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever waits gets it; nobody may be waiting any more
            self._settled()

    def lost(self, instance_id: str, why: str) -> None:
        """An instance that works on it is gone."""
        placement = self._placement
        side = Side.DECODE if placement.decode.id == instance_id else Side.PREFILL
        self.fail(EngineFailed(side, instance_id, "instance_lost", detail=why))

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        self._held.clear()

    # --- order

    def _first(self, told: "DisaggStreamGeneration", now_s: float) -> None:
        """Prefill's own message; the same one may come twice (protocol page §6)."""
        if self._first_seen and not told.finished:
            return
        self._first_seen = True
        if self._overtaken and any(output.text or output.token_ids for output in told.outputs):
            self._fail_decode("out_of_order", "prefill's token came after decode's")
            return
        if self._stream and not told.finished:
            self._send(told, now_s)
        if told.finished:
            self._placement.prefilled(now_s)
            self._prefilled = True
            self._complete(told, now_s)
        else:
            self._prefill_over(now_s)

    def _prefill_over(self, now_s: float) -> None:
        """Prefill has said what it says: decode's output may follow."""
        if self._prefilled:
            return
        self._prefilled = True
        self._placement.prefilled(now_s)
        held, self._held = self._held, []
        self.close()
        for told, arrived_s in held:
            if not self.done.done():
                self._deliver(told, arrived_s)

    def _hold_back(self, told: "DisaggStreamGeneration", now_s: float) -> None:
        self._held.append((told, now_s))
        if len(self._held) > MAX_HELD:
            self._fail_decode("out_of_order", "decode is far ahead of prefill")
        elif self._hold is None:
            self._hold = asyncio.get_running_loop().call_later(self._hold_s, self._waited)

    def _waited(self) -> None:
        """Prefill's message does not come: go on without it."""
        if not self.done.done():
            self._overtaken = True
            self._prefill_over(self._held[0][1])

    # --- output

    def _deliver(self, told: "DisaggStreamGeneration", now_s: float) -> None:
        if not self._decoding and (told.outputs or told.finished):
            self._decoding = True
            self._placement.decoding(now_s)
        if told.finished:
            self._complete(told, now_s)
        elif self._stream and told.outputs:
            self._send(told, now_s)

    def _send(self, told: "DisaggStreamGeneration", now_s: float) -> None:
        self._answer.take(told.outputs, now_s)

    def _complete(self, told: "DisaggStreamGeneration", now_s: float) -> None:
        """The last message, whoever sent it."""
        self._placement.decoding(now_s)
        usage: OutputUsage | None = told.usage if told.HasField("usage") else None
        try:
            self._answer.end(told.outputs, usage, now_s)
        except ValueError as error:
            self._fail_decode("bad_reply", str(error))
            return
        self.done.set_result(COMPLETED)
        self._settled()

    # --- ends

    def _refuse(self, code: int, message: str) -> None:
        placement, started = self._placement, self._out.started
        if self._prefilled or self._held:
            self.fail(error_of(code, message, Side.DECODE, placement.decode, started=started))
        else:
            self.fail(error_of_prefill(code, message, placement, started=started))

    def _fail_decode(self, reason: str, detail: str) -> None:
        self.fail(EngineFailed(Side.DECODE, self._placement.decode.id, reason, detail=detail))

    def _settled(self) -> None:
        self.close()
        if self.on_settled is not None:
            self.on_settled()
