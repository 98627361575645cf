"""What the doctor has found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """How bad it is.

    OK: looked at, and well. NOTE: not looked at, or worth to know. WARNING: it works, but not as it should, or not for
    long. FAULT: it does not work.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


_STATUS = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.FAULT: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result.

    Attributes:
        check: what was looked at, in a word of a fixed set (docs/doctor.md).
        subject: an instance, `p0 -> d0` for a pair, a key of the file; empty: the whole.
        what: in plain words.
        advice: what to do; empty where nothing is to be done.
    """

    level: Level
    check: str
    subject: str
    what: str
    advice: str = ""


@dataclass(slots=True)
class Report:
    """All findings about one configuration."""

    file: str
    findings: list[Finding] = field(default_factory=list)
    took_s: float = 0.0

    def add(self, findings: Iterable[Finding]) -> None:
        """Take further ones."""
        self.findings.extend(findings)

    def of(self, *levels: Level) -> list[Finding]:
        """Those of these levels, in the order in which they were found."""
        return [finding for finding in self.findings if finding.level in levels]

    @property
    def status(self) -> int:
        """For the shell: 0 well, 1 warnings, 2 faults."""
        return max((_STATUS[finding.level] for finding in self.findings), default=0)


def ok(check: str, subject: str, what: str) -> Finding:
    """Looked at, and well."""
    return Finding(Level.OK, check, subject, what)


def note(check: str, subject: str, what: str, advice: str = "") -> Finding:
    """Not looked at, or worth to know."""
    return Finding(Level.NOTE, check, subject, what, advice)


def warning(check: str, subject: str, what: str, advice: str) -> Finding:
    """It works, but not as it should, or not for long."""
    return Finding(Level.WARNING, check, subject, what, advice)


def fault(check: str, subject: str, what: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(Level.FAULT, check, subject, what, advice)
