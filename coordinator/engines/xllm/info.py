"""What an xLLM instance tells about itself when it registers, or the file does (xLLM protocol page §4, §5.1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from coordinator.config.errors import OptionError
from coordinator.core.instance import Address, Instance, Role

MOST_NUMBERS = 4096  # cluster ids, addresses, ports, points of a profile
MAX_U64 = 2**64 - 1
MAX_PORT = 65535


class Type(Enum):
    """What an instance registers as. MIX does prefill or decode, as the coordinator says; DEFAULT does both alone."""

    DEFAULT = 0
    PREFILL = 1
    DECODE = 2
    MIX = 3


ROLES = {Type.DEFAULT: Role.HYBRID, Type.PREFILL: Role.PREFILL, Type.DECODE: Role.DECODE}
TYPES = {role: kind for kind, role in ROLES.items()}


@dataclass(frozen=True, slots=True)
class Info:
    """One instance.

    Attributes:
        name: `host:port` of its API, under which it is known and called.
        rpc_address: `host:port` of its DisaggPDService; empty for one that is never linked.
        cluster_ids, addrs, ports, dp_size, kv_split_size: what its peers need to reach its KV; opaque here.
        incarnation: differs from one start of the instance to the next; empty: not known.
    """

    name: str
    rpc_address: str
    kind: Type
    cluster_ids: tuple[int, ...] = ()
    addrs: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    dp_size: int = 1
    kv_split_size: int = 0
    incarnation: str = ""
    registered_ms: int = 0

    @property
    def rpc(self) -> Address:
        """Where its DisaggPDService listens."""
        return address_of(self.rpc_address)

    def as_peer(self) -> bytes:
        """InstanceClusterInfo as JSON, for LinkInstance and UnlinkInstance."""
        return msgspec.json.encode(
            {
                "instance_name": self.name,
                "cluster_ids": self.cluster_ids,
                "addrs": self.addrs,
                "ports": self.ports,
                "dp_size": self.dp_size,
                "kv_split_size": self.kv_split_size,
            }
        )


def address_of(text: str) -> Address:
    """`host:port`, an IPv6 host in brackets; raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f"must be host:port, not {text[:80]!r}")
    return Address(host, int(port))


# --- registrations


class _Registration(msgspec.Struct):
    name: str
    rpc_address: str
    type: int
    cluster_ids: list[int] = []
    addrs: list[str] = []
    ports: list[int] = []
    dp_size: int = 1
    kv_split_size: int = 0
    incarnation_id: str = ""
    register_ts_ms: int = 0
    ttft_profiling_data: list[list[float]] = []
    tpot_profiling_data: list[list[float]] = []


_REGISTRATION = msgspec.json.Decoder(_Registration)


