"""Which role MIX instances have (xLLM protocol page §8). Pure.

A MIX instance is linked to everybody and can do both; its role is a label that only the coordinator knows. One joins as
prefill where there is a decode instance, else as decode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.instance import Role


@dataclass(frozen=True, slots=True)
class Figures:
    """One instance that is in use.

    Attributes:
        requests: that it has to do with.
        load_ms: prefill: predicted time of the prompts that wait in it. Decode: predicted time per token. NaN: unknown.
    """

    name: str
    role: Role
    mix: bool
    requests: int
    load_ms: float


@dataclass(frozen=True, slots=True)
class Targets:
    """What is promised, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


def first_role(roles: Mapping[str, Role]) -> Role:
    """The role of a MIX instance that has just come, beside those that are there (by name)."""
    return Role.PREFILL if Role.DECODE in roles.values() else Role.DECODE


def relabelled(figures: Sequence[Figures], targets: Targets) -> tuple[str, Role] | None:
    """The one instance that should change its role now, and to what; None: none should.

    Prefill to decode where no decode instance keeps the time per token and prefill has time to spare, or is in the
    majority. Decode back to prefill when it has nothing to do. Neither role ever loses its last instance.
    """
    prefills = [one for one in figures if one.role is Role.PREFILL]
    decodes = [one for one in figures if one.role is Role.DECODE]
    late = bool(decodes) and all(one.load_ms > targets.tpot_ms for one in decodes)
    if late and len(prefills) > 1 and _can_spare(prefills, decodes, targets):
        idlest = min((one for one in prefills if one.mix), key=lambda one: one.requests, default=None)
        return (idlest.name, Role.DECODE) if idlest is not None else None
    if len(decodes) > 1 and not late:
        idle = next((one for one in decodes if one.mix and one.requests == 0), None)
        return (idle.name, Role.PREFILL) if idle is not None else None
    return None


def _can_spare(prefills: Sequence[Figures], decodes: Sequence[Figures], targets: Targets) -> bool:
    count = len(prefills)
    if len(decodes) < count:
        return True
    known = [one.load_ms for one in prefills if one.load_ms == one.load_ms]  # not NaN
    return bool(known) and sum(known) / count < targets.ttft_ms * (count - 1) / count
