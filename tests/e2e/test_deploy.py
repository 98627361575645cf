"""What docs/deploy.md shows is what one sees, and what the chart makes of values is a pod that runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from clusters import FAST, QUICK_HEALTH, Starter
from processes import HOST, Process, Simulator, call, call_json, until
from readme_blocks import examples, shape
from traffic import HELD

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
import helm_process
from held_ports import HeldPorts
from manifests import cluster_yaml, container, merged, one, pod

PAGE = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
FILES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(server:.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
LOOKS = examples(PAGE)
LOGS = re.findall(r"^```text log\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SLOW = "Hello [[fault:slow=0.1]] [[length:15]]"
"""A prompt that simulated instances take 1.5 seconds for."""

pytestmark = pytest.mark.xdist_group("deploy")


def instances_for(config: dict, start: Starter) -> list[Simulator]:
    """Simulated instances in the places of those of a configuration."""
    cluster = config["cluster"]
    common = {"engine": cluster["engine"], "model": cluster.get("model", "m"), "timing": FAST}
    return start.fleet([{"role": row["role"], **common} for row in cluster["instances"]]).instances


def simulated(config: dict, start: Starter, instances: list[Simulator] | None = None) -> dict:
    """The configuration, with its instances simulated here and its ports left to the system."""
    cluster = config["cluster"]
    rows = [{key: row[key] for key in ("role", "id")} for row in cluster["instances"]]
    for row, instance in zip(rows, instances or instances_for(config, start), strict=True):
        row["url"] = instance.url
    server = {key: 0 if key.endswith("port") else value for key, value in config["server"].items()}
    server |= {"port": 0, "management_port": 0}
    return config | {"server": server, "cluster": cluster | {"instances": rows}, "health": QUICK_HEALTH}


# --- the walk of the page


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The coordinator of the bare-metal part, while it runs."""
    start = Starter(tmp_path_factory.mktemp("walk"))
    try:
        coordinator = start.coordinator(simulated(FILES[0], start))
        coordinator.wait_ready()
        until(lambda: set(coordinator.states().values()) == {"ready"}, "all are ready")
        yield coordinator
    finally:
        start.close()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("look", LOOKS, ids=[look.code[:70].strip() for look in LOOKS])
def test_a_look_shows_what_the_page_says(look, walked):
    code = look.code.replace("127.0.0.1:1025", f"{HOST}:{walked.port}")
    code = code.replace("127.0.0.1:1026", f"{HOST}:{walked.management_port}")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, timeout=90, env=environment,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == shape(look.printed)


def test_there_are_seven_looks():
    assert re.findall(r"^\*\*Look (\d)\.\*\*", PAGE, re.MULTILINE) == list("1234567")
    assert len(LOOKS) == 7  # the fifth has two commands, the sixth is a line of the log


