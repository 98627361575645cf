"""Prefill answers that are still on their way when their request is over."""

import asyncio

from coordinator.core.errors import RequestError
from coordinator.engines.sglang.legs import PrefillLeg
from coordinator.transport.stream import Stream

DRAIN_S = 10.0
MAX_DRAINS = 1024


class Drains:
    """Reads them to their end without holding anybody up; each for DRAIN_S at most, MAX_DRAINS at a time."""

    def __init__(self) -> None:
        self._timers: dict[Stream, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def take(self, leg: PrefillLeg, stream: Stream) -> None:
        """Look after the rest of an answer; how it ends is of no interest any more."""

        def over(now_s: float, error: RequestError | None) -> None:  # noqa: ARG001
            self._close(stream)

        leg.part()
        leg.on_over = over
        if len(self._timers) >= MAX_DRAINS:
            self._close(next(iter(self._timers)))
        self._timers[stream] = asyncio.get_running_loop().call_later(DRAIN_S, self._close, stream)

    def close(self) -> None:
        """Close them all."""
        for stream in list(self._timers):
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()
        stream.close()
