"""Draws the figures: one small chart for each workload.

    python bench/plot.py RESULTS.json OUT.png

Runs in the venv of the bench tools, which has matplotlib and nothing of this project.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS_COLOUR, PEER_COLOUR = "#1f6f8b", "#b8b8b8"
TITLES = {
    "cpu_us_per_event": "CPU µs per event",
    "cpu_us_per_request": "CPU µs per request",
    "ttft_p50_ms": "TTFT p50, ms",
    "kib_per_stream": "KiB per stream",
}


def draw(results: dict[str, Any], out: Path) -> None:
    """Bars of every workload's first figure; the lower the better."""
    workloads = results["workloads"]
    columns = min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 2.5 * lines), squeeze=False)
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis, (name, rows) in zip(axes.flat, workloads.items(), strict=False):
        shown = next(key for key in next(iter(rows.values()), TITLES) if key in TITLES)
        values = [row[shown] for row in rows.values()]
        low = [value - row["lowest"] for value, row in zip(values, rows.values(), strict=True)]
        high = [row["highest"] - value for value, row in zip(values, rows.values(), strict=True)]
        colours = [OURS_COLOUR if key.startswith("pd-coordinator") else PEER_COLOUR for key in rows]
        bars = axis.barh(list(rows), values, color=colours, xerr=[low, high], error_kw={"elinewidth": 0.8})
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=4)
        axis.set_title(f"{name}: {TITLES[shown]}", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"lower is better; median and range of {results['rounds']} rounds, {results['date']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
