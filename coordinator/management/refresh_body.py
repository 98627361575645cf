"""The body of the controller's `POST /v1/instances/refresh`, read and checked. Pure; MindIE protocol page §9.1."""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

PREFILL, DECODE, FLEX, UNDEFINED = 80, 68, 70, 85  # ASCII letters P, D, F, U
LABELS = (2, 3, 4)  # prefill static, decode static, flex static; the others belong to undefined roles
MAX_INSTANCES = 4096
PORTS = range(1024, 65536)

T = TypeVar("T")
Id = Annotated[int, Meta(ge=0)]
MAX_ID = 2**64 - 1


class BadRefresh(ValueError):
    """The body as a whole cannot be used; nothing of it is."""


class StaticInfo(Struct, frozen=True, kw_only=True):
    """What does not change about an instance; every key is mandatory."""

    group_id: int
    role: int
    p_percentage: int
    max_seq_len: Annotated[int, Meta(ge=1)]
    max_output_len: Annotated[int, Meta(ge=1)]
    total_slots_num: Annotated[int, Meta(ge=1, le=5000)]
    total_block_num: Annotated[int, Meta(ge=1)]
    block_size: Annotated[int, Meta(ge=1, le=128)]
    label: int
    virtual_id: int


class DynamicInfo(Struct, frozen=True, kw_only=True):
    """The engine's own numbers of late, as far as they are used here."""

    avail_slots_num: int | None = None
    avail_block_num: int | None = None
    peers: tuple[Id, ...] | None = None


class Entry(Struct, frozen=True, kw_only=True):
    """One instance as the controller describes it."""

    id: Id
    ip: str
    port: str | int
    metric_port: str | int
    static_info: StaticInfo
    dynamic_info: DynamicInfo
    inter_comm_port: str | int = ""
    model_name: str = ""


class _Body(Struct):
    ids: list[Id]
    instances: list[Raw]


class _Identity(Struct):
    id: Id


class Picture(Struct, frozen=True):
    """What a refresh says.

    Attributes:
        ids: who is there; everybody else is gone.
        entries: those of them that are described and well formed.
        skipped: why an entry was left out, by id.
        empty: whether the list of descriptions was empty.
    """

    ids: frozenset[int]
    entries: tuple[Entry, ...]
    skipped: Mapping[int, str]
    empty: bool


def parse_refresh(body: bytes) -> Picture:
    """Read a refresh.

    Descriptions of ids that are not in `ids` are ignored, and single bad ones are left out: one broken instance must
    not keep the others from being updated.

    Raises:
        BadRefresh: no JSON, a key that must be there is missing, or too many ids or instances.
    """
    outer = _decode(body, _Body)
    for name, count in (("ids", len(outer.ids)), ("instances", len(outer.instances))):
        if count > MAX_INSTANCES:
            raise BadRefresh(f"{name} holds {count} members, at most {MAX_INSTANCES} are allowed")
    ids = frozenset(outer.ids)
    if any(ident > MAX_ID for ident in ids):
        raise BadRefresh("ids must be 64-bit numbers")
    entries: dict[int, Entry] = {}
    skipped: dict[int, str] = {}
    for raw in outer.instances:
        ident = _decode(raw, _Identity).id
        if ident not in ids:
            continue
        try:
            entry = msgspec.json.decode(raw, type=Entry)
            check(entry)
        except (ValueError, RecursionError) as error:
            skipped[ident] = str(error)
        else:
            entries[ident] = entry
    return Picture(ids, tuple(entries.values()), skipped, not outer.instances)


def _decode(body: bytes | Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadRefresh(f"the body cannot be used: {error}") from None
    except RecursionError:
        raise BadRefresh("the body is nested too deeply") from None


def check(entry: Entry) -> None:
    """The rules that types cannot express; raises ValueError with the first one that is broken."""
    static = entry.static_info
    try:
        ipaddress.ip_address(entry.ip)
    except ValueError:
        raise ValueError(f"ip {entry.ip[:64]!r} is no IPv4 or IPv6 address") from None
    port_of("port", entry.port)
    port_of("metric_port", entry.metric_port)
    if entry.inter_comm_port != "":
        port_of("inter_comm_port", entry.inter_comm_port)
    if static.max_output_len > static.max_seq_len:
        raise ValueError("max_output_len is above max_seq_len")
    if static.role not in (PREFILL, DECODE, FLEX, UNDEFINED):
        raise ValueError(f"role {static.role} is none of 80 (P), 68 (D), 70 (F), 85 (U)")
    if static.role != UNDEFINED and static.label not in LABELS:
        raise ValueError(f"label {static.label} does not fit a prefill or decode instance (2, 3 or 4 do)")


def port_of(key: str, text: str | int) -> int:
    """A port as a number; raises ValueError."""
    digits = str(text)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and int(digits) in PORTS):
        raise ValueError(f"{key} {digits[:16]!r} is no port between 1024 and 65535")
    return int(digits)
