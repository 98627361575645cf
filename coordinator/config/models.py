"""The sections of cluster.yaml as frozen models: names, defaults, units and ranges of every key.

The description of a field is what the JSON Schema, docs/configuration.md and configs/full.yaml say about it.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from coordinator.core.instance import Role

from .discovery import Discovery
from .fields import (
    Count,
    EngineName,
    Factor,
    Group,
    Host,
    Identifier,
    ListenPort,
    LoggerName,
    Network,
    Period,
    PolicyName,
    Seconds,
    Size,
    Text,
    TokenizerFolder,
    Url,
    UrlPath,
)
from .observing import Metrics, Tracing
from .section import Section, empty_mapping
from .security import Auth, File, Tls, Variable
from .source import Source


class Server(Section):
    """Where the coordinator listens, and with how many processes."""

    host: Host = Field("127.0.0.1", description="address of the data plane; 0.0.0.0 or '::' for all interfaces")
    port: ListenPort = Field(1025, description="data plane: inference requests; 0: any free port")
    management_host: Host = Field("127.0.0.1", description="address of the management plane")
    management_port: ListenPort = Field(1026, description="instances API, probes, metrics, web page; 0: any free port")
    management_names: Annotated[tuple[Host, ...], Field(strict=False)] = Field(
        (), description="names, beyond localhost, at which web pages may change things without a key"
    )
    metrics_port: ListenPort | None = Field(None, description="set: /metrics moves to this port (MindIE layout: 1028)")
    status_port: ListenPort | None = Field(
        None, description="set: probes are served on this port too (MindIE layout: 1029)"
    )
    workers: Annotated[int, Field(ge=1, le=256)] = Field(1, description="processes that share the data port")
    route_headers: bool = Field(
        default=False, description="true: answers carry x-pd-prefill, x-pd-decode, x-pd-attempts"
    )
    trusted_proxies: Annotated[tuple[Network, ...], Field(strict=False)] = Field(
        (), description="networks (CIDR) of proxies that are believed who the client is"
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_list_is_default(cls, value: Any) -> Any:
        """A list whose items are all commented out is null in YAML."""
        if not isinstance(value, dict):
            return value
        lists = ("trusted_proxies", "management_names")
        return {key: item for key, item in value.items() if item is not None or key not in lists}


class InstanceSettings(BaseModel):
    """One engine instance. Keys that are not listed here belong to its engine, which checks them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    role: Annotated[Role, Field(strict=False)] = Field(
        description="what it does: prefill, decode or hybrid (both, alone)"
    )
    url: Url = Field(description="where it listens: http[s]://host[:port], IPv6 in brackets")
    id: Identifier | None = Field(None, description="unique name; null: <role>-<host>:<port>")
    engine: EngineName | None = Field(None, description="engine protocol it speaks; null: cluster.engine")
    model: Text | None = Field(None, description="served model name; null: cluster.model")
    tokenizer: TokenizerFolder | None = Field(None, description="its model's tokenizer folder; null: cluster.tokenizer")
    max_requests: Count | None = Field(None, description="requests it may have at once; null: no cap")
    group: Group | None = Field(None, description="prefill and decode pair only within a group (text or number)")
    ca_file: File | None = Field(None, description="https: PEM file with its authorities; null: tls.engines.ca_file")
    cert_file: File | None = Field(None, description="https: PEM file with our certificate; null: that of tls.engines")
    key_file: File | None = Field(None, description="https: PEM file with its private key; null: that of tls.engines")
    server_name: Host | None = Field(None, description="https: name in its certificate; null: tls.engines.server_name")
    engine_key_env: Variable | None = Field(None, description="variable with the key it wants; null: that of auth")
    engine_key_file: File | None = Field(None, description="file with the key it wants; null: that of auth")

    @property
    def options(self) -> Mapping[str, Any]:
        """The engine-specific keys, as given."""
        return self.model_extra or {}


