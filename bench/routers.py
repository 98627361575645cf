"""The routers under test: how each is installed and started."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from coordinator.engines.table import ENGINES

ROOT = Path(__file__).resolve().parents[1]
OURS = "pd-coordinator"
COMPILED = "pd-coordinator-compiled"
COMPILED_PROGRAM = ROOT / "build/compiled/.venv/bin/pd-coordinator"
FLAVOURS = ("mindie", "vllm", "sglang")
BOOTSTRAP_PORT = 8998
INSTALL_S = 900

# name: what pip installs, and the engines that it speaks to; each gets a venv of its own
PEERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "vllm-router": ("vllm-router==0.1.17", "vllm"),
        "sglang-router": ("sglang-router==0.3.2", "sglang"),
        "smg": ("smg==1.13.0", "sglang"),
    }
)


@dataclass(frozen=True, slots=True)
class Router:
    """One router in front of one kind of engine."""

    name: str
    flavour: str

    @property
    def key(self) -> str:
        """The name of its row."""
        return f"{self.name}/{self.flavour}"

    @property
    def ours(self) -> bool:
        """Whether it is this project's."""
        return self.name in (OURS, COMPILED)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a router listens, and its engines."""

    port: int
    side_port: int
    prefill_url: str
    decode_url: str


def home() -> Path:
    """Where peers and tools are installed: $PD_BENCH_HOME, or a folder of the user's cache."""
    given = os.environ.get("PD_BENCH_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(cache, "pd-coordinator-bench")


def routers(flavours: Sequence[str], names: Sequence[str]) -> list[Router]:
    """Those to measure, in turn; says which are left out, and why. No names: all."""
    found = []
    for flavour in flavours:
        found += [Router(name, flavour) for name in (OURS, COMPILED) if _is_there(name, flavour, names)]
        for name, (requirement, speaks) in PEERS.items():
            if speaks == flavour and (name in names or not names) and install(name, [requirement]):
                found.append(Router(name, flavour))
    return found


def _is_there(ours: str, flavour: str, names: Sequence[str]) -> bool:
    """Whether to measure the coordinator, as it is or compiled."""
    if names and ours not in names:
        return False
    if flavour not in ENGINES:
        print(f"{ours}/{flavour}: left out, there is no such engine yet", file=sys.stderr)
        return False
    if ours == COMPILED and not COMPILED_PROGRAM.exists():
        print(f"{ours}/{flavour}: left out, `make compiled` makes it", file=sys.stderr)
        return False
    return True


def install(name: str, requirements: Sequence[str], constraints: Path | None = None) -> bool:
    """Make sure that a venv of this name holds these packages; says so if that cannot be done."""
    folder = home() / name
    mark, wanted = folder / ".installed", "\n".join(requirements)
    if mark.exists() and mark.read_text() == wanted:
        return True
    print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr)
    given = [] if constraints is None else ["--constraint", str(constraints)]
    python = folder / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *given, *requirements]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
        subprocess.run(pip, check=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name}: left out, it cannot be installed: {error}", file=sys.stderr)
        return False
    mark.write_text(wanted)
    return True


def install_tools() -> Path | None:
    """The folder with the programs of the extra `bench` of pyproject.toml; None if they cannot be installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return home() / "tools/bin" if install("tools", extras["bench"], ROOT / "constraints.txt") else None


def command(router: Router, place: Place, folder: Path, workers: int = 1) -> list[str]:
    """How the router is started; a configuration file goes to `folder`."""
    if router.ours:
        return _our_command(router, place, folder, workers)
    common = [
        "--host", "127.0.0.1", "--port", str(place.port), "--prometheus-port", str(place.side_port),
        "--policy", "round_robin", "--max-concurrent-requests", "100000", "--log-level", "error",
        "--decode", place.decode_url,
    ]  # fmt: skip
    program = str(home() / router.name / "bin" / router.name)
    if router.flavour == "vllm":
        return [program, "--vllm-pd-disaggregation", "--prefill", place.prefill_url, *common]
    return [program, "launch", "--pd-disaggregation", "--prefill", place.prefill_url, str(BOOTSTRAP_PORT), *common]


def _our_command(router: Router, place: Place, folder: Path, workers: int) -> list[str]:
    bootstrap = f", bootstrap_port: {BOOTSTRAP_PORT}" if router.flavour == "sglang" else ""
    config = folder / "cluster.yaml"
    config.write_text(
        f"server: {{port: {place.port}, management_port: {place.side_port}, workers: {workers}}}\n"
        f"cluster:\n  engine: {router.flavour}\n  instances:\n"
        f"    - {{role: prefill, url: '{place.prefill_url}'{bootstrap}}}\n"
        f"    - {{role: decode, url: '{place.decode_url}'}}\n"
        "scheduling: {policy: round_robin}\n"
        "limits: {max_requests: 20000}\n"
    )
    start = [str(COMPILED_PROGRAM)] if router.name == COMPILED else [sys.executable, "-m", "coordinator"]
    return [*start, "serve", "--config", str(config)]


def versions() -> dict[str, str]:
    """Versions of the peers that can be installed, as asked for, and of what this project runs on."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==", 1) for line in lines if re.match(r"[\w.-]+==", line))
    own = {str(name): pins[name] for name in ("uvloop", "httptools", "msgspec", "aiohttp") if name in pins}
    return {**{name: requirement.partition("==")[2] for name, (requirement, _) in PEERS.items()}, **own}
