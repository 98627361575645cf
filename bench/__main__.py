"""`make bench`: the coordinator against its peers, and its hot paths by themselves. See docs/performance.md."""

import argparse
import datetime as dt
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.parts import Settings, run_flames, run_micro, run_workloads
from bench.report import before_after, markdown, text, write_sections
from bench.routers import COMPILED, FLAVOURS, OURS, PEERS, ROOT, install_tools, routers, versions
from bench.workloads import WORKLOADS

PARTS = ("workloads", "micro", "flame")
LATEST = Path(__file__).parent / "results/latest.json"
PAGE = ROOT / "docs/performance.md"
PICTURES = ROOT / "docs/performance"
PLOT_S = 120


def _names(known: tuple[str, ...]) -> Any:
    def read(given: str) -> list[str]:
        names = [name for name in given.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; there are: {', '.join(known)}")
        return names

    return read


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", type=_names(PARTS), default="workloads,micro", help=f"of {','.join(PARTS)}; default: %(default)s")
    add("--workloads", type=_names(tuple(WORKLOADS)), default=",".join(WORKLOADS), help="default: %(default)s")
    add("--flavours", type=_names(FLAVOURS), default=",".join(FLAVOURS), help="engines; default: %(default)s")
    add("--routers", type=_names((OURS, COMPILED, *PEERS)), default="", help="only these")
    add("--rounds", type=int, default=3, help="figures are medians of so many; default: %(default)s")
    add("--workers", type=int, default=1, help="processes of the coordinator")
    add("--quick", action="store_true", help="tiny loads, to see that everything runs")
    add("--before", type=Path, help="results of an earlier run, to be compared with")
    add("--write-docs", action="store_true", help="tables, plot and figures go to docs/performance")
    return parser.parse_args()


def _measure(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    results: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe(),
        "versions": versions(),
        "rounds": settings.rounds,
        "quick": settings.quick,
        "workloads": {},
        "micro": {},
    }
    if "workloads" in args.parts:
        found = routers(args.flavours, args.routers)
        results["workloads"] = run_workloads(args.workloads, found, settings)
    if "micro" in args.parts:
        results["micro"] = run_micro(quick=settings.quick)
    return results


def _write_docs(results: dict[str, Any], before: dict[str, Any] | None) -> None:
    sections = markdown(results)
    if results["workloads"]:
        PICTURES.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LATEST, PICTURES / "figures.json")
        if _plot(PICTURES / "figures.png"):
            sections["figures"] = f"![First figures](performance/figures.png)\n\n{sections['figures']}"
    if before is not None:
        sections["before-after"] = before_after(before, results)
    write_sections(PAGE, sections)


def _plot(out: Path) -> bool:
    tools = install_tools()
    if tools is None:
        return False
    plot = [str(tools / "python"), str(Path(__file__).with_name("plot.py")), str(LATEST), str(out)]
    subprocess.run(plot, check=True, timeout=PLOT_S)
    return True


def _flames(args: argparse.Namespace, settings: Settings) -> None:
    made = run_flames(PICTURES if args.write_docs else LATEST.parent, args.flavours[0], settings)
    print(*made, sep="\n")
    if args.write_docs and made:
        links = ", ".join(f"[{path.stem.removeprefix('flame-')}](performance/{path.name})" for path in made)
        write_sections(PAGE, {"flame": f"{args.flavours[0]}: {links}"})


def main() -> int:
    """Measure, print, save."""
    args = _arguments()
    settings = Settings(rounds=args.rounds, quick=args.quick, workers=args.workers)
    before = None if args.before is None else json.loads(args.before.read_text())
    results = _measure(args, settings)
    if results["workloads"] or results["micro"]:
        LATEST.write_text(json.dumps(results, indent=1) + "\n")
        print(text(results))
        if before is not None:
            print("", before_after(before, results), sep="\n")
        if args.write_docs:
            _write_docs(results, before)
    if "flame" in args.parts:
        _flames(args, settings)
    return int(any(row["wrong"] for rows in results["workloads"].values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
