"""From the controller's descriptions to instances. Pure; MindIE protocol page §9.1."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from coordinator.core.instance import Capacity, Instance

from .instances import MakeInstance
from .refresh_body import DECODE, PREFILL, UNDEFINED, Entry, port_of

ROLES = {PREFILL: "prefill", DECODE: "decode", UNDEFINED: "hybrid"}
ENGINES = {PREFILL: "mindie", DECODE: "mindie", UNDEFINED: "hybrid"}

Scheme = Literal["http", "https"]
_Identity = tuple[object, ...]
_Peers = tuple[int, ...]


class Builder:
    """Builds the instances of one refresh after the other.

    A refresh comes every second and hardly differs from the one before, so what stays the same about an instance is
    validated once: the last refresh's results are kept.

    Args:
        make_instance: builds an instance from the keys of the configuration file.
        scheme: how engines are called; the controller does not say.
    """

    def __init__(self, make_instance: MakeInstance, scheme: Scheme) -> None:
        self._make = make_instance
        self._scheme = scheme
        self._bases: dict[_Identity, Instance] = {}
        self._peers: dict[_Peers, frozenset[str]] = {}

    def build(self, entries: Iterable[Entry]) -> tuple[dict[str, Instance], dict[int, str]]:
        """The instances by id, and for those that cannot be built the reason."""
        bases: dict[_Identity, Instance] = {}
        peers: dict[_Peers, frozenset[str]] = {}
        built: dict[str, Instance] = {}
        faults: dict[int, str] = {}
        for entry in entries:
            identity = _identity(entry)
            try:
                base = self._bases.get(identity) or self._make(self._keys(entry))
            except ValueError as error:
                faults[entry.id] = str(error)
                continue
            bases[identity] = base
            built[base.id] = replace(
                base,
                group=str(entry.static_info.group_id),
                peers=self._peers_of(entry, peers),
                capacity=_capacity(entry),
            )
        self._bases, self._peers = bases, peers
        return built, faults

    def _peers_of(self, entry: Entry, used: dict[_Peers, frozenset[str]]) -> frozenset[str] | None:
        """Whom it may be paired with. Only decode's list restricts (§10.2): prefill's must not add a pair to it."""
        ids = entry.dynamic_info.peers
        if ids is None or entry.static_info.role != DECODE:
            return None
        peers = used.get(ids) or self._peers.get(ids) or frozenset(map(str, ids))
        used[ids] = peers
        return peers

    def _keys(self, entry: Entry) -> dict[str, object]:
        role = entry.static_info.role
        host = f"[{entry.ip}]" if ":" in entry.ip else entry.ip
        keys: dict[str, object] = {
            "id": str(entry.id),
            "role": ROLES[role],
            "engine": ENGINES[role],
            "url": f"{self._scheme}://{host}:{port_of('port', entry.port)}",
        }
        if entry.model_name:
            keys["model"] = entry.model_name
        if entry.inter_comm_port != "" and role != UNDEFINED:
            keys["inter_comm_port"] = port_of("inter_comm_port", entry.inter_comm_port)
        return keys


def _identity(entry: Entry) -> _Identity:
    return (entry.id, entry.static_info.role, entry.ip, entry.port, entry.inter_comm_port, entry.model_name)


def _capacity(entry: Entry) -> Capacity:
    static, free = entry.static_info, entry.dynamic_info.avail_block_num
    return Capacity(
        max_requests=static.total_slots_num,
        total_blocks=static.total_block_num,
        reported_used_blocks=0 if free is None else max(0, static.total_block_num - free),
        block_tokens=static.block_size,
    )
