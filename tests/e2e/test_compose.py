"""docker/compose.yaml and docker/cluster.yaml make a cluster that serves: their commands, on loopback addresses."""

import json
from pathlib import Path

import pytest
import yaml
from processes import Process, call, call_json, until

DOCKER = Path(__file__).parents[2] / "docker"
SERVICES = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
SUBNET, LOOPBACK = "172.30.7.", "127.30.7."


def command(service: dict) -> list[str]:
    return ["-m", "coordinator", *service["command"]]


@pytest.fixture
def compose(tmp_path):
    """Every service as a process; gives the data and management ports."""
    text = (DOCKER / "cluster.yaml").read_text()
    processes = []
    try:
        for name, service in SERVICES.items():
            if name == "coordinator":
                continue
            words = [w.replace(SUBNET, LOOPBACK) if w.startswith(SUBNET) else w for w in command(service)]
            words[words.index("--port") + 1] = "0"
            processes.append(Process(name, words, tmp_path))
        for process in processes:
            url = process.said(r"instance \S+ at (http://\S+)")[1]
            address = SERVICES[process.name]["networks"]["serving"]["ipv4_address"]
            assert any(f"http://{host}:9000" in text for host in (process.name, address))
            for host in (process.name, address):
                text = text.replace(f"http://{host}:9000", url)
        document = yaml.safe_load(text)
        document["server"] |= {"host": "127.0.0.1", "port": 0, "management_host": "127.0.0.1", "management_port": 0}
        config = tmp_path / "cluster.yaml"
        config.write_text(json.dumps(document))
        serve = command(SERVICES["coordinator"])
        serve[serve.index("--config") + 1] = str(config)
        coordinator = Process("coordinator", serve, tmp_path)
        processes.append(coordinator)
        ports = coordinator.said(r"serves on \S+ port (\d+), management on \S+ port (\d+)")
        yield int(ports[1]), int(ports[2])
    finally:
        for process in reversed(processes):
            process.kill()


def test_the_compose_cluster_serves_on_all_its_instances(compose):
    port, management = compose
    until(
        lambda: {row["state"] for row in call_json(management, "/v1/instances")["instances"]} == {"ready"},
        "every instance is ready",
    )
    seen = set()
    for _ in range(8):
        status, headers, _ = call(port, "/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 2})
        assert status == 200
        seen |= {headers["x-pd-prefill"], headers["x-pd-decode"]}
    assert seen == {"p0", "p1", "d0", "d1"}
