"""From the name in the configuration to a policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from .accounting import Accounting
from .load_balance import LoadBalance, LoadBalanceOptions
from .policy import Policy
from .round_robin import RoundRobin
from .xllm_cache_aware import XllmCacheAware
from .xllm_slo import XllmSlo, XllmSloOptions


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A policy of this package: `make` takes an object of the dataclass `options`."""

    make: Callable[[Any], Policy]
    options: type[Any]


_BUILT_IN: Mapping[str, _BuiltIn] = {
    "load_balance": _BuiltIn(LoadBalance, LoadBalanceOptions),
    "round_robin": _BuiltIn(RoundRobin, Accounting),
    "xllm_cache_aware": _BuiltIn(XllmCacheAware, Accounting),
    "xllm_slo": _BuiltIn(XllmSlo, XllmSloOptions),
}

POLICY_NAMES = tuple(_BUILT_IN)


def load_policy(name: str, options: Mapping[str, object] | None = None) -> Policy:
    """Make a policy by its name.

    Args:
        name: one of `POLICY_NAMES`, or `module:Class` for a plug-in; the class is called with the options as keywords.
        options: the policy's own options; those that are missing have their defaults.

    Raises:
        ValueError: unknown name or option, a wrong value, or a plug-in that cannot be imported or is no policy.
    """
    given = options or {}
    built_in = _BUILT_IN.get(name)
    if built_in is None:
        if ":" in name:
            return _plug_in(name, given)
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}, or module:Class")
    known = [field.name for field in fields(built_in.options)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} of policy {name}; known: {', '.join(known)}")
    try:
        return built_in.make(built_in.options(**given))
    except ValueError as error:
        raise ValueError(f"policy {name}: {error}") from error


def _plug_in(name: str, options: Mapping[str, object]) -> Policy:
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(import_module(module), attribute)(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"policy {name!r} cannot be loaded: {error}") from error
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} is no policy; derive it from coordinator.policies.Policy")  # noqa: TRY004
    return policy
