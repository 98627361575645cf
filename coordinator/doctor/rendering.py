"""The report for people and for programs."""

import json
from collections.abc import Iterator

from .findings import Finding, Level, Report

_ORDER = (Level.FAULT, Level.WARNING, Level.NOTE)
_VERDICTS = (
    "all is well",
    "it works, but see the warnings",
    "something is wrong",
)


def as_text(report: Report, *, all_of_it: bool = False) -> str:
    """What is wrong first, each with what to do; what is well in one line, or (`all_of_it`) in full."""
    lines: list[str] = []
    levels = (*_ORDER, Level.OK) if all_of_it else _ORDER
    for level in levels:
        for finding in report.of(level):
            lines += _finding(finding)
    counts = ", ".join(
        f"{len(found)} {level}{'s' if len(found) != 1 and level is not Level.OK else ''}"
        for level in (*_ORDER, Level.OK)
        if (found := report.of(level))
    )
    lines.append(f"{report.file}: {_VERDICTS[report.status]} ({counts or 'nothing to look at'}; {report.took_s:.1f} s)")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """One JSON object."""
    return json.dumps(
        {
            "file": report.file,
            "status": report.status,
            "seconds": round(report.took_s, 3),
            "findings": [
                {
                    "level": finding.level,
                    "check": finding.check,
                    "subject": finding.subject,
                    "what": finding.what,
                    "advice": finding.advice,
                }
                for finding in report.findings
            ],
        },
        indent=2,
    )


def _finding(finding: Finding) -> Iterator[str]:
    subject = f" {finding.subject}" if finding.subject else ""
    yield f"{finding.level.upper():<8}{finding.check}{subject}: {finding.what}"
    if finding.advice:
        yield f"        -> {finding.advice}"
