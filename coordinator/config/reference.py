"""Every key of the file, read off the models: for messages, the JSON Schema and the tests of the documentation."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from .errors import KeyPath
from .models import Settings


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        path: dotted; `[]` stands for the items of a list, as in `cluster.instances[].role`.
        name: its last part.
        required: whether it has no default.
        default: the value where it is left out; None also for required ones.
        description: effect and unit.
        section: whether it holds further keys and no value of its own.
    """

    path: str
    name: str
    required: bool
    default: Any
    description: str
    section: bool


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """All keys in the order of the file, sections before what they hold."""
    return tuple(_keys(Settings, ""))


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of cluster.yaml."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(),
        "title": "cluster.yaml",
    }


def keys_at(path: KeyPath, root: type[BaseModel]) -> tuple[str, ...]:
    """The keys that the mapping at `path` below `root` may have by name; empty where none is known."""
    model: type[BaseModel] | None = root
    for step in path:
        if isinstance(step, str):
            found = model.model_fields.get(step) if model else None
            model = _model_in(found.annotation) if found else None
    return tuple(model.model_fields) if model else ()


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, found in model.model_fields.items():
        inner = _model_in(found.annotation)
        path = prefix + name
        is_list = isinstance(found.default, tuple)
        has_value = is_list or not isinstance(found.default, BaseModel)
        default = None if found.is_required() or not has_value else found.default
        yield Key(path, name, found.is_required(), default, found.description or "", section=not has_value)
        if inner:
            yield from _keys(inner, f"{path}[]." if is_list else f"{path}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type holds, if it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
