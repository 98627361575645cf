"""The chart's objects: valid for Kubernetes, and meaning what the values say."""

import hashlib
import re
import subprocess
import sys
from itertools import product

import kubernetes_validate
import pytest
import yaml
from helm_process import CHART, NAMESPACE, HelmError
from manifests import VALUE_SETS, cluster_yaml, container, merged, notes, objects, one, pod

from coordinator.config import Settings
from coordinator.management.screen import METRICS
from coordinator.observability.metrics import Metrics

SETS = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
VERSIONS = ("1.27", "1.32", "1.37")
PROBES = ("startup", "liveness", "readiness")
ALL_KINDS = {
    "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding",
    "Service", "ServiceAccount", "ServiceMonitor",
}  # fmt: skip
VLLM, MINDIE, EVERYTHING = VALUE_SETS["vllm"], VALUE_SETS["mindie"], VALUE_SETS["everything"]


def names_of(found: dict) -> dict:
    return found["spec"]["selector"].get("matchLabels", found["spec"]["selector"])


# --- validity


@SETS
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_kubernetes(helm, values, version):
    seen = 0
    for found in objects(helm, values):
        if found["kind"] != "ServiceMonitor":
            assert kubernetes_validate.validate(found, version, strict=True) == version
            seen += 1
    assert seen >= 6