def test_the_doctor_says_what_the_page_says(walked, tmp_path):
    config = yaml.safe_load(walked.config_path.read_text())
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(config | {"limits": {"max_requests": 10}}))  # whatever this machine's limit of files
    command = [sys.executable, "-m", "coordinator", "doctor", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (shown,) = re.findall(r"^```text doctor\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"\d+", "N", done.stdout.partition(": ")[2]) == re.sub(r"\d+", "N", shown.partition(": ")[2])


def skeleton(line: str) -> str:
    """A line of the log without what differs from run to run."""
    line = re.sub(r" of /\S+\.yaml", " of FILE", re.sub(r"\bid=\w+", "id=X", line))
    return re.sub(r"\d+", "N", line)


def test_the_log_has_the_lines_of_the_page(start):
    """Start, a request, a change, a stop while a stream runs."""
    instances = instances_for(FILES[0], start)
    config = simulated(FILES[0], start, instances)
    coordinator = start.coordinator(config)
    coordinator.wait_ready()
    until(lambda: set(coordinator.states().values()) == {"ready"}, "all are ready")
    call_json(coordinator.port, "/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 4})

    more = {"role": "decode", "url": f"http://{HOST}:9", "id": "d1"}
    rows = [*config["cluster"]["instances"], more]
    coordinator.write_config(config | {"cluster": config["cluster"] | {"instances": rows}})
    coordinator.signal(signal.SIGHUP)
    coordinator.said("configuration reloaded: added d1")

    bodies: list[bytes] = []
    body = {"model": "demo", "prompt": f"Hello {HELD}", "stream": True}
    stream = threading.Thread(target=lambda: bodies.append(call(coordinator.port, "/v1/completions", body)[2]))
    stream.start()
    (decode,) = [one for one in instances if one.role == "decode"]
    until(lambda: decode.state()["generating"], "the stream runs")
    coordinator.signal(signal.SIGTERM)
    coordinator.said("draining: no new requests, 1 live ones may end")
    status, headers, answer = call(coordinator.port, "/v1/completions", {"model": "demo", "prompt": "Hello"})
    assert (status, b'"code":"draining"' in answer, int(headers["retry-after"]) > 0) == (503, True, True)
    said = call(coordinator.management_port, "/v1/readiness")[2].decode()
    assert said in PAGE
    decode.act("go_on")
    stream.join(30)
    assert bodies[0].endswith(b"data: [DONE]\n\n")
    assert coordinator.wait() == 0

    ours = {skeleton(line) for line in coordinator.log().splitlines()}
    shown = [line for text in LOGS for line in text.splitlines()]
    assert len(shown) >= 10
    assert [line for line in shown if skeleton(line) not in ours] == []


def test_lines_of_the_log_are_told_apart():
    a, b = LOGS[0].splitlines()[0], LOGS[0].splitlines()[-1]
    assert skeleton(a) != skeleton(b)
    assert skeleton(a) == skeleton(a.replace("23", "11"))


@pytest.mark.parametrize("config", FILES[1:], ids=[config["cluster"]["engine"] for config in FILES[1:]])
def test_the_file_for_an_engine_serves_it(config, start):
    coordinator = start.coordinator(simulated(config, start))
    coordinator.wait_ready()
    body = {"model": config["cluster"].get("model", "m"), "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
    answer = call_json(coordinator.port, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 4
    assert "prefill=p0 decode=d0" in coordinator.said(r"outcome=ok .*").group(0)


# --- the chart's pod, run here


@pytest.fixture(scope="module")
def helm() -> Iterator[helm_process.Helm]:
    """Helm's engine."""
    yield from helm_process.engine()


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    """Ports that nobody else gets: the chart, other than the program, wants numbers."""
    with HeldPorts() as held:
        yield held


def test_the_pod_of_the_chart_runs_answers_its_probes_and_ends_in_time(helm, start, tmp_path, ports):
    config = simulated(FILES[1], start)
    names = ("port", "management_port", "metrics_port", "status_port")
    config["server"] = {name: ports.take() for name in names}
    config["timeouts"] = {"drain_s": 3}
    values = {"config": config, "serviceMonitor": {"enabled": True}}

    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(helm, values))
    found = container(helm, values)
    mounted = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    args = [str(path) if arg == f"{mounted['config']}/cluster.yaml" else arg for arg in found["args"]]
    assert str(path) in args
    process = start._own(Process("pod", ["-m", "coordinator", *args], tmp_path))
    process.said("serves on 0.0.0.0 port")

    numbers = {port["name"]: port["containerPort"] for port in found["ports"]}
    for kind in ("startup", "liveness", "readiness"):
        probe = found[f"{kind}Probe"]["httpGet"]
        until(lambda probe=probe: call(numbers[probe["port"]], probe["path"])[0] == 200, f"the {kind} probe is content")
    status_probe = container(helm, merged(values, {"probes": {"port": "status"}}))["readinessProbe"]["httpGet"]
    assert call(numbers[status_probe["port"]], status_probe["path"])[0] == 200
    (endpoint,) = one(helm, "ServiceMonitor", values)["spec"]["endpoints"]
    assert b"pd_coordinator_requests_in_flight" in call(numbers[endpoint["port"]], endpoint["path"])[2]
    body = {"model": config["cluster"]["model"], "prompt": SLOW, "max_tokens": 4}
    assert call_json(numbers["http"], "/v1/completions", body)["usage"]["completion_tokens"] == 4

    spec = pod(helm, values)["spec"]
    process.signal(signal.SIGTERM)
    assert process.wait(spec["terminationGracePeriodSeconds"]) == 0
