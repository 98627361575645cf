"""What the chart makes of values, as objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_process import CHART, Helm

ROOT = CHART.parents[2]
VALUE_FILES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
VALUE_SETS = {path.stem: yaml.safe_load(path.read_text()) for path in VALUE_FILES}


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML's own loader takes silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
        return super().construct_mapping(node, deep)


def objects(helm: Helm, values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """All Kubernetes objects, in the order of their templates."""
    rendered = helm.render(values)
    texts = [text for name, text in sorted(rendered.items()) if not name.endswith("NOTES.txt")]
    return [found for text in texts for found in yaml.load_all(text, StrictLoader) if found]


def one(helm: Helm, kind: str, values: dict[str, Any] | None = None, end: str = "") -> dict[str, Any]:
    """The only object of a kind whose name has this end."""
    (found,) = [o for o in objects(helm, values) if o["kind"] == kind and o["metadata"]["name"].endswith(end)]
    return found


def pod(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The pod of the Deployment."""
    template: dict[str, Any] = one(helm, "Deployment", values)["spec"]["template"]
    return template


def container(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Its only container."""
    (found,) = pod(helm, values)["spec"]["containers"]
    return found


def notes(helm: Helm, values: dict[str, Any] | None = None) -> str:
    """What Helm prints after an installation."""
    return helm.render(values)["pd-coordinator/templates/NOTES.txt"]


def cluster_yaml(helm: Helm, values: dict[str, Any] | None = None) -> str:
    """The text of cluster.yaml in the ConfigMap."""
    text: str = one(helm, "ConfigMap", values)["data"]["cluster.yaml"]
    return text


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, as Helm lays one values file over another."""
    new = dict(base)
    for key, value in change.items():
        old = new.get(key)
        new[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return new


def leaves(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a tree that is no mapping with keys."""
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(item, dict) and item:
            yield from leaves(item, here)
        else:
            yield here, item
