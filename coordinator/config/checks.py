"""What must hold between keys, and what is allowed but worth a note."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from coordinator.core.instance import Address, Role

from .address import parse_url
from .errors import Finding, KeyPath, line_of
from .instances import identifier
from .models import InstanceSettings, Server, Settings

_PORTS = ("port", "management_port", "metrics_port", "status_port")
_RESTART = ("host", "management_host", *_PORTS, "workers")


def check_ports(server: Server) -> Iterator[Finding]:
    """Two planes cannot share a port; 0 is any free port."""
    taken: dict[int, str] = {}
    for name in _PORTS:
        port = getattr(server, name)
        if not port:
            continue
        if port in taken:
            yield Finding(("server", name), f"port {port} is taken by server.{taken[port]}")
        taken.setdefault(port, name)


def check_instances(entries: Iterable[tuple[int, InstanceSettings]], lines: Mapping[KeyPath, int]) -> Iterator[Finding]:
    """Ids are unique; so is an address within one role."""
    ids: dict[str, KeyPath] = {}
    places: dict[tuple[Role, Address], KeyPath] = {}
    for position, entry in entries:
        path: KeyPath = ("cluster", "instances", position)
        place = (entry.role, parse_url(entry.url))
        if place in places:
            here, there = (*path, "url"), (*places[place], "url")
            yield Finding(here, f"the same {entry.role} instance is listed twice, {_both(here, there, lines)}")
            continue
        places[place] = path
        name = identifier(entry)
        if name in ids:
            here, there = (*path, "id"), (*ids[name], "id")
            yield Finding(here, f"the id '{name}' is used twice, {_both(here, there, lines)}")
        ids.setdefault(name, path)


def notes(settings: Settings) -> tuple[str, ...]:
    """What is allowed but may not be meant, one sentence each; for `check` and for the log at the start."""
    found: list[str] = []
    instances = settings.cluster.instances
    roles = {entry.role for entry in instances}
    finds_more = bool(settings.discovery) or any(given.get("etcd_endpoints") for given in settings.engines.values())
    if not instances and not finds_more:
        found.append("cluster.instances is empty: no request is served until the management plane adds instances")
    elif instances and Role.HYBRID not in roles and len(roles) == 1 and not settings.discovery:
        missing = Role.DECODE if Role.PREFILL in roles else Role.PREFILL
        found.append(f"cluster.instances has no {missing} instance: no request is served until one is added")
    elif roles == {Role.HYBRID} and not settings.discovery and settings.scheduling.fallback == "none":
        found.append("cluster.instances has only hybrid instances, but scheduling.fallback is none: none serves")
    if settings.cluster.model_aliases and settings.cluster.model is None:
        found.append("cluster.model_aliases has no effect while cluster.model is null")
    found.extend(_shared_addresses(instances))
    found.extend(_named_decode(settings))
    return tuple(found)


def restart_keys(old: Settings, new: Settings) -> tuple[str, ...]:
    """Keys that differ but take effect at the next start only: addresses, ports, number of processes."""
    return tuple(f"server.{name}" for name in _RESTART if getattr(old.server, name) != getattr(new.server, name))


def _shared_addresses(instances: Sequence[InstanceSettings]) -> Iterator[str]:
    roles: dict[str, Role] = {}
    for entry in instances:
        netloc = parse_url(entry.url).netloc
        if roles.setdefault(netloc, entry.role) is not entry.role:
            yield f"{netloc} is listed as {roles[netloc]} and as {entry.role}: an instance has one role"


def _named_decode(settings: Settings) -> Iterator[str]:
    """MindIE's prefill refuses every request whose decode instance is told by name (MindIE protocol page §4.4)."""
    for entry in settings.cluster.instances:
        host = parse_url(entry.url).host
        is_name = ":" not in host and not host.rpartition(".")[2].isdigit()
        if is_name and entry.role is Role.DECODE and (entry.engine or settings.cluster.engine) == "mindie":
            yield f"{entry.url} has a host name: MindIE serves no request whose decode instance is not an IP address"


def _both(here: KeyPath, there: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    return f"in line {line_of(there, lines)} and in line {line_of(here, lines)}"
