"""cluster.yaml: what may stand there, what is wrong with it, and what comes out of it.

`load` gives frozen `Settings` or a `ConfigError` with every problem; `to_instances` gives the instances.
"""

from .address import parse_url
from .checks import notes, restart_keys
from .compare import MASK, Change, as_running, changes, shown_settings
from .discovery import Discovery, DnsSource, KubernetesSource, split_nameserver
from .errors import ConfigError, Finding, OptionError, Problem
from .instance_file import read_instances
from .instances import ValidateOptions, instance_from_mapping, to_instances
from .keyfile import read_keys
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
from .observing import tracing_headers
from .reference import Key, all_keys, schema
from .secret import read_secret
from .security import ApiKey, Auth, EngineTls, ManagementKey, ServerTls, Tls
from .source import ENGINES, Known

__all__ = [
    "ENGINES",
    "MASK",
    "ApiKey",
    "Auth",
    "Change",
    "Cluster",
    "ConfigError",
    "Discovery",
    "DnsSource",
    "EngineTls",
    "Finding",
    "Health",
    "InstanceSettings",
    "Key",
    "Known",
    "KubernetesSource",
    "Limits",
    "LoadBalance",
    "Logging",
    "ManagementKey",
    "OptionError",
    "PolicyByRole",
    "Problem",
    "Retry",
    "Scheduling",
    "Server",
    "ServerTls",
    "Settings",
    "Timeouts",
    "Tls",
    "ValidateOptions",
    "all_keys",
    "as_running",
    "changes",
    "instance_from_mapping",
    "load",
    "notes",
    "parse",
    "parse_url",
    "read_instances",
    "read_keys",
    "read_secret",
    "restart_keys",
    "schema",
    "shown_settings",
    "split_nameserver",
    "to_instances",
    "tracing_headers",
]
