"""values.yaml, its schema and the chart's README say the same."""

import json
import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from helm_process import CHART, HelmError
from manifests import ROOT, VALUE_SETS, leaves, merged

VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(VALUES_TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
README = (CHART / "README.md").read_text()
LEAVES = dict(leaves(VALUES))
OPEN = {
    "properties.global", "properties.config", "properties.config.server", "properties.config.cluster",
    "properties.config.timeouts", "properties.config.tls",
}  # fmt: skip
"""Mappings of the schema that take any key; beside these, plain `object`s that Kubernetes itself checks."""


def resolved(node: dict) -> dict:
    reference = node.get("$ref")
    return SCHEMA["definitions"][reference.removeprefix("#/definitions/")] if reference else node


def schema_of(path: str) -> dict:
    node = SCHEMA
    for key in path.split("."):
        node = resolved(resolved(node)["properties"][key])
    return node


def mappings(node: dict, path: str) -> Iterator[tuple[str, dict]]:
    """Every mapping with named keys in a schema."""
    if "properties" in node:
        yield path, node
    for key, item in node.get("properties", {}).items():
        yield from mappings(item, f"{path}.{key}")
    if isinstance(node.get("items"), dict):
        yield from mappings(node["items"], f"{path}[]")


ALL_MAPPINGS = [
    *((path or "all", node) for path, node in mappings(SCHEMA, "properties")),
    *((path, node) for name, part in SCHEMA["definitions"].items() for path, node in mappings(part, name)),
]


def test_the_chart_has_the_version_of_the_program():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
    assert chart["name"] == project["name"]


def test_every_value_has_a_comment():
    """On the line above its key, but for the inside of an example."""
    lines = VALUES_TEXT.splitlines()
    depth = 0
    for number, line in enumerate(lines):
        key = re.match(r"( *)[a-zA-Z_]+:", line)
        if not key or lines[number - 1].strip().startswith("#"):
            if key:
                depth = len(key[1])
            continue
        # keys inside a default that is a list or a Kubernetes object belong to the comment above it
        assert len(key[1]) > depth, f"line {number + 1}: {line}"


@pytest.mark.parametrize("path", LEAVES)
def test_every_value_is_in_the_schema(path):
    if path.startswith("resources."):
        path = path.rpartition(".")[0]
    if path.startswith("autoscaling.behavior.scaleDown."):
        path = "autoscaling.behavior.scaleDown"
    assert "$ref" not in schema_of(path)


@pytest.mark.parametrize(("path", "node"), ALL_MAPPINGS, ids=[path for path, _ in ALL_MAPPINGS])
def test_every_mapping_of_the_schema_refuses_unknown_keys(path, node):
    if path not in OPEN and path != "volume":
        assert node["additionalProperties"] is False


def test_every_named_value_of_the_schema_has_a_default_in_values():
    for key, node in SCHEMA["properties"].items():
        if key == "global":
            continue
        assert key in VALUES
        if key != "config" and resolved(node).get("additionalProperties") is False and VALUES[key]:
            missing = resolved(node)["properties"].keys() - VALUES[key].keys()
            assert missing <= {"claims", "scaleUp"}, f"{key}: {missing}"


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.+) \|$", README, re.MULTILINE)
    assert len({path for path, _, _ in rows}) == len(rows)
    return {path: default for path, default, meaning in rows if meaning.strip()}


def test_every_value_has_a_row_in_the_readme_with_its_default_and_no_row_is_of_none():
    inside = "autoscaling.behavior"
    wanted = {path: value for path, value in LEAVES.items() if not path.startswith(f"{inside}.")}
    wanted[inside] = at(VALUES, inside)
    assert documented() == {path: json.dumps(value, ensure_ascii=False) for path, value in wanted.items()}


EVERYTHING = VALUE_SETS["everything"]
ON_ANYHOW = {"podDisruptionBudget.enabled", "networkPolicy.enabled", "serviceAccount.create"}
ELSEWHERE = {"enginePorts", "networkPolicy.enginesFrom"}
"""Values that do not go with several pods; test_helm_objects.py has tests of theirs."""
OVERRULED = {"podDisruptionBudget.maxUnavailable", "replicaCount"}
"""Values without an effect where another one, as in the set `everything`, is taken instead."""
REFUSED = {"config.cluster.engine", "networkPolicy.dataFrom", "secretEnv"}
"""Values whose default is refused beside the other values of that set."""


def at(tree: dict, path: str) -> object:
    for key in path.split("."):
        tree = tree[key]
    return tree


def with_default(path: str) -> dict:
    """The set `everything` with one value as it is by default."""
    *above, last = path.split(".")
    change: dict = {last: at(VALUES, path)}
    for key in reversed(above):
        change = {key: change}
    found = merged(EVERYTHING, change)
    if at(VALUES, path) == {}:
        # an empty mapping laid over another changes nothing: take it out
        node = found
        for key in above:
            node = node[key]
        node[last] = {}
    return found


@pytest.mark.parametrize("path", sorted(LEAVES.keys() - ON_ANYHOW - ELSEWHERE))
def test_the_set_everything_changes_every_value(path):
    assert at(merged(VALUES, EVERYTHING), path) != LEAVES[path]


@pytest.mark.parametrize("path", sorted(LEAVES.keys() - ON_ANYHOW - ELSEWHERE - OVERRULED - REFUSED))
def test_every_value_has_an_effect(helm, path):
    assert helm.render(with_default(path)) != helm.render(EVERYTHING)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_values_that_do_not_go_with_the_others_have_an_effect(helm, path):
    with pytest.raises(HelmError, match=r"MindIE has one coordinator|add an ipBlock|neither secretEnv"):
        helm.render(with_default(path))