def read_registration(value: bytes) -> tuple[Type, dict[str, object]]:
    """The JSON that an instance has written to etcd: its type, and the keys of an instance without role and engine.

    Everything but name, rpc_address and type may be missing, so that old and new engines are understood (§5.1).

    Raises:
        ValueError: it cannot be used, in a sentence.
    """
    try:
        told = _REGISTRATION.decode(value)
        kind = Type(told.type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its registration cannot be read: {error}") from None
    except ValueError:
        raise ValueError("its registration has an unknown type") from None
    address_of(told.name)
    keys: dict[str, object] = {"id": told.name, "url": f"http://{told.name}", "rpc_address": told.rpc_address}
    keys |= {"cluster_ids": told.cluster_ids, "addrs": told.addrs, "ports": told.ports, "dp_size": told.dp_size}
    keys |= {"kv_split_size": told.kv_split_size, "incarnation_id": told.incarnation_id}
    if told.ttft_profiling_data:
        keys["ttft_profiling_data"] = told.ttft_profiling_data
    if told.tpot_profiling_data:
        keys["tpot_profiling_data"] = told.tpot_profiling_data
    if kind is Type.MIX:
        keys["mix"] = True
    options({key: given for key, given in keys.items() if key not in ("id", "url")})
    return kind, keys


# --- options of instances

OPTIONS = (
    "rpc_address", "cluster_ids", "addrs", "ports", "dp_size", "kv_split_size", "incarnation_id", "mix",
    "ttft_profiling_data", "tpot_profiling_data",
)  # fmt: skip


def options(given: Mapping[str, object]) -> Mapping[str, object]:
    """Validate the keys of an xLLM instance; raises OptionError. Lists become tuples."""
    checked: dict[str, object] = {}
    for key, value in given.items():
        if key not in OPTIONS:
            raise OptionError(key, "unknown key", OPTIONS)
        try:
            checked[key] = _CHECKS[key](value)
        except ValueError as error:
            raise OptionError(key, str(error), OPTIONS) from None
    ids, dp_size = checked.get("cluster_ids", ()), checked.get("dp_size", 1)
    assert isinstance(ids, tuple)
    assert isinstance(dp_size, int)
    if len(ids) % dp_size:
        raise OptionError("cluster_ids", f"must be divisible among dp_size {dp_size}, not {len(ids)} ids", OPTIONS)
    return checked


def info_of(instance: Instance) -> Info:
    """An instance of the cluster as its peers must know it."""
    given: Mapping[str, Any] = instance.options
    return Info(
        name=instance.address.netloc,
        rpc_address=given.get("rpc_address", ""),
        kind=Type.MIX if given.get("mix") else TYPES[instance.role],
        cluster_ids=tuple(given.get("cluster_ids", ())),
        addrs=tuple(given.get("addrs", ())),
        ports=tuple(given.get("ports", ())),
        dp_size=given.get("dp_size", 1),
        kv_split_size=given.get("kv_split_size", 0),
        incarnation=given.get("incarnation_id", ""),
    )


def lack_of_links(told: Info) -> str | None:
    """What an instance lacks to make the links that it has to make, in a sentence."""
    if told.kind in (Type.DECODE, Type.MIX) and not told.rpc_address:
        return "it needs rpc_address, host:port of its DisaggPDService, to make its links"
    return None


def flaws(
    settings: Mapping[str, object],  # noqa: ARG001
    instances: Sequence[Instance],
    default: object,  # noqa: ARG001
) -> Iterator[tuple[Instance, str]]:
    """What instances of the file lack to find each other's KV; see engines.table.HasChecks."""
    rpc_addresses: dict[str, Instance] = {}
    for instance in instances:
        told = info_of(instance)
        lack = lack_of_links(told)
        if lack is not None:
            yield instance, lack
        elif told.kind is not Type.DEFAULT and not told.cluster_ids:
            yield instance, "it needs cluster_ids: without, no peer can reach its KV"
        if told.rpc_address:
            first = rpc_addresses.setdefault(told.rpc_address, instance)
            if first.address != instance.address:
                yield instance, f"it has the rpc_address of {first.id}"


def _whole(value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"must be a whole number from {least} to {most}")
    return value


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple) or len(value) > MOST_NUMBERS:
        raise ValueError(f"must be a list of at most {MOST_NUMBERS} items")
    return value


def _address(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be host:port")  # noqa: TRY004  # a wrong value of the file
    address_of(value)
    return value


def _words(value: object) -> tuple[str, ...]:
    items = _items(value)
    if not all(isinstance(item, str) for item in items):
        raise ValueError("must be a list of texts")
    return tuple(map(str, items))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004
    return value


def _points(size: int) -> Callable[[object], tuple[tuple[float, ...], ...]]:
    def check(value: object) -> tuple[tuple[float, ...], ...]:
        points = [tuple(_items(point)) for point in _items(value)]
        for point in points:
            if len(point) != size or not all(isinstance(n, int | float) and n >= 0 for n in point):
                raise ValueError(f"must be a list of points of {size} numbers of at least 0")
        return tuple(tuple(float(str(n)) for n in point) for point in points)

    return check


_CHECKS: Mapping[str, Callable[[object], object]] = {
    "rpc_address": _address,
    "cluster_ids": lambda value: tuple(_whole(item, 0, MAX_U64) for item in _items(value)),
    "addrs": _words,
    "ports": lambda value: tuple(_whole(item, 0, MAX_PORT) for item in _items(value)),
    "dp_size": lambda value: _whole(value, 1, MOST_NUMBERS),
    "kv_split_size": lambda value: _whole(value, 0, MOST_NUMBERS),
    "incarnation_id": _text,
    "mix": _flag,
    "ttft_profiling_data": _points(2),
    "tpot_profiling_data": _points(3),
}
