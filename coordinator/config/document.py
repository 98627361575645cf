"""YAML text to plain values, with the line of every key; safe for files of any origin.

Only what a configuration needs is read: one document of mappings, lists and scalars. Aliases are refused (a few lines
of them expand to gigabytes), so are tags, keys given twice and anything nested deeper than the models are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, Finding, KeyPath, Problem, shown

MAX_BYTES = 16 * 2**20
_MAX_DEPTH = 16
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset(_TAG + name for name in ("null", "bool", "int", "float"))
_TEXT = _TAG + "str"


@dataclass(slots=True)
class Document:
    """A file's values.

    Attributes:
        data: the root mapping.
        lines: the line (from 1) of each key and of each list item.
        findings: what cannot be read although the YAML is well-formed.
        unread: the paths of those among them whose value is not in `data`; it stands there as None.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unread: set[KeyPath] = field(default_factory=set)


def read_text(path: Path) -> str:
    """The file's text, without a byte order mark.

    Raises:
        ConfigError: it cannot be read, is larger than 16 MiB or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise _failed(str(path), None, f"cannot be read: {reason}") from None
    except ValueError:
        raise _failed(shown(str(path)), None, "cannot be read: not a file name") from None
    if len(data) > MAX_BYTES:
        raise _failed(str(path), None, f"is larger than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _failed(str(path), data.count(b"\n", 0, error.start) + 1, "is not UTF-8 text") from None


def read_document(text: str, name: str, list_key: str | None = None) -> Document:
    """Read the one mapping that the text holds.

    Args:
        text: in YAML.
        name: of the file, for messages.
        list_key: set: a list stands for a mapping with that list below this key.

    Raises:
        ConfigError: the text is empty, is not YAML, or holds something other than one mapping.
    """
    try:
        document = _Reader(text).read(list_key)
    except _NotMapping as error:
        raise _failed(name, error.line, error.reason) from None
    except yaml.YAMLError as error:
        raise _failed(name, *_explained(error, text)) from None
    except UnicodeEncodeError:
        raise _failed(name, None, "is not UTF-8 text") from None
    if document is None:
        raise _failed(name, None, "the file is empty")
    return document


class _NotMapping(Exception):
    """The root is not one mapping."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


class _Reader:
    """Builds values from libyaml's events (which are made in a loop, so no nesting can exhaust the stack)."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))
        self._resolver = yaml.resolver.Resolver()
        self._constructor = yaml.constructor.SafeConstructor()
        self._document = Document()

    def read(self, list_key: str | None) -> Document | None:
        """The document; None for a file without one."""
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        root = next(self._events)
        if isinstance(root, yaml.ScalarEvent) and not root.value and root.implicit[0]:
            return None
        if list_key is not None and isinstance(root, yaml.SequenceStartEvent):
            self._document.lines[list_key,] = _line(root)
            self._document.data = {list_key: self._list((list_key,), 1)}
        elif isinstance(root, yaml.MappingStartEvent):
            self._document.data = self._mapping((), 0)
        else:
            raise _NotMapping(_line(root), f"must hold keys like 'cluster:', not {_kind(root)}")
        next(self._events)  # the document's end
        further = next(self._events)
        if not isinstance(further, yaml.StreamEndEvent):
            raise _NotMapping(_line(further), "a second document begins; one file holds one")
        return self._document

    def _refuse(self, path: KeyPath, reason: str, hint: str | None = None) -> None:
        self._document.findings.append(Finding(path, reason, hint))
        self._document.unread.add(path)

    def _value(self, event: Any, path: KeyPath, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._refuse(path, "aliases (*name) are not read", "write the value out")
        if event.tag not in (None, "!", _TEXT, *_SCALARS):
            self._refuse(path, f"the tag {shown(event.tag.removeprefix(_TAG))} is not allowed")
            return self._skip(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if depth > _MAX_DEPTH:
            self._refuse(path, "is nested too deeply")
            return self._skip(event)
        return self._mapping(path, depth) if isinstance(event, yaml.MappingStartEvent) else self._list(path, depth)

    def _scalar(self, event: Any, path: KeyPath) -> Any:
        tag = event.tag or self._resolved(event)
        if tag not in _SCALARS:
            return event.value
        try:
            return self._constructor.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, LookupError, yaml.YAMLError):
            return self._refuse(path, f"{shown(event.value)} cannot be read as a value of type {tag[len(_TAG) :]}")

    def _resolved(self, event: Any) -> str:
        """The tag that YAML 1.1 gives to a scalar without one."""
        return str(self._resolver.resolve(yaml.ScalarNode, event.value, event.implicit))  # type: ignore[no-untyped-call]

    def _list(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self._document.lines[here] = _line(event)
            items.append(self._value(event, here, depth + 1))
        return items

    def _mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines = self._document.lines
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._document.findings.append(Finding(path, "keys must be text", line=_line(event)))
                self._skip(event)
                self._skip(next(self._events))
                continue
            key = event.value
            here = (*path, key)
            if key in found:
                reason = f"key given twice; the first one is in line {lines[here]}"
                self._document.findings.append(Finding(here, reason, line=_line(event)))
                self._skip(next(self._events))
                continue
            lines[here] = _line(event)
            found[key] = self._value(next(self._events), here, depth + 1)
        return found

    def _skip(self, event: Any) -> None:
        """Read on to the end of the value that begins with this event."""
        depth = 0
        while True:
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth <= 0:
                return
            event = next(self._events)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _kind(event: Any) -> str:
    return "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"


def _explained(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    """Line and reason of a syntax error; libyaml puts an unexpected end behind the last line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        place = getattr(error, "position", None)
        line = text.count("\n", 0, place) + 1 if isinstance(place, int) else None
        return line, f"is not YAML: {str(error).splitlines()[0]}"
    words = ", ".join(part for part in (error.context, error.problem) if part)
    last = max(1, len(text.splitlines()))
    line = min(error.problem_mark.line + 1, last) if error.problem_mark else None
    begun = min(error.context_mark.line + 1, last) if error.context_mark else line
    since = f" (begun in line {begun})" if begun != line else ""
    return line, f"is not YAML: {words}{since}"


def _failed(name: str, line: int | None, reason: str) -> ConfigError:
    return ConfigError(name, [Problem("", line, reason)])