def test_the_validation_finds_what_is_wrong(helm):
    found = one(helm, "Deployment", VLLM)
    found["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)


def test_the_oldest_version_that_is_tried_is_the_one_that_the_chart_asks_for():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


@SETS
def test_helm_lint_has_no_findings(helm, values):
    report = helm.lint(values)
    assert report["errors"] == []
    # 1: a remark; the only one is that the chart has no icon
    assert [(m["severity"], m["error"]) for m in report["messages"]] == [(1, "icon is recommended")]


def test_the_chart_can_be_packed(helm, tmp_path):
    archive = helm.package(tmp_path)
    assert archive.name == "pd-coordinator-0.1.0.tgz"
    assert archive.stat().st_size < 64 * 1024


def test_everything_on_gives_every_kind_and_the_defaults_only_what_is_needed(helm):
    assert {found["kind"] for found in objects(helm, EVERYTHING)} == ALL_KINDS
    usual = [found["kind"] for found in objects(helm)]
    assert set(usual) == ALL_KINDS - {"HorizontalPodAutoscaler", "Role", "RoleBinding", "ServiceMonitor"}
    off = {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
           "serviceAccount": {"create": False}}  # fmt: skip
    assert {found["kind"] for found in objects(helm, off)} == {"ConfigMap", "Deployment", "Service"}


@SETS
def test_every_object_has_its_labels_and_names_that_dns_takes(helm, values):
    seen = set()
    for found in objects(helm, values):
        metadata = found["metadata"]
        assert metadata["labels"]["app.kubernetes.io/instance"] == "pd"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", metadata["name"])
        place = (found["kind"], metadata["namespace"], metadata["name"])
        assert place not in seen
        seen.add(place)
        if found["kind"] not in ("Role", "RoleBinding"):
            assert metadata["namespace"] == NAMESPACE


def test_a_long_name_leaves_room(helm):
    found = objects(helm, {"fullnameOverride": "x" * 80})
    assert max(len(o["metadata"]["name"]) for o in found) <= 63


# --- cluster.yaml


@SETS
def test_the_config_arrives_as_it_was_given_and_passes_check(helm, values, tmp_path, monkeypatch):
    text = cluster_yaml(helm, values)
    assert yaml.safe_load(text) == helm.values(values)["config"]
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    for variable in values.get("secretEnv", ()):
        monkeypatch.setenv(variable["name"], "Authorization=Bearer%20xyz")
    command = [sys.executable, "-m", "coordinator", "check", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    count = len(values["config"]["cluster"].get("instances", ()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{path}: ok, {count} instances"


def test_any_section_may_stand_in_config(helm):
    config = {"of_tomorrow": {"keys": [{"name": "a", "hash": "x" * 300}], "text": "one\ntwo\n", "big": 33554432}}
    assert yaml.safe_load(cluster_yaml(helm, {"config": config}))["of_tomorrow"] == config["of_tomorrow"]


def test_every_section_of_the_program_is_taken(helm):
    for section in set(Settings.model_fields) - {"server"}:
        assert yaml.safe_load(cluster_yaml(helm, {"config": {section: {"x": 1}}}))[section]["x"] == 1


def test_a_changed_config_replaces_the_pods_only_if_that_is_wanted(helm):
    def annotation(values: dict) -> str:
        return pod(helm, values)["metadata"]["annotations"]["checksum/config"]

    changed = merged(VLLM, {"config": {"limits": {"max_queue": 7}}})
    text = cluster_yaml(helm, VLLM)
    assert annotation(VLLM) == hashlib.sha256(text.rstrip("\n").encode()).hexdigest()
    assert annotation(VLLM) == annotation(merged(VLLM, {"replicaCount": 5}))
    assert annotation(VLLM) != annotation(changed)
    off = {"rollOnConfigChange": False}
    assert pod(helm, merged(VLLM, off)) == pod(helm, merged(changed, off))
    assert "annotations" not in pod(helm, merged(VLLM, off))["metadata"]


# --- the pod


@SETS
def test_nothing_is_privileged(helm, values):
    spec = pod(helm, values)["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers", "initContainers"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(helm, values)["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    mounts = container(helm, values)["volumeMounts"]
    assert [mount["name"] for mount in mounts if not mount.get("readOnly")] == ["tmp"]


def test_only_discovery_gets_a_token_and_only_to_look(helm):
    assert pod(helm, VLLM)["spec"]["automountServiceAccountToken"] is False
    assert one(helm, "ServiceAccount", EVERYTHING)["automountServiceAccountToken"] is False
    assert pod(helm, EVERYTHING)["spec"]["automountServiceAccountToken"] is True
    found = objects(helm, EVERYTHING)
    roles = [o for o in found if o["kind"] == "Role"]
    bindings = [o for o in found if o["kind"] == "RoleBinding"]
    assert [o["metadata"]["namespace"] for o in roles] == ["engines", "engines-canary"]
    for role, binding in zip(roles, bindings, strict=True):
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        ]
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        (subject,) = binding["subjects"]
        account = one(helm, "ServiceAccount", EVERYTHING)["metadata"]
        assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert pod(helm, EVERYTHING)["spec"]["serviceAccountName"] == account["name"]


def test_discovery_without_namespaces_looks_into_its_own(helm):
    role = one(helm, "Role", {"kubernetesDiscovery": {"enabled": True}})
    assert role["metadata"]["namespace"] == NAMESPACE


def test_an_account_that_is_there_is_used(helm):
    values = {"serviceAccount": {"create": False, "name": "ours"}}
    assert pod(helm, values)["spec"]["serviceAccountName"] == "ours"
    assert pod(helm, {"serviceAccount": {"create": False}})["spec"]["serviceAccountName"] == "default"


def test_numbers_of_users_can_be_left_to_the_cluster(helm):
    context = pod(helm, {"runAs": {"user": None, "group": None, "fsGroup": None}})["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_image_has_the_version_of_the_program_unless_told_otherwise(helm):
    assert container(helm)["image"] == "pd-coordinator:0.1.0"
    assert container(helm, {"image": {"tag": "1.2"}})["image"] == "pd-coordinator:1.2"
    digest = "sha256:" + "a" * 64
    image = {"repository": "r.example/pd", "tag": "1.2", "digest": digest}
    assert container(helm, {"image": image})["image"] == f"r.example/pd@{digest}"


def test_a_pod_gets_the_time_that_it_needs_to_end(helm):
    def grace(**values) -> int:
        return pod(helm, values)["spec"]["terminationGracePeriodSeconds"]

    assert grace() == 5 + 30 + 10
    assert grace(config={"timeouts": {"drain_s": 120}}) == 135
    assert grace(config={"timeouts": {"drain_s": 7.5}}, preStopSleepSeconds=0) == 18
    assert grace(config={"timeouts": {"drain_s": 0}}, terminationGracePeriodSeconds=3600) == 3600
    sleep = container(helm, {"preStopSleepSeconds": 7})["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == ["sleep", "7"]
    assert "lifecycle" not in container(helm, {"preStopSleepSeconds": 0})


def test_the_probes_ask_for_the_right_things(helm):
    found = container(helm)
    assert {kind: found[f"{kind}Probe"]["httpGet"] for kind in PROBES} == {
        "startup": {"path": "/v1/startup", "port": "management", "scheme": "HTTP"},
        "liveness": {"path": "/v1/health", "port": "management", "scheme": "HTTP"},
        "readiness": {"path": "/v1/readiness", "port": "management", "scheme": "HTTP"},
    }
    probe = container(helm, EVERYTHING)["readinessProbe"]
    assert probe == {
        "httpGet": {"path": "/v1/readiness", "port": "status", "scheme": "HTTPS"},
        "periodSeconds": 6, "timeoutSeconds": 2, "failureThreshold": 3,
    }  # fmt: skip


@SETS
def test_ports_are_those_of_the_config_and_every_name_of_a_port_is_one_of_them(helm, values):
    server = yaml.safe_load(cluster_yaml(helm, values))["server"]
    ports = {port["name"]: port["containerPort"] for port in container(helm, values)["ports"]}
    wanted = {"http": "port", "management": "management_port", "metrics": "metrics_port", "status": "status_port"}
    assert ports == {name: server[key] for name, key in wanted.items() if server.get(key)}
    found = objects(helm, values)
    targets = [port["targetPort"] for o in found if o["kind"] == "Service" for port in o["spec"]["ports"]]
    assert sorted(targets) == sorted(ports)
    for policy in (o for o in found if o["kind"] == "NetworkPolicy"):
        used = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert sorted(used) == sorted(ports)


def test_secrets_become_files_that_others_cannot_read(helm):
    spec = pod(helm, EVERYTHING)["spec"]
    volumes = {volume["name"]: volume.get("secret") for volume in spec["volumes"]}
    assert volumes["secret-keys"] == {"secretName": "llm-router-keys", "defaultMode": 0o440}
    assert volumes["secret-tls"]["items"] == [
        {"key": "tls.crt", "path": "server.pem"},
        {"key": "tls.key", "path": "server.key", "mode": 0o400},
    ]
    assert volumes["secret-engines"]["optional"] is True
    mounts = {mount["name"]: mount for mount in container(helm, EVERYTHING)["volumeMounts"]}
    for name in ("keys", "tls", "engines"):
        mount = mounts[f"secret-{name}"]
        assert (mount["mountPath"], mount["readOnly"]) == (f"/run/secrets/pd-coordinator/{name}", True)
        assert "subPath" not in mount, "such a mount would not follow a changed secret"


def test_variables_come_from_secrets_and_no_value_is_in_the_chart(helm):
    first, *others = container(helm, EVERYTHING)["env"]
    secret = {"name": "llm-router-collector", "key": "4318"}
    assert first == {"name": "OTLP_HEADERS", "valueFrom": {"secretKeyRef": secret}}
    assert others == EVERYTHING["extraEnv"]
    assert EVERYTHING["config"]["tracing"]["headers_env"] == first["name"]
    assert "env" not in container(helm, VLLM)


def needs_variable(path: str, name: str = "A") -> dict:
    """Values with one key of the configuration that names a variable."""
    *above, last = path.split(".")
    change: dict = {last: name}
    for key in reversed(above):
        change = {key: change}
    return merged(VLLM, {"config": change})


def test_a_variable_of_either_list_is_one_that_the_configuration_may_name(helm):
    secret = {"secretEnv": [{"name": "A", "secretName": "s", "key": "k"}]}
    plain = {"extraEnv": [{"name": "A", "value": "x=y"}]}
    for path, variables in product(("tracing.headers_env", "auth.engine_key_env"), (secret, plain)):
        assert container(helm, merged(needs_variable(path), variables))["env"][0]["name"] == "A"


@SETS
def test_every_mount_has_its_volume_and_its_own_place(helm, values):
    volumes = [volume["name"] for volume in pod(helm, values)["spec"]["volumes"]]
    mounts = container(helm, values)["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    places = [mount["mountPath"].rstrip("/") + "/" for mount in mounts]
    assert not [(a, b) for a in places for b in places if a != b and a.startswith(b)], "a mount in a read-only mount"


def test_what_is_further_given_for_pods_gets_there(helm):
    spec, found = pod(helm, EVERYTHING)["spec"], container(helm, EVERYTHING)
    for key in ("priorityClassName", "nodeSelector", "tolerations", "affinity", "imagePullSecrets"):
        assert spec[key] == EVERYTHING[key]
    assert spec["topologySpreadConstraints"] == EVERYTHING["topologySpreadConstraints"]
    assert found["env"][-len(EVERYTHING["extraEnv"]) :] == EVERYTHING["extraEnv"]
    assert found["resources"] == EVERYTHING["resources"]
    assert EVERYTHING["extraVolumes"][0] in spec["volumes"]
    assert EVERYTHING["extraVolumeMounts"][0] in found["volumeMounts"]
    metadata = pod(helm, EVERYTHING)["metadata"]
    assert metadata["annotations"] == EVERYTHING["podAnnotations"]
    assert {"team": "serving", "tier": "edge"}.items() <= metadata["labels"].items()


def test_pods_spread_by_their_own_labels(helm):
    for values in (VLLM, {}):
        (constraint,) = pod(helm, values)["spec"]["topologySpreadConstraints"]
        assert constraint["labelSelector"] == {"matchLabels": names_of(one(helm, "Deployment", values))}


# --- what stands around it


@SETS
def test_every_selector_finds_the_pods(helm, values):
    labels = pod(helm, values)["metadata"]["labels"].items()
    for found in objects(helm, values):
        if found["kind"] in ("Deployment", "Service", "PodDisruptionBudget"):
            assert names_of(found).items() <= labels, found["kind"]
        if found["kind"] == "NetworkPolicy":
            assert found["spec"]["podSelector"]["matchLabels"].items() <= labels


def test_labels_of_pods_do_not_change_with_the_version(helm):
    assert pod(helm)["metadata"]["labels"] == pod(helm, {"image": {"tag": "9"}})["metadata"]["labels"]


@SETS
def test_the_management_plane_stays_in_the_cluster(helm, values):
    service = one(helm, "Service", values, "-management")
    assert service["spec"]["type"] == "ClusterIP"
    assert service["spec"]["publishNotReadyAddresses"] is True
    data = [o for o in objects(helm, values) if o["kind"] == "Service" and o != service]
    assert [port["targetPort"] for o in data for port in o["spec"]["ports"]] == ["http"]


def test_the_data_service_is_what_the_values_say(helm):
    (service,) = [o for o in objects(helm, EVERYTHING) if o["kind"] == "Service" and "publish" not in str(o)]
    spec = service["spec"]
    assert (spec["type"], spec["externalTrafficPolicy"]) == ("LoadBalancer", "Local")
    assert (spec["loadBalancerClass"], spec["loadBalancerSourceRanges"]) == ("example.com/internal", ["10.0.0.0/8"])
    assert spec["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "nodePort": 30080}
    ]  # fmt: skip


def test_the_autoscaler_follows_a_metric_that_there_is(helm):
    found = one(helm, "HorizontalPodAutoscaler", VALUE_SETS["sglang"])["spec"]
    (metric,) = found["metrics"]
    assert metric["type"] == "Pods"
    assert metric["pods"]["metric"]["name"] in {instrument.name for instrument in Metrics(["openai"]).instruments}
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "200"}
    assert (found["minReplicas"], found["maxReplicas"]) == (3, 8)
    deployment = one(helm, "Deployment", VALUE_SETS["sglang"])
    assert found["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert "replicas" not in deployment["spec"]
    assert one(helm, "Deployment", VLLM)["spec"]["replicas"] == 2


def test_the_budget_lets_pods_go_that_serve_nobody(helm):
    spec = one(helm, "PodDisruptionBudget", VLLM)["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert "minAvailable" not in spec
    spec = one(helm, "PodDisruptionBudget", EVERYTHING)["spec"]
    assert spec["minAvailable"] == "50%"
    assert "maxUnavailable" not in spec


SERVICE_MONITOR_ENDPOINT = {
    "port": str, "path": str, "scheme": str, "interval": str, "scrapeTimeout": str, "honorLabels": bool,
    "tlsConfig": dict, "authorization": dict, "relabelings": list, "metricRelabelings": list,
}  # fmt: skip
"""Fields of an endpoint in monitoring.coreos.com/v1 that the chart uses; Kubernetes' schemas do not know the kind."""


@pytest.mark.parametrize("name", ["sglang", "everything"])
def test_the_service_monitor_finds_the_management_service_alone(helm, name):
    values = VALUE_SETS[name]
    found = one(helm, "ServiceMonitor", values)
    assert found["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(found["spec"]) == {"namespaceSelector", "selector", "endpoints"}
    assert found["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    assert values["serviceMonitor"]["labels"].items() <= found["metadata"]["labels"].items()
    endpoint, *others = found["spec"]["endpoints"]
    for key, value in endpoint.items():
        assert isinstance(value, SERVICE_MONITOR_ENDPOINT[key]), key
    assert endpoint["path"] == "/metrics"
    assert [other["path"] for other in others] == ([] if name == "everything" else ["/metrics/engines"])
    # ours is an engine instance; Prometheus would rename it to exported_instance
    assert endpoint["honorLabels"] is True
    wanted = found["spec"]["selector"]["matchLabels"].items()
    chosen = [o for o in objects(helm, values) if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
    (service,) = chosen
    assert service["metadata"]["name"].endswith("-management")
    (port,) = [port for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
    assert port["targetPort"] == ("metrics" if name == "everything" else "management")


def endpoints(helm, change: dict) -> list[dict]:
    """Of the ServiceMonitor, for the set `everything` with a change."""
    found: list[dict] = one(helm, "ServiceMonitor", merged(EVERYTHING, change))["spec"]["endpoints"]
    return found


def test_what_engines_say_of_themselves_is_scraped_in_the_same_way_under_a_job_of_its_own(helm):
    own, engines = endpoints(helm, {"serviceMonitor": {"engineMetrics": True}})
    assert (own.pop("path"), engines.pop("path")) == METRICS
    # without it both pages would write one series `up`, and alerts on process_* would mean those of engines
    assert engines.pop("relabelings") == [{"targetLabel": "job", "replacement": "llm-router-engines"}]
    for key, value in engines.items():
        assert isinstance(value, SERVICE_MONITOR_ENDPOINT[key]), key
    assert engines == own


@pytest.mark.parametrize(
    "change",
    [
        {"serviceMonitor": {"engineMetrics": False}},
        {"config": {"metrics": {"engines": {"scrape": False}}}},
        {"config": {"metrics": {"engines": None}}},
        {"config": {"metrics": None}},
    ],
)
def test_a_page_that_is_not_there_or_not_wanted_is_not_scraped(helm, change):
    values = merged({"serviceMonitor": {"engineMetrics": True}}, change)
    assert [endpoint["path"] for endpoint in endpoints(helm, values)] == ["/metrics"]


def test_the_management_ports_are_for_those_who_are_named(helm):
    spec = one(helm, "NetworkPolicy", MINDIE)["spec"]
    data, management = spec["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    assert (data["from"], data["ports"]) == ([{"namespaceSelector": {}}], [{"port": "http", "protocol": "TCP"}])
    assert management["from"] == MINDIE["networkPolicy"]["managementFrom"]
    assert [port["port"] for port in management["ports"]] == ["management", "metrics", "status"]


def test_an_empty_list_of_peers_lets_nobody_in(helm):
    # in a NetworkPolicy itself `from: []` lets everybody in
    spec = one(helm, "NetworkPolicy", {"networkPolicy": {"managementFrom": []}})["spec"]
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == ["http"]
    spec = one(helm, "NetworkPolicy", {"networkPolicy": {"managementFrom": [], "dataFrom": []}})["spec"]
    assert "ingress" not in spec
    assert spec["policyTypes"] == ["Ingress"]


def test_ways_out_lead_to_the_engines_and_no_further(helm):
    egress = one(helm, "NetworkPolicy", VALUE_SETS["sglang"])["spec"]["egress"]
    assert egress == [
        {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        {"to": [{"ipBlock": {"cidr": "10.0.0.11/32"}}, {"ipBlock": {"cidr": "fd00::21/128"}}]},
    ]
    egress = one(helm, "NetworkPolicy", EVERYTHING)["spec"]["egress"]
    assert egress[1]["to"] == [
        *EVERYTHING["networkPolicy"]["egress"]["enginesTo"],
        {"ipBlock": {"cidr": "10.0.0.11/32"}},
    ]
    assert [port["port"] for port in egress[2]["ports"]] == [443, 6443]
    assert egress[3:] == EVERYTHING["networkPolicy"]["egress"]["extra"]


# --- MindIE, and combinations that cannot be


def test_one_coordinator_for_mindie_at_any_time(helm):
    assert one(helm, "Deployment", MINDIE)["spec"]["strategy"] == {"type": "Recreate"}
    assert one(helm, "Deployment", VLLM)["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert one(helm, "Deployment", EVERYTHING)["spec"]["strategy"] == EVERYTHING["strategy"]


XLLM = {
    "config": {
        "cluster": {"engine": "xllm"},
        "engines": {"xllm": {"rpc_host": "0.0.0.0", "advertise": "pd-pd-coordinator-engines.serving.svc:8889"}},
    },
    "enginePorts": [{"name": "xllm", "port": 8889}],
}


def with_tls(**more: str) -> dict:
    """Certificates on both ports."""
    both = {
        "cert_file": "/run/secrets/pd-coordinator/tls/tls.crt",
        "key_file": "/run/secrets/pd-coordinator/tls/tls.key",
    }
    return {"config": {"tls": {"data": both, "management": {**both, **more}}}, "serviceMonitor": {"enabled": True}}


def test_certificates_in_the_config_change_all_that_call_these_ports(helm):
    assert {container(helm, with_tls())[f"{kind}Probe"]["httpGet"]["scheme"] for kind in PROBES} == {"HTTPS"}
    assert one(helm, "ServiceMonitor", with_tls())["spec"]["endpoints"][0]["scheme"] == "https"
    assert "https://127.0.0.1:1026/v1/readiness" in notes(helm, with_tls())
    assert "https://pd-pd-coordinator.serving.svc:1025; from here" in notes(helm, with_tls())
    for values in (
        merged(with_tls(), {"config": {"tls": None}}),
        merged(with_tls(), {"config": {"tls": {"management": {"cert_file": None}}}}),
    ):
        assert container(helm, values)["livenessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_engines_that_call_back_find_one_coordinator_ready_or_not(helm):
    service = one(helm, "Service", XLLM, "-engines")
    host, _, port = XLLM["config"]["engines"]["xllm"]["advertise"].partition(":")
    assert host == f"{service['metadata']['name']}.{NAMESPACE}.svc"
    assert service["spec"]["ports"] == [{"name": "xllm", "port": int(port), "targetPort": "xllm", "protocol": "TCP"}]
    assert (service["spec"]["type"], service["spec"]["publishNotReadyAddresses"]) == ("ClusterIP", True)
    assert names_of(service).items() <= pod(helm, XLLM)["metadata"]["labels"].items()
    assert {"name": "xllm", "containerPort": 8889, "protocol": "TCP"} in container(helm, XLLM)["ports"]
    rule = one(helm, "NetworkPolicy", XLLM)["spec"]["ingress"][-1]
    assert rule == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "xllm", "protocol": "TCP"}]}
    assert one(helm, "Deployment", XLLM)["spec"]["strategy"] == {"type": "Recreate"}
    for found in objects(helm, XLLM):
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)


def test_nobody_calls_back_who_is_not_let_in(helm):
    closed = merged(XLLM, {"networkPolicy": {"enginesFrom": [], "dataFrom": [], "managementFrom": []}})
    assert "ingress" not in one(helm, "NetworkPolicy", closed)["spec"]
    assert len(one(helm, "NetworkPolicy", merged(VLLM, {}))["spec"]["ingress"]) == 2


HYBRID_ONLY = {"config": {"cluster": {"engine": "mindie", "instances": [{"role": "hybrid", "url": "http://h"}]}}}
ONE_OF_MINDIE = {
    "config": {"cluster": {"engine": "vllm", "instances": [{"role": "decode", "url": "http://d", "engine": "mindie"}]}}
}


def test_instances_that_serve_alone_bear_several_coordinators(helm):
    assert one(helm, "Deployment", merged(HYBRID_ONLY, {"replicaCount": 2}))["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicaCount": 2}, "replicaCount must be 1: a decode instance of MindIE has one coordinator"),
        (merged(ONE_OF_MINDIE, {"replicaCount": 2}), "replicaCount must be 1"),
        (merged(MINDIE, {"autoscaling": {"enabled": True}}), "autoscaling.enabled: a decode instance of MindIE"),
        (merged(VLLM, {"autoscaling": {"enabled": True, "minReplicas": 9}}), "minReplicas is greater"),
        ({"config": {"server": {"host": "127.0.0.1"}}}, "config.server.host must be 0.0.0.0"),
        ({"config": {"server": {"management_host": "localhost"}}}, "config.server.management_host must be 0.0.0.0"),
        ({"config": {"server": {"management_host": None}}}, 'nobody outside the pod reaches "127.0.0.1"'),
        ({"terminationGracePeriodSeconds": 44}, "is 44, but preStopSleepSeconds + config.timeouts.drain_s + 10 is 45"),
        ({"config": {"timeouts": {"drain_s": 0}}}, "say with terminationGracePeriodSeconds how long"),
        (merged(XLLM, {"replicaCount": 2}), "replicaCount must be 1: an engine of enginePorts calls back one"),
        (merged(XLLM, {"autoscaling": {"enabled": True}}), "autoscaling.enabled: an engine of enginePorts"),
        (with_tls(client_ca_file="ca.pem"), "client_ca_file: the kubelet has no certificate"),
        ({"probes": {"port": "status"}}, "config.server.status_port is not set"),
        ({"service": {"type": "LoadBalancer"}}, "dataFrom lets nobody in from outside the cluster: add an ipBlock"),
        ({"secretFiles": [{"name": "a", "secretName": "x"}, {"name": "a", "secretName": "y"}]}, '"a" stands twice'),
        (
            {"secretEnv": [{"name": "A", "secretName": "x", "key": "k"}], "extraEnv": [{"name": "A", "value": "x"}]},
            'the variable "A" stands twice',
        ),
        (needs_variable("tracing.headers_env"), 'tracing.headers_env is "A", but neither secretEnv nor extraEnv has'),
        (needs_variable("auth.engine_key_env"), 'auth.engine_key_env is "A", but neither'),
        (
            {"config": {"cluster": {"instances": [{"role": "hybrid", "url": "http://h", "engine_key_env": "A"}]}}},
            'cluster.instances[0].engine_key_env is "A", but neither',
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_a_sentence(helm, values, words):
    with pytest.raises(HelmError) as caught:
        helm.render(values)
    assert words in str(caught.value)


# --- notes


def test_the_notes_say_how_to_go_on(helm):
    text = notes(helm, VLLM)
    assert "kubectl -n serving rollout status deployment/pd-pd-coordinator" in text
    assert "http://pd-pd-coordinator.serving.svc:1025" in text
    for path in ("/v1/readiness", "/v1/instances", "/v1/models"):
        assert path in text
    assert "1025:80 &" in notes(helm, EVERYTHING)
    assert "1026:8081 &" in notes(helm, EVERYTHING)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "config.cluster.instances is empty"),
        (MINDIE, "these engines have one coordinator"),
        (VLLM, "is known to the one pod that got the call"),
        (
            {"networkPolicy": {"enabled": False}},
            "no management key: every pod of the cluster can reach the management plane",
        ),
    ],
)
def test_the_notes_warn_where_there_is_reason_to(helm, values, words):
    assert words in notes(helm, values)
    assert words not in notes(helm, VALUE_SETS["minimal"])


def test_a_management_key_is_reason_enough_not_to_warn(helm):
    open_plane = {"networkPolicy": {"enabled": False}}
    auth = {"config": {"auth": {"management_keys_file": "/run/secrets/pd-coordinator/keys/management.yaml"}}}
    assert "can reach the management plane" in notes(helm, open_plane)
    assert "can reach the management plane" not in notes(helm, merged(open_plane, auth))


KEYED = {"config": {"auth": {"keys_file": "/run/secrets/k.yaml", "management_keys": [{"name": "ops", "hash": "x"}]}}}
BEARER = '-H "Authorization: Bearer $KEY"'


def test_the_calls_of_the_notes_are_ones_that_are_let_in(helm):
    plain, keyed = notes(helm, VLLM), notes(helm, merged(VLLM, KEYED))
    assert BEARER not in plain
    assert "KEY" not in plain
    assert f"curl -s {BEARER} http://127.0.0.1:1026/v1/instances" in keyed
    assert f"curl -s {BEARER} http://127.0.0.1:1025/v1/models" in keyed
    assert "curl -s http://127.0.0.1:1026/v1/readiness" in keyed  # a probe
    # the name in the certificate is not that of the forwarded port
    assert "curl -sk https://127.0.0.1:1026/v1/readiness" in notes(helm, with_tls())


@pytest.mark.parametrize("section", ["cluster", "timeouts", "tls", "auth", "logging"])
def test_an_empty_section_is_none(helm, section):
    assert objects(helm, {"config": {section: None}})
