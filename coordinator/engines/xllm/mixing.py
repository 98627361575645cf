"""The roles of MIX instances over time."""

import logging
import math
from collections.abc import Iterable, Mapping

from coordinator.core.abilities import Host, InstanceWork
from coordinator.core.instance import Instance, Role
from coordinator.engines.xllm.mix import Figures, Targets, first_role, relabelled
from coordinator.engines.xllm.settings import XllmSettings
from coordinator.policies.profiles import DecodeProfile, PrefillProfile

REST_LOOKS = 5  # after a change, so many looks pass before the next: its effect must show first


class Mixing:
    """Gives roles, and changes one at a time."""

    def __init__(self, settings: XllmSettings, host: Host, log: logging.Logger) -> None:
        self.renew(settings)
        self._host = host
        self._log = log
        self._roles: dict[str, Role] = {}
        self._rest = 0

    def renew(self, settings: XllmSettings) -> None:
        """Have these targets."""
        self._targets = Targets(settings.target_ttft_ms, settings.target_tpot_ms)

    def update(self, names: Iterable[str], others: Mapping[str, Role]) -> None:
        """These are the MIX instances, beside others whose roles are their own."""
        wanted = list(names)
        for gone in self._roles.keys() - set(wanted):
            del self._roles[gone]
        for name in wanted:
            if name not in self._roles:
                self._roles[name] = first_role({**others, **self._roles})

    def role(self, name: str) -> Role:
        """The role of a MIX instance."""
        return self._roles.get(name, Role.DECODE)

    def look(self) -> bool:
        """Change a role where that is due; returns whether one was."""
        if not self._roles:
            return False
        if self._rest:
            self._rest -= 1
            return False
        change = relabelled([_figures(work, self._roles) for work in self._host.works()], self._targets)
        if change is None:
            return False
        name, role = change
        self._roles[name] = role
        self._rest = REST_LOOKS
        self._log.info("MIX instance %s does %s from here on", name, role)
        return True


def _figures(work: InstanceWork, roles: Mapping[str, Role]) -> Figures:
    instance = work.instance
    name = instance.address.netloc
    return Figures(name, instance.role, name in roles, work.requests, _load_ms(instance, work))


def _load_ms(instance: Instance, work: InstanceWork) -> float:
    tokens = work.blocks * instance.capacity.block_tokens
    if instance.role is Role.PREFILL:
        prefill = PrefillProfile.of(instance)
        if prefill is None:
            return math.nan
        return prefill.ttft_ms(tokens / work.requests) * work.requests if work.requests else 0.0
    decode = DecodeProfile.of(instance)
    return math.nan if decode is None else decode.tpot_ms(work.requests, tokens)
