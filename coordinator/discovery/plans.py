"""From settings to the sources that are to run."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from coordinator.config import DnsSource, KubernetesSource, Settings, ValidateOptions, read_instances

from .discovery import Plan
from .files import FileSource
from .source import Make, Source

EXTRAS = {"dns": ("dns", "dns"), "kubernetes": ("k8s", "kubernetes_asyncio")}
"""For each section that needs one: the extra, and the module that it brings."""
EXAMPLE = "192.0.2.1:1"  # an address for documentation (RFC 5737): nobody is asked

Problem = tuple[tuple[str | int, ...], str]


def make_plans(settings: Settings, make: Make, validate: ValidateOptions) -> dict[str, Plan]:
    """The sources by name.

    Args:
        settings: of the whole coordinator; instances have keys in common.
        make: builds an instance from keys.
        validate: checks keys of an engine.
    """
    cluster = settings.cluster.model_copy(update={"instances": ()})
    plans: dict[str, Plan] = {}
    for name, given, build in _sources(settings, make, validate):
        at = 2
        free = name
        while free in plans:
            free, at = f"{name}#{at}", at + 1
        plans[free] = Plan((given, cluster), build)
    return plans


def _sources(
    settings: Settings, make: Make, validate: ValidateOptions
) -> Iterator[tuple[str, object, Callable[[], Source]]]:
    discovery = settings.discovery
    read = partial(read_instances, settings=settings, validate=validate)
    for pattern in discovery.files:
        yield f"files:{pattern}", pattern, partial(FileSource, pattern, read)
    for record in discovery.dns:
        yield f"dns:{record.name}", record, partial(_make_dns, record, make)
    for objects in discovery.kubernetes:
        where = "/".join(filter(None, (objects.namespace, objects.kind)))
        selector = f"?{objects.label_selector}" if objects.label_selector else ""
        yield f"kubernetes:{where}{selector}", objects, partial(_make_kubernetes, objects, make)


def _make_dns(given: DnsSource, make: Make) -> Source:
    from .dns_records import DnsRecords  # noqa: PLC0415  # an extra

    return DnsRecords(given, make)


def _make_kubernetes(given: KubernetesSource, make: Make) -> Source:
    from .kubernetes import Access, KubernetesObjects  # noqa: PLC0415  # an extra

    return KubernetesObjects(given, Access(given.kubeconfig, given.context), make)


def problems(settings: Settings, make: Callable[[Settings, Mapping[str, object]], object]) -> Iterator[Problem]:
    """What would keep sources from giving instances, as far as that can be told before they are asked.

    Args:
        settings: of the whole coordinator.
        make: builds an instance from keys; raises ValueError.
    """
    discovery = settings.discovery
    for section, (extra, module) in EXTRAS.items():
        if getattr(discovery, section) and importlib.util.find_spec(module) is None:
            yield ("discovery", section), f"needs more packages: pip install 'pd-coordinator[{extra}]'"
    for at, given in enumerate(discovery.dns):  # what pods lack here they may say about themselves
        example = {"role": str(given.role), "url": f"{given.scheme}://{EXAMPLE}", **given.traits()}
        try:
            make(settings, example)
        except ValueError as error:
            yield ("discovery", "dns", at, "options"), str(error)
