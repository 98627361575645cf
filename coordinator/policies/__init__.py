"""Shelf: one file is one way to choose an instance. Pure and synchronous.

To add a policy: a class derived from `Policy` in a file of its own, a line in the table of `loading.py`, the
conformance kit. A policy from elsewhere is named `module:Class` in the configuration.
"""

from .accounting import Accounting
from .informing import inform
from .load_balance import LoadBalance, LoadBalanceOptions
from .loading import POLICY_NAMES, load_policy
from .policy import NO_DEMAND, Demand, InformedPolicy, LoadView, Policies, Policy
from .round_robin import RoundRobin
from .xllm_cache_aware import XllmCacheAware
from .xllm_slo import XllmSlo, XllmSloOptions

__all__ = [
    "NO_DEMAND",
    "POLICY_NAMES",
    "Accounting",
    "Demand",
    "InformedPolicy",
    "LoadBalance",
    "LoadBalanceOptions",
    "LoadView",
    "Policies",
    "Policy",
    "RoundRobin",
    "XllmCacheAware",
    "XllmSlo",
    "XllmSloOptions",
    "inform",
    "load_policy",
]
