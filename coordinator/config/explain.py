"""pydantic's complaints in plain words, each with the nearest valid key or value."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import Finding, KeyPath, Refusal, did_you_mean, nearest, shown
from .reference import all_keys, keys_at

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text",
    "model_type": "a mapping of keys",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
}
_QUOTED = re.compile(r"'([^']*)'")


def explain(error: ValidationError, data: Any, root: type[BaseModel]) -> Iterator[Finding]:
    """Findings for a validation error of `root` over `data`."""
    for details in error.errors(include_url=False):
        kind = details["type"]
        path = _real(details["loc"], data, is_missing=kind == "missing")
        if kind == "missing":
            yield _missing(path, data, root)
        elif kind == "extra_forbidden":
            yield unknown_key(path, keys_at(path[:-1], root))
        else:
            yield Finding(path, *_reason(kind, details.get("ctx", {}), details["input"]))


def unknown_key(path: KeyPath, valid: tuple[str, ...]) -> Finding:
    """The finding for a key that is none of the `valid` ones."""
    name = str(path[-1])
    hint = did_you_mean(name, valid) or _elsewhere(name)
    return Finding(path, "unknown key", hint or (f"known keys: {', '.join(valid)}" if valid else None))


def _missing(path: KeyPath, data: Any, root: type[BaseModel]) -> Finding:
    """A required key is missing; where a mistyped one stands in its place, that one is the finding."""
    *above, name = path
    holder = _at(tuple(above), data)
    valid = keys_at(tuple(above), root)
    given = [key for key in holder if isinstance(key, str) and key not in valid] if isinstance(holder, Mapping) else []
    for key in given:
        if nearest(key, valid) == name:
            return unknown_key((*above, key), valid)
    return Finding(path, "missing; this key is required")


def _elsewhere(name: str) -> str | None:
    """Where a key of this very name belongs, if there is one."""
    places = [key.path for key in all_keys() if key.name == name]
    return f"did you mean '{places[0]}'?" if len(places) == 1 else None


def _reason(kind: str, context: Mapping[str, Any], given: object) -> tuple[str, str | None]:
    if isinstance(refusal := context.get("error"), Refusal):
        return refusal.reason, refusal.hint
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {_typed(given)}", _type_hint(kind, given)
    if kind in ("literal_error", "enum"):
        allowed = _QUOTED.findall(context["expected"])
        hint = did_you_mean(given, allowed) if isinstance(given, str) else None
        return f"must be one of: {', '.join(allowed)}; not {shown(given)}", hint
    if kind == "string_too_short":
        return "must not be empty", None
    if kind in _BOUNDS:
        bounds = {name: int(bound) if bound == int(bound) else bound for name, bound in context.items()}
        return f"{_BOUNDS[kind].format(**bounds)}, not {shown(len(given) if isinstance(given, str) else given)}", None
    return f"cannot be used ({kind.replace('_', ' ')})", None


def _typed(given: object) -> str:
    return f"text {shown(given)}" if isinstance(given, str) else shown(given)


def _type_hint(kind: str, given: object) -> str | None:
    """How to write what was probably meant."""
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        return f'put it in quotes: "{shown(given)}"'
    if kind in ("int_type", "float_type") and isinstance(given, str) and re.fullmatch(r"\d{1,15}", given):
        return f"leave out the quotes: {given}"
    return None


def _real(location: tuple[int | str, ...], data: Any, *, is_missing: bool) -> KeyPath:
    """A pydantic location without the steps that are no keys (tags of unions)."""
    path: list[str | int] = []
    for position, step in enumerate(location):
        if _has(data, step):
            data = data[step]
        elif not is_missing or position < len(location) - 1:
            continue
        path.append(step)
    return tuple(path)


def _has(data: Any, step: int | str) -> bool:
    if isinstance(data, Mapping):
        return step in data
    return isinstance(data, (list, tuple)) and isinstance(step, int) and step < len(data)


def _at(path: KeyPath, data: Any) -> Any:
    for step in path:
        data = data[step]
    return data
