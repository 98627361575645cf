"""What makes instances of objects: pods, and endpoints in slices."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from coordinator.config import KubernetesSource

from .facts import keys_of
from .objects import Endpoint, Meta, Pod, Slice, read


class Entry(NamedTuple):
    """Something that may be an instance.

    Attributes:
        name: for messages.
        keys: of the instance; empty where there is a fault.
        fault: why it cannot be one.
    """

    name: str
    keys: dict[str, object]
    fault: str = ""


class Kind(Protocol):
    """A kind of objects."""

    def path(self, namespace: str) -> str:
        """Where their collection is."""
        ...

    def entries(self, data: Any) -> tuple[Meta, list[Entry]]:
        """What an undecoded object comes to; raises Unreachable where it is none of this kind."""
        ...


class Pods:
    """Pods that run, are ready and do not end."""

    def __init__(self, given: KubernetesSource) -> None:
        self._given = given

    def path(self, namespace: str) -> str:
        """See Kind."""
        return f"/api/v1/namespaces/{namespace}/pods"

    def entries(self, data: Any) -> tuple[Meta, list[Entry]]:
        """See Kind."""
        pod = read(data, Pod)
        host = pod.status.ip
        if not host or not _is_ready(pod):
            return pod.metadata, []
        meta = pod.metadata
        named = {port.name: port.container_port for one in pod.spec.containers or () for port in one.ports or ()}
        try:
            keys = keys_of(meta, host, named.get, self._given)
        except ValueError as error:
            return meta, [Entry(meta.name, {}, str(error))]
        return meta, [Entry(meta.name, {**keys, "id": ident(meta.name, meta.namespace, self._given)})]


class Slices:
    """Endpoints that are ready and do not end."""

    def __init__(self, given: KubernetesSource) -> None:
        self._given = given

    def path(self, namespace: str) -> str:
        """See Kind."""
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def entries(self, data: Any) -> tuple[Meta, list[Entry]]:
        """See Kind. The endpoints of a Service of type ExternalName have names instead of addresses, which is fine."""
        found = read(data, Slice)
        return found.metadata, list(self._endpoints(found))

    def _endpoints(self, found: Slice) -> Iterator[Entry]:
        named = {port.name or "": port.port for port in found.ports or ()}
        for endpoint in found.endpoints or ():
            if not endpoint.addresses or not _is_usable(endpoint):
                continue
            host, target = endpoint.addresses[0], endpoint.target_ref
            name = target.name if target is not None and target.kind == "Pod" else ""
            try:
                keys = keys_of(found.metadata, host, named.get, self._given)
            except ValueError as error:
                yield Entry(name or host, {}, str(error))
                continue
            if name:
                keys["id"] = ident(name, found.metadata.namespace, self._given)
            yield Entry(name or host, keys)


def ident(name: str, namespace: str, given: KubernetesSource) -> str:
    """The id of the instance in a pod."""
    return f"{name}.{namespace}"[:128] if given.namespaced_ids else name[:128]


def _is_ready(pod: Pod) -> bool:
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    return ready and pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None


def _is_usable(endpoint: Endpoint) -> bool:
    conditions = endpoint.conditions
    return conditions is None or (conditions.ready is not False and not conditions.terminating)
