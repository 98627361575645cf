"""Shelf: one file is one way to choose an instance. Pure and synchronous.

To add a policy: a class derived from `Policy` in a file of its own, a line in the table of `loading.py`, the
conformance kit. A policy from elsewhere is named `module:Class` in the configuration.
"""

from .accounting import Accounting
from .load_balance import LoadBalance, LoadBalanceOptions
from .loading import POLICY_NAMES, load_policy
from .policy import NO_DEMAND, Demand, LoadView, Policies, Policy
from .round_robin import RoundRobin

__all__ = [
    "NO_DEMAND",
    "POLICY_NAMES",
    "Accounting",
    "Demand",
    "LoadBalance",
    "LoadBalanceOptions",
    "LoadView",
    "Policies",
    "Policy",
    "RoundRobin",
    "load_policy",
]
