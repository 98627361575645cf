"""What can be wrong with a configuration, and how it is told: one line per problem, all of them at once."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of mappings and positions in lists, from the root of the file down."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_CHARS = 60
_SHOWN_BITS = 128
_COMPARED_CHARS = 64


class Refusal(ValueError):
    """A value that cannot be used: `reason` in plain words, and where there is one, a `hint` what to write instead."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{reason}; {hint}" if hint else reason)
        self.reason = reason
        self.hint = hint


class OptionError(ValueError):
    """An engine refuses one engine-specific key of an instance.

    Attributes:
        key: the key as it was given.
        reason: in plain words, without the key.
        valid: every key that the engine knows; where `key` is none of them, the nearest one of these and of the keys
            that all instances have is shown.
    """

    def __init__(self, key: str, reason: str, valid: Sequence[str] = ()) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason
        self.valid = tuple(valid)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that is not yet located in the file, unless `line` says where it is."""

    path: KeyPath
    reason: str
    hint: str | None = None
    line: int | None = None

    def located(self, lines: Mapping[KeyPath, int]) -> "Problem":
        """The problem with the line of its key, or of the nearest one above it that has a line."""
        return Problem(dotted(self.path), self.line or line_of(self.path, lines), self.reason, self.hint)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path_in_file: dotted key path like `cluster.instances[1].role`; empty for the file as a whole.
        line: counted from 1; None where there is no line to point at.
        reason: in plain words, one line.
        hint: what to write instead, where that can be said.
    """

    path_in_file: str
    line: int | None
    reason: str
    hint: str | None = None

    def text(self, name: str = "") -> str:
        """The problem as one line; `name` is the file's."""
        where = name if self.line is None else f"{name}:{self.line}"
        words = f"{self.reason}; {self.hint}" if self.hint else self.reason
        return ": ".join(part for part in (where, self.path_in_file, words) if part)


class ConfigError(Exception):
    """The configuration cannot be used; its text has one line for each problem.

    Attributes:
        name: the file as it was named by the caller.
        problems: in the order of the file.
    """

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = sorted(set(problems), key=lambda problem: (problem.line or 0, problem.path_in_file))
        super().__init__("\n".join(problem.text(name) for problem in self.problems))


def dotted(path: KeyPath) -> str:
    """`("cluster", "instances", 0, "role")` as `cluster.instances[0].role`; odd keys are quoted."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if _PLAIN_KEY.fullmatch(step) else shown(step)
            text += f".{name}" if text else name
    return text


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """The line of the key, or of the nearest one above it that has a line."""
    return next((lines[path[:size]] for size in range(len(path), -1, -1) if path[:size] in lines), None)


def shown(value: object) -> str:
    """A value as a message shows it: one line, shortened."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}..."
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "a huge number"
    return json.dumps(value, default=repr)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word[:_COMPARED_CHARS].lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A hint at the nearest known word, or None where none is near."""
    found = nearest(word, known)
    return f"did you mean '{found}'?" if found else None