class Cluster(Section):
    """The engine instances and what they have in common."""

    engine: EngineName = Field("mindie", description="engine protocol of instances that name none; or module:Class")
    model: Text | None = Field(None, description="served model name; null: any name is passed to the engines")
    model_aliases: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        (), description="further names that mean this model"
    )
    tokenizer: TokenizerFolder | None = Field(
        None, description="folder with tokenizer.json, for engines that take token ids; null: none"
    )
    instances: Annotated[tuple[InstanceSettings, ...], Field(strict=False)] = Field(
        (), description="the instances; more can be added on the management plane"
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_list_is_default(cls, value: Any) -> Any:
        """A list whose items are all commented out is null in YAML."""
        if not isinstance(value, dict):
            return value
        lists = ("instances", "model_aliases")
        return {key: item for key, item in value.items() if item is not None or key not in lists}


class PolicyByRole(Section):
    """One policy for each role."""

    prefill: PolicyName = Field(description="how prefill instances are chosen")
    decode: PolicyName = Field(description="how decode instances are chosen")


class LoadBalance(Section):
    """Settings of the policy load_balance (MindIE protocol page §10.2; its names: docs/configuration.md)."""

    bytes_to_tokens: Annotated[float, Field(gt=0, le=1000)] = Field(
        0.22, description="tokens per byte of prompt, where tokens are not known"
    )
    count_blocks: bool = Field(default=True, description="true: a request weighs its KV blocks; false: each weighs 1")
    respect_capacity: bool = Field(
        default=True, description="true: skip instances above block_limit_rate of their total"
    )
    block_limit_rate: Annotated[float, Field(ge=0, le=2000)] = Field(
        1.1, description="share of an instance's slots and blocks that may be given away"
    )
    order: Literal["fcfs", "shortest", "longest"] = Field(
        "fcfs", description="order of waiting requests: fcfs, shortest or longest prompt first"
    )
    sequence_cost: Factor = Field(0, description="weight of the estimated time of decode's sequences")
    output_tokens: Annotated[int, Field(ge=0, le=10**9)] = Field(
        1024, description="tokens added to each sequence in that estimate"
    )
    batch_size: Annotated[int, Field(ge=1, le=10**6)] = Field(24, description="sequences that run side by side there")
    small_batch: Annotated[int, Field(ge=0, le=10**6)] = Field(
        6, description="a last group of at most this many sequences counts half"
    )
    busiest_cost: Factor = Field(0, description="weight of the highest slot count among the decode instances")
    reported_cost: Factor = Field(1, description="weight of the KV blocks that the engine reports in use")
    request_cost: Factor = Field(0, description="weight of the requests placed on the decode instance")
    block_cost: Factor = Field(1, description="weight of the KV blocks placed on the decode instance")


def _kind_of_policy(value: Any) -> str:
    return "(roles)" if isinstance(value, (dict, PolicyByRole)) else "(name)"


class Scheduling(Section):
    """Who gets a request."""

    policy: Annotated[
        Annotated[PolicyName, Tag("(name)")] | Annotated[PolicyByRole, Tag("(roles)")], Discriminator(_kind_of_policy)
    ] = Field("load_balance", description="policy name, or {prefill: NAME, decode: NAME}, or module:Class")
    fallback: Literal["hybrid", "none"] = Field(
        "hybrid", description="without a usable pair: hybrid instances serve, or none: the request waits"
    )
    load_balance: LoadBalance = Field(LoadBalance(), description="settings of the policy load_balance")
    policy_options: Annotated[
        Mapping[PolicyName, Annotated[dict[str, Any], BeforeValidator(empty_mapping)]], BeforeValidator(empty_mapping)
    ] = Field({}, description="options of other policies, by policy name or module:Class")

    @property
    def policies(self) -> tuple[str, str]:
        """The names of the policies for prefill and for decode."""
        if isinstance(self.policy, str):
            return self.policy, self.policy
        return self.policy.prefill, self.policy.decode


class Limits(Section):
    """What one process takes on at most."""

    max_requests: Count = Field(10000, description="live requests; above: 429 with Retry-After")
    max_queue: Annotated[int, Field(ge=0, le=10**6)] = Field(
        1000, description="requests waiting for an instance; above: 429; 0: none waits"
    )
    max_body_bytes: Size = Field(33554432, description="bytes of a request body, expanded; above: 413")
    max_header_bytes: Annotated[int, Field(ge=256, le=2**24)] = Field(
        32768, description="bytes of request line and headers; above: 431"
    )
    stream_buffer_bytes: Size = Field(4194304, description="bytes that may pile up for a slow client; above: cut off")

    @property
    def wanted_files(self) -> int:
        """Open files that `max_requests` can need: per request one socket to the client and one to each engine."""
        return 3 * self.max_requests + 256


class Timeouts(Section):
    """Deadlines in seconds; 0 turns one off."""

    connect_s: Seconds = Field(5, description="seconds to connect to an engine; 0: off")
    schedule_s: Seconds = Field(60, description="seconds a request may wait for an instance; 0: off")
    first_token_s: Seconds = Field(600, description="seconds from arrival to the first token; 0: off")
    inter_token_s: Seconds = Field(120, description="seconds of silence between two tokens; 0: off")
    request_s: Seconds = Field(3600, description="seconds from arrival to the end; 0: off")
    drain_s: Seconds = Field(30, description="seconds that live requests get at shutdown; 0: no limit")

    @property
    def effective(self) -> Self:
        """The same with infinity where a deadline is off."""
        return self.model_copy(update={name: value or math.inf for name, value in self})


class Retry(Section):
    """How often one request is tried."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="placements of a request, the first included, while nothing was sent"
    )
    max_recomputes: Annotated[int, Field(ge=0, le=10000)] = Field(
        16, description="how often decode may hand one request back; 0: never"
    )


class Health(Section):
    """Health checks of the instances."""

    interval_s: Period = Field(5, description="seconds between two checks of an instance")
    timeout_s: Period = Field(3, description="seconds a check may take")
    fail_after: Count = Field(3, description="failures in a row that take an instance down")
    recover_after: Count = Field(2, description="successes in a row that bring it back")
    path: UrlPath | None = Field(None, description="path of the check; null: the engine's own")


Level = Literal["debug", "info", "warning", "error"]


class Logging(Section):
    """The log on stderr."""

    level: Level = Field("info", description="least level that is written: debug, info, warning or error")
    levels: Annotated[Mapping[LoggerName, Level], BeforeValidator(empty_mapping)] = Field(
        {}, description="the same for parts, by logger: pd_coordinator.engines: debug"
    )
    format: Literal["text", "json"] = Field("text", description="text for people, json for collectors")


class Settings(Section):
    """cluster.yaml, the configuration of pd-coordinator."""

    server: Server = Field(Server(), description="where the coordinator listens")
    cluster: Cluster = Field(Cluster(), description="the engine instances")
    discovery: Discovery = Field(Discovery(), description="where further instances come from while it runs")
    scheduling: Scheduling = Field(Scheduling(), description="who gets a request")
    limits: Limits = Field(Limits(), description="what is taken on at most")
    timeouts: Timeouts = Field(Timeouts(), description="deadlines in seconds; 0: off")
    retry: Retry = Field(Retry(), description="how often one request is tried")
    health: Health = Field(Health(), description="health checks of the instances")
    auth: Auth = Field(Auth(), description="who may call")
    tls: Tls = Field(Tls(), description="what is encrypted")
    logging: Logging = Field(Logging(), description="the log")
    metrics: Metrics = Field(Metrics(), description="what is counted beside the coordinator's own metrics")
    tracing: Tracing = Field(Tracing(), description="traces of requests")
    engines: Annotated[
        Mapping[EngineName, Annotated[dict[str, Any], BeforeValidator(empty_mapping)]], BeforeValidator(empty_mapping)
    ] = Field({}, description="settings of engine protocols, by engine name; each engine's page lists its keys")

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """The file that this was read from, for messages about it."""
        return self._source

    def with_source(self, source: Source) -> Self:
        """The same settings, read from `source`."""
        copied = self.model_copy()
        copied._source = source  # noqa: SLF001 - its own class
        return copied
