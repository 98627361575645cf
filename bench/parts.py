"""The parts of `make bench`: workloads, micro-benchmarks, flame graphs."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.measure import Figures, NotMeasured, bench, clients, measure
from bench.processes import tree
from bench.routers import OURS, ROOT, Router, install_tools
from bench.workloads import SHOWN, WORKLOADS, Workload, quick

FLAMES = ("stream", "unary")
FLAME_S = 20.0
FLAME_RATE = 250
MICRO_S = 600.0
REMARK = re.compile(r"^\s*//.*\n", re.MULTILINE)  # of the sampler's script
TITLE = re.compile(r'(<text id="title"[^>]*>)[^<]*(<)')  # the sampler puts its whole command line there
Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says of the workloads."""

    rounds: int
    quick: bool
    workers: int

    def workload(self, name: str) -> Workload:
        """A workload by name, in the size asked for."""
        return quick(WORKLOADS[name]) if self.quick else WORKLOADS[name]


# --- workloads


def run_workloads(names: Sequence[str], routers: Sequence[Router], settings: Settings) -> dict[str, dict[str, Row]]:
    """Medians by workload and router; routers take turns within every round."""
    return {name: _run_workload(name, routers, settings) for name in names}


def _run_workload(name: str, routers: Sequence[Router], settings: Settings) -> dict[str, Row]:
    runs: dict[str, list[Figures]] = {}
    for turn in range(settings.rounds):
        for router in routers:
            said = f"{name} {turn + 1}/{settings.rounds} {router.key}"
            try:
                figures = measure(router, settings.workload(name), workers=settings.workers)
            except (NotMeasured, OSError, subprocess.SubprocessError) as error:
                print(f"{said}: not measured: {error}", file=sys.stderr)
                continue
            first = SHOWN[name][0]
            print(f"{said}: {first} {figures[first]}", file=sys.stderr)
            if figures["wrong"]:
                print(f"{said}: WRONG ANSWERS: {figures['wrong']}", file=sys.stderr)
            runs.setdefault(router.key, []).append(figures)
    return {key: _medians(name, found) for key, found in runs.items()}


def _medians(name: str, runs: Sequence[Figures]) -> Row:
    row: Row = {figure: median(run[figure] for run in runs) for figure in SHOWN[name]}
    row["wrong"] = sum(sum(run["wrong"].values()) for run in runs)
    row["lowest"] = min(run[SHOWN[name][0]] for run in runs)
    row["highest"] = max(run[SHOWN[name][0]] for run in runs)
    return row


# --- micro-benchmarks


def run_micro(*, quick: bool) -> dict[str, Row]:
    """Median time of one operation in µs, and as a multiple of the calibration loop's, by loop."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "micro.json")
        command = [
            sys.executable, "-m", "pytest", "bench/micro", "-n", "0", "--quiet", "--benchmark-quiet",
            "--benchmark-disable-gc", f"--benchmark-max-time={0.05 if quick else 1.0}", f"--benchmark-json={out}",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=MICRO_S)
        found = json.loads(out.read_text())["benchmarks"]
    times = {one["params"]["name"]: one["stats"]["median"] / one["extra_info"]["operations"] * 1e6 for one in found}
    measure_us = times["calibration"]
    return {name: {"us": round(us, 3), "ratio": round(us / measure_us, 2)} for name, us in times.items()}


# --- flame graphs


def run_flames(folder: Path, flavour: str, settings: Settings) -> list[Path]:
    """Sample the coordinator under load; one SVG for each of FLAMES."""
    tools = install_tools()
    if tools is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [_flame(tools / "py-spy", folder / f"flame-{name}.svg", name, flavour, settings) for name in FLAMES]


def _flame(py_spy: Path, out: Path, name: str, flavour: str, settings: Settings) -> Path:
    """Let the sampler start the coordinator: a process may look into its own child without further rights."""
    work = settings.workload(name)
    record = [str(py_spy), "record", "--format", "flamegraph", "--rate", str(FLAME_RATE), "--output", str(out), "--"]
    with bench(Router(OURS, flavour), work, wrap=lambda command: [*record, *command]) as made:
        end_s = time.monotonic() + (1 if settings.quick else FLAME_S)
        while time.monotonic() < end_s:
            clients(made.url, work, requests=work.requests)
        # the sampler writes its file when the program that it has started ends
        _stop_child(made.process.pid)
        made.process.wait(30)
    titled = TITLE.sub(rf"\g<1>pd-coordinator, {flavour}, {name}\g<2>", out.read_text())
    out.write_text(REMARK.sub("", titled))
    return out


def _stop_child(pid: int) -> None:
    for child in tree(pid)[1:]:
        subprocess.run(["kill", "-TERM", str(child)], check=False)
