"""cluster.yaml: what may stand there, what is wrong with it, and what comes out of it.

`load` gives frozen `Settings` or a `ConfigError` with every problem; `to_instances` gives the instances.
"""

from .checks import notes, restart_keys
from .errors import ConfigError, Finding, OptionError, Problem
from .instances import ValidateOptions, instance_from_mapping, to_instances
from .loading import load, parse
from .models import (
    Cluster,
    Health,
    InstanceSettings,
    Limits,
    LoadBalance,
    Logging,
    PolicyByRole,
    Retry,
    Scheduling,
    Server,
    Settings,
    Timeouts,
)
from .reference import Key, all_keys, schema
from .source import ENGINES, Known

__all__ = [
    "ENGINES",
    "Cluster",
    "ConfigError",
    "Finding",
    "Health",
    "InstanceSettings",
    "Key",
    "Known",
    "Limits",
    "LoadBalance",
    "Logging",
    "OptionError",
    "PolicyByRole",
    "Problem",
    "Retry",
    "Scheduling",
    "Server",
    "Settings",
    "Timeouts",
    "ValidateOptions",
    "all_keys",
    "instance_from_mapping",
    "load",
    "notes",
    "parse",
    "restart_keys",
    "schema",
    "to_instances",
]
