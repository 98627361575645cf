"""Figures as text, as Markdown, and into docs/performance.md."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.routers import OURS
from bench.workloads import LABELS, SHOWN

Rows = Mapping[str, Mapping[str, float]]
Results = Mapping[str, Any]


class NoSection(ValueError):
    """The page lacks the marks of a section."""


def ratios(workload: str, rows: Rows) -> dict[str, tuple[float, str]]:
    """For each of our rows: the first figure divided by the best peer's, and that peer."""
    figure = SHOWN[workload][0]
    peers = {key: row[figure] for key, row in rows.items() if not _ours(key) and not row["wrong"]}
    if not peers:
        return {}
    best = min(peers, key=peers.__getitem__)
    if not peers[best]:
        return {}
    return {key: (row[figure] / peers[best], best) for key, row in rows.items() if _ours(key)}


def text(results: Results) -> str:
    """Everything for the terminal."""
    lines: list[str] = []
    for name, rows in results["workloads"].items():
        lines += ["", f"{name} (median of {results['rounds']})", *_columns(_table(name, rows))]
    if results["micro"]:
        lines += ["", "micro-benchmarks", *_columns(_micro(results["micro"]))]
    return "\n".join(lines)


def markdown(results: Results) -> dict[str, str]:
    """The sections of docs/performance.md that are made from figures, by name."""
    sections = {}
    if results["workloads"]:
        tables = [f"### {name}\n\n{_grid(_table(name, rows))}" for name, rows in results["workloads"].items()]
        sections = {"machine": _machine(results), "figures": "\n\n".join(tables)}
    if results["micro"]:
        sections["micro"] = _grid(_micro(results["micro"]))
    return sections


def before_after(before: Results, after: Results) -> str:
    """What has become of our first figures, as such and as the ratio to the best peer of the same run."""
    table = [["workload", "row", "figure", "before", "after", "ratio before", "ratio after"]]
    for name, rows in after["workloads"].items():
        figure, old_rows = SHOWN[name][0], before["workloads"].get(name, {})
        old_ratios, new_ratios = ratios(name, old_rows), ratios(name, rows)
        for key in filter(_ours, rows):
            old = old_rows.get(key)
            table.append([
                name, key, LABELS[figure], "-" if old is None else f"{old[figure]:g}", f"{rows[key][figure]:g}",
                _ratio(old_ratios.get(key)), _ratio(new_ratios.get(key)),
            ])  # fmt: skip
    return _grid(table)


def write_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Put each section between its marks, `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`.

    Raises:
        NoSection: a mark is missing; the page stays as it is.
    """
    content = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        head, found, rest = content.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise NoSection(f"{page} has no section {name}")
        content = f"{head}{begin}\n\n{section}\n\n{end}{tail}"
    page.write_text(content, encoding="utf-8")


# --- tables: lists of rows, the head first


def _ours(key: str) -> bool:
    return key.startswith(OURS)


def _ratio(found: tuple[float, str] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f}"


def _table(name: str, rows: Rows) -> list[list[str]]:
    figures, compared = SHOWN[name], ratios(name, rows)
    table = [["router/engine", *(LABELS[figure] for figure in figures), "spread", "to the best peer", "wrong"]]
    for key, row in rows.items():
        spread = f"{row['lowest']:g}-{row['highest']:g}"
        found = compared.get(key)
        against = "" if found is None else f"{found[0]:.2f} of {found[1]}"
        table.append([key, *(f"{row[figure]:g}" for figure in figures), spread, against, f"{row['wrong']:g}"])
    return table


def _micro(rows: Rows) -> list[list[str]]:
    head = ["operation", "µs", "to calibration"]
    return [head, *([name, f"{row['us']:g}", f"{row['ratio']:.2f}"] for name, row in rows.items())]


def _machine(results: Results) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    size = "**A quick run: these figures mean nothing.** " if results["quick"] else ""
    return (
        f"{size}{results['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, load average {machine['load']} at the start; "
        f"median of {results['rounds']} rounds. {versions}."
    )


def _columns(table: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *rest = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _grid(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