@pytest.mark.parametrize("path", sorted(OVERRULED))
def test_values_that_others_overrule_have_an_effect_without_them(helm, path):
    low = {"autoscaling": {"enabled": False}, "podDisruptionBudget": {"minAvailable": None}}
    values = merged(EVERYTHING, low)
    assert helm.render(values) != helm.render(merged(with_default(path), low))


@pytest.mark.parametrize("path", ["README.md", "values.yaml"])
def test_values_named_in_texts_exist(path):
    text = (CHART / path).read_text()
    sections = "|".join(key for key in VALUES if key not in ("config", "image", "service", "resources"))
    for name in re.findall(rf"`((?:{sections})(?:\.\w+)+)`", text):
        node = VALUES
        for key in name.split("."):
            assert key in node, f"{path}: {name}"
            node = node[key]


WRONG = [
    ({"replicas": 2}, "replicas"),
    ({"image": {"tags": "1"}}, "tags"),
    ({"image": {"tag": 1.2}}, "tag"),
    ({"image": {"digest": "sha256:abc"}}, "digest"),
    ({"image": {"pullPolicy": "Allways"}}, "pullPolicy"),
    ({"replicaCount": "2"}, "replicaCount"),
    ({"replicaCount": -1}, "replicaCount"),
    ({"replicaCount": 1.5}, "replicaCount"),
    ({"config": []}, "config"),
    ({"config": {"server": {"port": "1025"}}}, "port"),
    ({"config": {"server": {"management_port": 0}}}, "management_port"),
    ({"config": {"server": {"metrics_port": 70000}}}, "metrics_port"),
    ({"config": {"cluster": {"instances": {"role": "prefill"}}}}, "instances"),
    ({"config": {"timeouts": {"drain_s": "30s"}}}, "drain_s"),
    ({"config": {"server": None}}, "server"),
    ({"runAs": {"user": 0}}, "user"),
    ({"runAs": {"users": 1}}, "users"),
    ({"resources": {"request": {"cpu": 1}}}, "request"),
    ({"probes": {"readiness": {"path": "/"}}}, "path"),
    ({"probes": {"port": "http"}}, "port"),
    ({"probes": {"liveness": {"periodSeconds": 0}}}, "periodSeconds"),
    ({"secretFiles": [{"name": "Keys", "secretName": "x"}]}, "name"),
    ({"secretFiles": [{"name": "keys"}]}, "secretName"),
    ({"secretFiles": [{"name": "keys", "secret": "x", "secretName": "x"}]}, "secret"),
    ({"secretEnv": [{"name": "A", "secretName": "x"}]}, "key"),
    ({"secretEnv": [{"name": "A", "secretName": "x", "key": "k", "value": "y"}]}, "value"),
    ({"secretEnv": [{"name": "a-b", "secretName": "x", "key": "k"}]}, "name"),
    ({"serviceMonitor": {"engineMetrics": "yes"}}, "engineMetrics"),
    ({"extraEnv": [{"name": "A", "value": 1}]}, "value"),
    ({"extraEnv": [{"name": "A"}]}, "extraEnv"),
    ({"extraVolumes": [{"name": "a"}]}, "extraVolumes"),
    ({"extraVolumeMounts": [{"name": "a", "mountPath": "models"}]}, "mountPath"),
    ({"tolerations": [{"keys": "a"}]}, "keys"),
    ({"affinity": {"podAfinity": {}}}, "podAfinity"),
    ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologyKey"),
    ({"service": {"type": "ExternalName"}}, "type"),
    ({"managementService": {"type": "LoadBalancer"}}, "type"),
    ({"serviceAccount": {"created": False}}, "created"),
    ({"kubernetesDiscovery": {"enabled": "yes"}}, "enabled"),
    ({"kubernetesDiscovery": {"namespaces": "engines"}}, "namespaces"),
    ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
    ({"autoscaling": {"target": 5}}, "target"),
    ({"autoscaling": {"behavior": {"scaledown": {}}}}, "scaledown"),
    ({"serviceMonitor": {"interval": 15}}, "interval"),
    ({"serviceMonitor": {"interval": "15"}}, "interval"),
    ({"networkPolicy": {"dataFrom": [{}]}}, "dataFrom"),
    ({"networkPolicy": {"dataFrom": [{"namespace": "a"}]}}, "namespace"),
    ({"networkPolicy": {"egress": {"to": []}}}, "to"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
    ({"podLabels": {"a": "b c"}}, "podLabels"),
    ({"podAnnotations": {"sidecar.istio.io/inject": False}}, "podAnnotations"),
    ({"enginePorts": [{"name": "http", "port": 1}]}, "name"),
    ({"enginePorts": [{"name": "a", "port": "1"}]}, "port"),
    ({"strategy": {"type": "Rolling"}}, "strategy"),
    ({"terminationGracePeriodSeconds": "60"}, "terminationGracePeriodSeconds"),
    ({"rollOnConfigChange": "false"}, "rollOnConfigChange"),
]


@pytest.mark.parametrize(("values", "word"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_typos_and_wrong_types_are_refused_by_name(helm, values, word):
    with pytest.raises(HelmError) as caught:
        helm.render(values)
    message = str(caught.value)
    assert "values don't meet the specifications of the schema" in message
    assert word in message


def test_values_of_a_chart_above_are_no_mistake(helm):
    assert helm.render({"global": {"region": "x"}})
