"""xLLM-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.settings import read_settings

MENU: Menu = MappingProxyType(
    {
        "decode_full": ("flag", "D: answers AddNewRequests with 404, no room"),
        "decode_refuses": ("flag", "D: answers AddNewRequests with 500"),
        "reply_delay": ("number", "answers a call this many seconds late: later calls overtake it"),
        "first_lost": ("flag", "P: FirstGeneration is never sent, and nobody is told"),
        "first_refused": ("flag", "D: answers FirstGeneration with ok=false and forgets the request"),
        "overtaken": ("number", "P: its first token goes to the service this many seconds late (default 0.1)"),
        "partial_first": ("flag", "P and D: the answer begins with a character split over two tokens"),
        "wrong_kv": ("flag", "P: hands over the KV of something else: decode writes visibly wrong text"),
        "kv_lost": ("flag", "P: hands over no KV: decode writes visibly wrong text"),
        "generation_error": ("number", "gen_status with this code (default 2) once k tokens exist"),
        "empty_step": ("flag", "D: a message without outputs before that of token k"),
        "empty_gens": ("flag", "D: a Generations call without any generation before that of token k"),
        "unknown_id": ("flag", "D: a generation for an id that nobody knows, before that of token k"),
        "duplicate": ("flag", "P and D: the message of token k twice, in two calls"),
        "finish_twice": ("flag", "D: the last message twice, in two calls"),
        "late": ("number", "D: this many messages (default 1) after the last one"),
        "stall": ("number", "no more tokens once k exist, the request stays alive; value: goes on after s seconds"),
        "slow": ("number", "D: this many seconds for each token"),
        "answer_crash": ("number", "the instance dies once k tokens exist; value: back after s seconds"),
        "link_fails": ("number", "LinkInstance answers ok=false so many times (default: always)"),
        "link_hang": ("flag", "LinkInstance never answers"),
        "silence": ("flag", "no heartbeats; the lease lives on"),
        "lease_lost": ("flag", "the lease is not kept alive and the key not put again; heartbeats go on"),
        "wrong_incarnation": ("flag", "heartbeats carry another incarnation id"),
        "gzip_frames": ("flag", "calls to others carry gzip payloads"),
        "split_frames": ("flag", "calls to others go out byte by byte"),
        "joined_frames": ("number", "calls to others wait to go out so many (default 2) in one write, 20 ms at most"),
        "single_frames": ("flag", "D: one Generations call for each generation of a step, all at once"),
    }
)
TYPES = ("DEFAULT", "PREFILL", "DECODE", "MIX")
_BY_ROLE = MappingProxyType({"prefill": "PREFILL", "decode": "DECODE", "hybrid": "DEFAULT"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        type: MIX: both roles, registered as such; empty: by the role.
        pd_port: of DisaggPDService; 0 takes a free one.
        etcd: URL of etcd's JSON gateway; empty: no etcd.
        etcd_namespace: keys begin with `/<namespace>/`.
        etcd_username, etcd_password: both or neither.
        etcd_ttl_s: of the lease.
        service: `ip:port` of the service, where there is no etcd.
        master_poll_s: how often the master is looked for until there is one.
        heartbeat_s: between heartbeats.
        rpc_timeout_s: how long a call may take; the real engine waits for ever.
        kv_cache_transfer_mode: PUSH or PULL.
        dp_size, tp_size: topology.
        kv_split_size: as registered.
        requeue_s: pause before prefill asks a decode that refused again; the real engine makes none.
        max_concurrent: requests at a time; above, RESOURCE_EXHAUSTED.
        max_context_len: prompt and answer, in tokens.
        proto: `new`, or `old`: fields of the older published copy, no `linear_state_id`.
        cache_events: 1: heartbeats tell of blocks that the prefix cache took in and dropped.
        unlink_frees: 0: UnlinkInstance forgets waiting requests, but not their blocks.
        restart_s: after a failed check the process dies; it is back after so long, -1: never.
    """

    type: str = ""
    pd_port: int = 0
    etcd: str = ""
    etcd_namespace: str = ""
    etcd_username: str = ""
    etcd_password: str = ""
    etcd_ttl_s: int = 3
    service: str = ""
    master_poll_s: float = 2.0
    heartbeat_s: float = 0.5
    rpc_timeout_s: float = 60.0
    kv_cache_transfer_mode: str = "PUSH"
    dp_size: int = 1
    tp_size: int = 1
    kv_split_size: int = 1
    requeue_s: float = 0.005
    max_concurrent: int = 200
    max_context_len: int = 131_072
    proto: str = "new"
    cache_events: int = 0
    unlink_frees: int = 1
    restart_s: float = -1.0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("type", self.type, ("", *TYPES)),
            ("kv_cache_transfer_mode", self.kv_cache_transfer_mode, ("PUSH", "PULL")),
            ("proto", self.proto, ("new", "old")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, allowed))}, not {value!r}")
        if self.etcd and self.service:
            raise ValueError("etcd and service exclude each other")
        if bool(self.etcd_username) != bool(self.etcd_password):
            raise ValueError("etcd_username and etcd_password: both or neither")

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError."""
        return read_settings(cls(), given)

    def type_for(self, role: str) -> str:
        """The instance type of the protocol; raises ValueError for one that does not go with the role."""
        own = _BY_ROLE[role]
        if self.type not in ("", "MIX", own):
            raise ValueError(f"an instance with the role {role} is {own} or MIX, not {self.type}")
        return self.type or own
