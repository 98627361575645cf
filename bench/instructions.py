"""Counts the machine instructions of the hot paths and compares them with committed figures.

    python -m bench.instructions            print them, and what is wrong with them
    python -m bench.instructions --save     make them the baseline of this interpreter

A count does not depend on how busy the machine is. To depend little on the interpreter's build too, each is divided by
that of a calibration loop in the same run; the baseline is kept per Python version and kind of build, and an unknown
one is not judged. Counting is done by valgrind's callgrind.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.loops import LOOPS, Loop, build

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("baseline.json")
CALIBRATION = "calibration"
TOLERANCE = 0.15
SURCHARGES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "whole_vllm": ("whole_vllm_quiet", 0.06),
        "whole_vllm_keys": ("whole_vllm_quiet", 0.08),
        "whole_vllm_keys_json": ("whole_vllm_quiet", 0.08),
    }
)
"""What a loop may cost more than another one of the same run: the price of a log line, and of keys with limits."""

OPERATIONS = 400  # of each loop, at least
LIMIT_S = 300.0
MARK = "getppid"  # a function of libc that nothing else calls: callgrind starts a new count whenever it is entered


class NotCounted(Exception):
    """Instructions cannot be counted here; the text says why."""


@dataclass(frozen=True, slots=True)
class Count:
    """Instructions of one operation: as such, and as a multiple of the calibration loop's."""

    instructions: float
    ratio: float


def interpreter() -> str:
    """What a baseline holds for: implementation, version, machine, kind of build."""
    built = sysconfig.get_config_var("CONFIG_ARGS") or ""
    kind = "optimised" if "--enable-optimizations" in built else "plain"
    major, minor = sys.version_info[:2]
    return f"{platform.python_implementation().lower()}-{major}.{minor}-{platform.machine()}-{kind}"


def count(limit_s: float = LIMIT_S) -> dict[str, Count]:
    """Run every loop under callgrind.

    Raises:
        NotCounted: there is no valgrind.
        RuntimeError: the loops failed: they are out of step with the code, or valgrind cannot run this interpreter.
        subprocess.TimeoutExpired: not done in time.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise NotCounted("valgrind is not installed")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "count")
        command = [
            valgrind, "--tool=callgrind", f"--callgrind-out-file={out}", f"--dump-before={MARK}",
            sys.executable, "-m", "bench.instructions", "--loops",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"the loops failed under valgrind: {ran.stderr.strip()[-600:]}")
        # the first part is the start of the interpreter; one part per loop follows
        totals = [_total(Path(f"{out}.{number + 2}")) for number in range(len(LOOPS))]
    operations = [int(word) for word in ran.stdout.split()]
    each = dict(zip(LOOPS, map(_divide, totals, operations), strict=True))
    return {name: Count(value, value / each[CALIBRATION]) for name, value in each.items()}


def judge(counts: Mapping[str, Count], baseline: Mapping[str, float], tolerance: float = TOLERANCE) -> list[str]:
    """One sentence for each loop that costs more than its baseline allows, or has none."""
    wrong = []
    for name, counted in counts.items():
        if name == CALIBRATION:
            continue
        before = baseline.get(name)
        if before is None:
            wrong.append(f"{name}: has no baseline")
        elif counted.ratio > before * (1 + tolerance):
            wrong.append(f"{name}: {counted.ratio:.3f} of the calibration loop, {counted.ratio / before - 1:+.0%}")
    return wrong + [f"{name}: is in the baseline and was not counted" for name in baseline if name not in counts]


def judge_surcharges(counts: Mapping[str, Count], allowed: Mapping[str, tuple[str, float]] = SURCHARGES) -> list[str]:
    """One sentence for each loop that costs too much more than the one that it is measured by; holds anywhere."""
    wrong = []
    for name, (plain, share) in allowed.items():
        more = counts[name].instructions / counts[plain].instructions - 1
        if more > share:
            wrong.append(f"{name}: {more:+.1%} to {plain}, {share:+.0%} is allowed")
    return wrong


def read_baseline() -> dict[str, dict[str, float]]:
    """Ratios by interpreter and loop."""
    found: dict[str, dict[str, float]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return found


def _divide(total: int, operations: int) -> float:
    return total / operations


def _total(part: Path) -> int:
    for line in part.read_text().splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise RuntimeError("callgrind wrote a file without totals")


# --- under callgrind


def _run_loops() -> None:
    with contextlib.closing(asyncio.new_event_loop()) as event_loop:
        made = [build(name, event_loop) for name in LOOPS]
        for loop in made:
            _passes(loop, 3)  # the interpreter has specialised its code
        gc.collect()
        gc.disable()
        done = []
        for loop in made:
            passes = math.ceil(OPERATIONS / loop.operations)
            os.getppid()
            _passes(loop, passes)
            done.append(passes * loop.operations)
        os.getppid()
        print(*done)


def _passes(loop: Loop, passes: int) -> None:
    run = loop.run
    for _ in range(passes):
        run()


# --- by hand


def _save(counts: Mapping[str, Count]) -> None:
    ratios = {name: round(counted.ratio, 4) for name, counted in counts.items() if name != CALIBRATION}
    known = {**read_baseline(), interpreter(): ratios}
    BASELINE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def main() -> int:
    """Exit status: 0, 1 for a regression, 2 where nothing can be counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write the baseline of this interpreter")
    parser.add_argument("--loops", action="store_true", help="only run the loops: what callgrind looks at")
    args = parser.parse_args()
    if args.loops:
        _run_loops()
        return 0
    try:
        counts = count()
    except NotCounted as error:
        print(error, file=sys.stderr)
        return 2
    if args.save:
        _save(counts)
    baseline = read_baseline().get(interpreter())
    for name, counted in counts.items():
        before = (baseline or {}).get(name)
        change = "" if before is None else f"{counted.ratio / before - 1:+8.1%}"
        print(f"{name:22}{counted.instructions:12.0f} instructions{counted.ratio:9.3f}{change}")
    wrong = judge_surcharges(counts)
    if baseline is None:
        print(f"no baseline for {interpreter()}: not judged by it")
    else:
        wrong += judge(counts, baseline)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
