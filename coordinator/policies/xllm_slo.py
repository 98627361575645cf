"""SLO aware: by the times that instances are predicted to take, from what they register (xLLM protocol page §8)."""

from dataclasses import dataclass

from coordinator.core.instance import Instance, Role

from .accounting import Accounting, Order, checked_number
from .policy import Demand, LoadView, Policy
from .profiles import DecodeProfile, PrefillProfile

UNKNOWN_MS = 1e9  # an instance without a profile comes after those with one, by its load


@dataclass(frozen=True, slots=True)
class XllmSloOptions:
    """Options of `xllm_slo`.

    Attributes:
        target_tpot_ms: decode instances that keep to it are all as good.
        bytes_to_tokens, order: as in `Accounting`.
    """

    target_tpot_ms: float = 50.0
    bytes_to_tokens: float = 0.22
    order: Order = "fcfs"

    def __post_init__(self) -> None:
        checked_number("target_tpot_ms", self.target_tpot_ms)


class XllmSlo(Policy):
    """Prefill: least predicted time until the prompt is computed. Decode: any that keeps the target, else the fastest.

    What is on an instance is what leases hold there: it is counted once and given back once, so that a cancelled
    request can take nothing away twice.
    """

    per_request = True

    def __init__(self, options: XllmSloOptions = XllmSloOptions()) -> None:
        self.options = options
        self.accounting = Accounting(bytes_to_tokens=options.bytes_to_tokens, order=options.order)

    def cost(self, load: LoadView, instance: Instance, demand: Demand) -> float:
        """Predicted milliseconds."""
        if instance.role is Role.DECODE:
            return self._decode_ms(load, instance, demand)
        profile = PrefillProfile.of(instance)
        if profile is None:
            return UNKNOWN_MS + load.requests + load.blocks
        lengths = load.lengths
        waiting_ms = sum(count * profile.ttft_ms(tokens) for tokens, count in lengths.items())
        elsewhere = load.requests - sum(lengths.values())  # of other processes only the sum is known
        if elsewhere > 0:
            tokens_elsewhere = load.tokens - sum(count * tokens for tokens, count in lengths.items())
            waiting_ms += elsewhere * profile.ttft_ms(tokens_elsewhere / elsewhere)
        return waiting_ms + profile.ttft_ms(demand.tokens)

    def _decode_ms(self, load: LoadView, instance: Instance, demand: Demand) -> float:
        profile = DecodeProfile.of(instance)
        if profile is None:
            return UNKNOWN_MS + load.requests + load.blocks
        predicted_ms = profile.tpot_ms(load.requests + 1, load.tokens + demand.tokens)
        return 0.0 if predicted_ms <= self.options.target_tpot_ms else predicted_ms
