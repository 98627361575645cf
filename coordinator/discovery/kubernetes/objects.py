"""The parts that we read of Pods (core/v1), EndpointSlices (discovery.k8s.io/v1), lists and events."""

from typing import Any, TypeVar

import msgspec

from .errors import Unreachable

T = TypeVar("T")


class Meta(msgspec.Struct, rename="camel"):
    """What every object says about itself."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct):
    """One condition of a pod; `status` is True, False or Unknown, as text."""

    type: str = ""
    status: str = ""


class ContainerPort(msgspec.Struct, rename="camel"):
    """A port that a container names."""

    name: str | None = None
    container_port: int = 0


class Container(msgspec.Struct):
    """A container."""

    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct):
    """What a pod is to be."""

    containers: list[Container] | None = None


class PodStatus(msgspec.Struct, rename={"ip": "podIP"}):
    """What a pod is."""

    phase: str = ""
    ip: str | None = None
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """A pod."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class EndpointConditions(msgspec.Struct):
    """Conditions of an endpoint; None: not known, which counts as ready and not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct):
    """What an endpoint is."""

    kind: str = ""
    name: str = ""
    namespace: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """One endpoint. Only the first address counts, says the API."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    target_ref: Target | None = None


class EndpointPort(msgspec.Struct):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, rename="camel"):
    """Some endpoints of a Service; its labels and annotations are the Service's, with some of its own."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "go_on": "continue"}):
    """What a list says about itself; `go_on` stands for the next page, empty after the last."""

    resource_version: str = ""
    go_on: str = ""


class Page(msgspec.Struct):
    """One page of a list."""

    metadata: ListMeta = msgspec.field(default_factory=ListMeta)
    items: list[msgspec.Raw] | None = None


class Event(msgspec.Struct):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, and an object."""

    type: str
    object: msgspec.Raw


class Named(msgspec.Struct):
    """The metadata of any object."""

    metadata: Meta = msgspec.field(default_factory=Meta)


class Status(msgspec.Struct):
    """Why something was not done."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


def read(data: Any, kind: type[T]) -> T:
    """Decode JSON; raises Unreachable where it is something else than the API says."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreachable(f"the API server says what cannot be read: {error}") from None
