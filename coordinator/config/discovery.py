"""The section `discovery`: sources of instances that are looked at while the coordinator runs."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from coordinator.core.instance import Role

from .errors import Refusal, shown
from .fields import Count, EngineName, Group, Host, Period, Text
from .section import Section, empty_mapping
from .security import File
from .source import Known

DNS_PORT = 53
_PORT = Annotated[int, Field(ge=1, le=65535)]
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def _pattern(text: str, info: ValidationInfo) -> str:
    """The same as an absolute path; relative ones begin at the folder of the configuration."""
    start: Path | None = (info.context or Known()).folder
    if "\0" in text:
        raise Refusal(f"must be a path or pattern, not {shown(text)}")
    return text if start is None else str((start / text).absolute())


def _label(text: str) -> str:
    if _LABEL.fullmatch(text):
        return text
    raise Refusal(f"must be the key of a label or annotation, like pd-coordinator.io/role; not {shown(text)}")


def split_nameserver(text: str) -> tuple[str, int]:
    """Address and port of a name server; the port is 53 where none stands there. Raises Refusal."""
    host, port = text, str(DNS_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        address = str(ipaddress.ip_address(host))
        number = int(port)
    except ValueError:
        number, address = 0, ""
    if not 1 <= number <= 65535:
        raise Refusal(f"must be an IP address, or one with a port like 10.0.0.2:53 or [fd00::2]:53; not {shown(text)}")
    return address, number


def _nameserver(text: str) -> str:
    split_nameserver(text)
    return text


Pattern = Annotated[Text, AfterValidator(_pattern)]
Label = Annotated[str, AfterValidator(_label)]
Nameserver = Annotated[str, AfterValidator(_nameserver)]
RoleName = Annotated[Role, Field(strict=False)]


class Traits(Section):
    """What all instances of a source have in common."""

    engine: EngineName | None = Field(None, description="engine protocol they speak; null: cluster.engine")
    model: Text | None = Field(None, description="served model name; null: cluster.model")
    group: Group | None = Field(None, description="prefill and decode pair only within a group (text or number)")
    max_requests: Count | None = Field(None, description="requests each may have at once; null: no cap")
    scheme: Literal["http", "https"] = Field("http", description="how they are called: http or https")
    options: Annotated[dict[str, Any], BeforeValidator(empty_mapping)] = Field(
        {}, description="further keys of each, as in cluster.instances"
    )

    def traits(self) -> dict[str, object]:
        """The keys of an instance that are set here."""
        set_here = {name: getattr(self, name) for name in ("engine", "model", "group", "max_requests")}
        return {**self.options, **{name: value for name, value in set_here.items() if value is not None}}


class DnsSource(Traits):
    """A name whose records are instances."""

    name: Host = Field(description="the name; with a final dot, or with nameservers, no search domain is tried")
    type: Literal["A", "AAAA", "SRV"] = Field("A", description="records to look for: A, AAAA or SRV, which have ports")
    role: RoleName = Field(description="what the instances do: prefill, decode or hybrid")
    port: _PORT | None = Field(None, description="port of the instances; for A and AAAA, where it is required")
    nameservers: Annotated[tuple[Nameserver, ...], Field(strict=False)] = Field(
        (), description="IP addresses of name servers, also with a port; none: those of the machine"
    )
    timeout_s: Period = Field(5, description="seconds a look-up may take, with all its tries")
    min_interval_s: Period = Field(1, description="least seconds between two look-ups, however short the TTL")
    max_interval_s: Period = Field(60, description="most seconds between two look-ups, however long the TTL")

    @model_validator(mode="before")
    @classmethod
    def _empty_list_is_default(cls, value: Any) -> Any:
        return _without_empty(value, "nameservers")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.port is None) is (self.type != "SRV"):
            raise Refusal("SRV records have ports: leave port out" if self.type == "SRV" else "port is missing")
        if self.min_interval_s > self.max_interval_s:
            raise Refusal("min_interval_s is above max_interval_s")
        return self


class KubernetesSource(Traits):
    """Pods, or endpoints of Services, that are instances."""

    kind: Literal["pods", "endpointslices"] = Field("pods", description="what is watched: pods or endpointslices")
    namespace: Text | None = Field(None, description="their namespace; null: the coordinator's own")
    label_selector: Annotated[str, Field(max_length=4096)] = Field(
        "", description="labels that they must have, like app=vllm,tier in (a,b); empty: any"
    )
    role: RoleName | None = Field(None, description="what those do that have no role_label")
    port: _PORT | Text | None = Field(None, description="port of those that have no port_label: number or name")
    namespaced_ids: bool = Field(
        default=False, description="true: ids are POD.NAMESPACE, for pods of one name in several namespaces"
    )
    kubeconfig: File | None = Field(None, description="how to reach the API server; null: as pods do")
    context: Text | None = Field(None, description="context of the kubeconfig; null: its current one")
    role_label: Label | None = Field("pd-coordinator.io/role", description="label or annotation with the role")
    engine_label: Label | None = Field(
        "pd-coordinator.io/engine", description="label or annotation with the engine protocol"
    )
    model_label: Label | None = Field(
        "pd-coordinator.io/model", description="label or annotation with the served model name"
    )
    group_label: Label | None = Field("pd-coordinator.io/group", description="label or annotation with the group")
    port_label: Label | None = Field(
        "pd-coordinator.io/port", description="label or annotation with the port: number or name"
    )
    options_label: Label | None = Field(
        "pd-coordinator.io/options", description="annotation with further keys of the engine, a JSON object"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.context is not None and self.kubeconfig is None:
            raise Refusal("context needs kubeconfig beside it")
        return self


class Discovery(Section):
    """Sources of instances, looked at all the time; an instance goes when its source no longer names it."""

    files: Annotated[tuple[Pattern, ...], Field(strict=False)] = Field(
        (), description="files, or patterns of files, with lists of instances"
    )
    dns: Annotated[tuple[DnsSource, ...], Field(strict=False)] = Field((), description="names whose records they are")
    kubernetes: Annotated[tuple[KubernetesSource, ...], Field(strict=False)] = Field(
        (), description="pods or endpoints that they are"
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_lists_are_defaults(cls, value: Any) -> Any:
        return _without_empty(value, "files", "dns", "kubernetes")

    @property
    def traits(self) -> tuple[Traits, ...]:
        """What instances have in common, of each source that says so."""
        return (*self.dns, *self.kubernetes)

    def __bool__(self) -> bool:
        return bool(self.files or self.dns or self.kubernetes)


def _without_empty(value: Any, *lists: str) -> Any:
    """A list whose items are all commented out is null in YAML."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None or key not in lists}
