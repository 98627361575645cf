"""The metrics of instances as one page, each series under its instance's name. Pure."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MAX_SAMPLES = 20_000  # of one instance
KINDS = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+([^ \t]+)(?:[ \t]+-?[0-9]+)?[ \t]*")
_PAIR = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_LABELS = re.compile(rf"(?:{_PAIR}(?:,|$))*")
_EACH_LABEL = re.compile(rf"({_PAIR})(?:,|$)")
_TYPE = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) ([a-z]+)\s*")
_VALUE = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|Inf)|NaN", re.IGNORECASE)


class Unreadable(ValueError):
    """The text holds not a single sample."""


@dataclass(slots=True)
class Family:
    """One metric of one instance: its type, and its lines as they go out."""

    kind: str = "untyped"
    lines: list[str] = field(default_factory=list)


Families = dict[str, Family]


class Filter:
    """Which metrics are passed on.

    Args:
        allow: names, with `*` for any characters.
    """

    def __init__(self, allow: Sequence[str]) -> None:
        self._match = re.compile("|".join(map(fnmatch.translate, allow)) or r"(?!)").match

    def __call__(self, name: str) -> bool:
        """Whether the metric with this name is."""
        return self._match(name) is not None


def relabelled(text: str, labels: Mapping[str, str], allow: Filter) -> Families:
    """Read an instance's page (text format 0.0.4) and put labels to every sample.

    A label of the instance's own that is called like one of ours gets `exported_` before its name. Time stamps, help
    texts and lines that cannot be read are left out, and so is what comes after `MAX_SAMPLES` samples.

    Args:
        text: the page.
        labels: `instance` and `role`.
        allow: which metrics to keep.

    Raises:
        Unreadable: it is no such page.
    """
    ours = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    families: Families = {}
    kinds: dict[str, str] = {}
    seen = 0
    for line in text.split("\n"):
        if line.startswith("#"):
            typed = _TYPE.fullmatch(line)
            if typed and typed[2] in KINDS:
                kinds[typed[1]] = typed[2]
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None or not _VALUE.fullmatch(found[3]):
            continue
        seen += 1
        name = found[1]
        family = _family_of(name, kinds)
        if seen > MAX_SAMPLES or not (allow(family) or allow(name)):
            continue
        theirs = _beside(labels, found[2] or "")
        if theirs is None:
            continue
        kept = families.get(family)
        if kept is None:
            kept = families[family] = Family(kinds.get(family, "untyped"))
        kept.lines.append(f"{name}{{{ours}{theirs}}} {found[3]}")
    if not seen:
        raise Unreadable
    return families


def joined(pages: Iterable[Families]) -> bytes:
    """One page of all: the lines of a metric stand together, under one type.

    An instance that gives a metric another type than those before it is left out there.
    """
    kinds: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for families in pages:
        for name, family in families.items():
            if kinds.setdefault(name, family.kind) == family.kind:
                lines.setdefault(name, []).extend(family.lines)
    text = "".join(f"# TYPE {name} {kinds[name]}\n" + "\n".join(each) + "\n" for name, each in lines.items())
    return text.encode("utf-8", "backslashreplace")


def _beside(ours: Mapping[str, str], text: str) -> str | None:
    """An instance's own labels as they stand behind ours, each after a comma; None: they cannot be read."""
    if not _LABELS.fullmatch(text):
        return None
    parts: dict[str, str] = {}
    for pair in _EACH_LABEL.findall(text):
        name = pair.partition("=")[0]
        if name in ours:
            name, pair = f"exported_{name}", f"exported_{pair}"  # noqa: PLW2901  # the same label, renamed
        if name in parts:
            return None
        parts[name] = pair
    return "".join(f",{pair}" for pair in parts.values())


def _family_of(name: str, kinds: Mapping[str, str]) -> str:
    if name in kinds:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in kinds:
            return name.removesuffix(suffix)
    return name


@lru_cache(4096)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
