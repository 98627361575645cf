"""Who is there: identity and address of an instance, apart from its condition."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class Role(StrEnum):
    """What an instance does; hybrid does both alone."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"


class State(StrEnum):
    """Condition of an instance as the management plane shows it.

    joining: known, not yet seen healthy (or its standing stream is not open). ready: takes requests. suspect: failed
    lately, used only where no ready one is left. down: takes none. draining: finishes what it has, takes no more.
    """

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


class Address(NamedTuple):
    """Where an instance listens. `host` is bare: an IPv6 address stands without brackets.

    A tuple, because addresses are looked up several times per request and tuples have the fastest hash.
    """

    host: str
    port: int
    tls: bool = False

    @property
    def netloc(self) -> str:
        """`host:port` as the `Host` header wants it, brackets included."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an instance can hold at once, as far as anybody said; None: unknown, no cap."""

    max_requests: int | None = None
    total_blocks: int | None = None
    reported_used_blocks: int = 0
    block_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine instance.

    Attributes:
        id: unique among instances that are not draining; a bounded set, so fit for a metric label.
        engine: name of the engine protocol it speaks.
        model: served model name; None: any name is passed through.
        group: prefill and decode are paired only within one group; None pairs with None.
        peers: ids that this instance has a KV link to; None: not restricted.
        options: engine-specific keys, already validated by the engine.
    """

    id: str
    role: Role
    address: Address
    engine: str
    model: str | None = None
    group: str | None = None
    peers: frozenset[str] | None = None
    capacity: Capacity = Capacity()
    options: Mapping[str, object] = field(default_factory=lambda: NO_OPTIONS, hash=False)

    @property
    def key(self) -> tuple[str, Role, Address]:
        """What makes it the same instance over a refresh: its load and links live under this key."""
        return (self.id, self.role, self.address)

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"{'https' if self.address.tls else 'http'}://{self.address.netloc}"
