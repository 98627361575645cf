"""Fenced blocks of a Markdown page, and the shape of what a command prints."""

import json
import re
from dataclasses import dataclass

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A block marked `test`, and the block that says what it prints (None: it says nothing)."""

    kind: str
    code: str
    printed: str | None


def examples(page: str) -> list[Example]:
    blocks = FENCE.findall(page)
    found = []
    for (info, code), (next_info, next_code) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if info.endswith(" test"):
            shows = next_info in ("json", "text")
            found.append(Example(info.removesuffix(" test"), code, next_code if shows else None))
    return found


def shape(text: str) -> list[object]:
    """What must be the same in each run: keys and types of JSON, names and labels of metrics; not the values."""
    return [_line(line.removeprefix("data:").strip()) for line in text.splitlines() if line.strip()]


def _line(line: str) -> object:
    if line[:1] in ("{", "[") and line != "[DONE]":
        return _value(json.loads(line))
    return re.sub(r" [0-9.e+-]+$", " N", line)


def _value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_value(item) for item in value]
    return "null" if value is None else "number" if isinstance(value, float | int) else type(value).__name__
