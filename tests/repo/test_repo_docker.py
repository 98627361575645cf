"""The image, the compose file and its cluster are what they say, as far as that shows without Docker."""

import ipaddress
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from coordinator import cli
from coordinator.config import load

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
SETTINGS = load(ROOT / "docker/cluster.yaml")
SERVICES = COMPOSE["services"]
INSTANCES = {name: service for name, service in SERVICES.items() if name != "coordinator"}


def hadolint(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or "hadolint"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_dockerfile_has_no_findings():
    done = hadolint("--no-color", str(DOCKERFILE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_something_where_there_is_something(tmp_path):
    faulty = tmp_path / "Dockerfile"
    faulty.write_text("FROM python\nRUN pip install x\n")
    assert "DL3006" in hadolint("--no-color", str(faulty)).stdout


def test_the_image_pins_its_base_and_does_not_run_as_root():
    lines = DOCKERFILE.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases
    assert all(base.partition(":")[2].count(".") == 2 for base in bases)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert any(line.startswith("HEALTHCHECK ") for line in lines)


def test_everything_that_the_image_copies_gets_into_the_build():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored, name


def test_the_cluster_has_no_notes_and_passes_check(capsys):
    path = str(ROOT / "docker/cluster.yaml")
    assert cli.main(["check", "--config", path]) == 0
    assert capsys.readouterr().out == f"{path}: ok, 4 instances\n"


def test_every_service_has_a_command_that_parses():
    for name, service in SERVICES.items():
        args = cli._parser().parse_args([str(word) for word in service["command"]])
        assert callable(args.run), name
        assert all(isinstance(word, str) for word in service["command"]), f"{name}: quote numbers"


def test_instances_listen_where_they_are_looked_for():
    network = ipaddress.ip_network(COMPOSE["networks"]["serving"]["ipam"]["config"][0]["subnet"])
    wanted = {(entry.role, entry.url) for entry in SETTINGS.cluster.instances}
    found = set()
    for name, service in INSTANCES.items():
        args = cli._parser().parse_args(service["command"])
        address = service["networks"]["serving"]["ipv4_address"]
        assert ipaddress.ip_address(address) in network
        assert args.host == address
        # MindIE takes an address, not a name, of a decode instance
        host = address if args.role == "decode" else name
        found.add((args.role, f"http://{host}:{args.port}"))
        assert (args.engine, args.model) == (SETTINGS.cluster.engine, SETTINGS.cluster.model)
    assert found == wanted


def test_the_ports_of_the_coordinator_are_published_and_checked():
    published = {port.rpartition(":")[2] for port in SERVICES["coordinator"]["ports"]}
    server = SETTINGS.server
    assert published == {str(server.port), str(server.management_port)}
    assert f"http://127.0.0.1:{server.management_port}/v1/health" in DOCKERFILE.read_text()
    (volume,) = SERVICES["coordinator"]["volumes"]
    source, target, _ = volume.split(":")
    assert (ROOT / "docker" / source).samefile(ROOT / "docker/cluster.yaml")
    assert target in SERVICES["coordinator"]["command"]
