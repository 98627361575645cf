"""How long simulated work takes. All results are seconds; all settings are milliseconds."""

import heapq
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing model of one instance; the default is instant.

    Attributes:
        prefill_ms: base time of a prefill.
        prefill_token_ms: added for each prompt token that is not in the prefix cache.
        prefill_lanes: how many prefills run at the same time; further ones wait.
        decode_ms: time of one decode step, which gives every running request one token.
        decode_load: added share of decode_ms for each further running request (0.01: 100 more take twice as long).
        transfer_ms: base time of moving KV to decode.
        transfer_token_ms: added for each token moved.
        jitter: each time is drawn from ±this share around its value.
        speed: 2 is twice as fast; 0 is instant.
    """

    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0
    prefill_lanes: int = 1
    decode_ms: float = 0.0
    decode_load: float = 0.0
    transfer_ms: float = 0.0
    transfer_token_ms: float = 0.0
    jitter: float = 0.0
    speed: float = 1.0


class Clockwork:
    """Turns the timing model into waits; its random numbers come from the instance's seed."""

    def __init__(self, timing: Timing, seed: int) -> None:
        self._timing = timing
        self._rng = random.Random(f"timing:{seed}")
        self._lanes = [0.0] * max(1, timing.prefill_lanes)

    def _scaled(self, milliseconds: float) -> float:
        timing = self._timing
        if milliseconds <= 0 or timing.speed <= 0:
            return 0.0
        spread = self._rng.uniform(1 - timing.jitter, 1 + timing.jitter) if timing.jitter else 1.0
        return max(0.0, milliseconds * spread / timing.speed / 1000)

    def prefill_s(self, uncached_tokens: int) -> float:
        """Compute time of one prefill, waiting not counted."""
        return self._scaled(self._timing.prefill_ms + self._timing.prefill_token_ms * uncached_tokens)

    def prefill_wait_s(self, uncached_tokens: int, now_s: float) -> float:
        """Time until a prefill that arrives at `now_s` is done; books the lane that is free first."""
        work_s = self.prefill_s(uncached_tokens)
        if not work_s:
            return 0.0
        end_s = max(now_s, self._lanes[0]) + work_s
        heapq.heapreplace(self._lanes, end_s)
        return end_s - now_s

    def step_s(self, running: int) -> float:
        """Time of one decode step with `running` requests in the batch."""
        return self._scaled(self._timing.decode_ms * (1 + self._timing.decode_load * max(0, running - 1)))

    def transfer_s(self, kv_tokens: int) -> float:
        """Time of moving the KV of that many tokens."""
        return self._scaled(self._timing.transfer_ms + self._timing.transfer_token_ms * kv_tokens)
