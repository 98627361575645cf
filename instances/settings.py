"""Engine-specific settings: frozen dataclasses, read from names and values."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

_Settings = TypeVar("_Settings")


def read_settings(defaults: _Settings, given: Mapping[str, object]) -> _Settings:
    """`defaults` with what is given, texts included; raises ValueError for an unknown name or a wrong value."""
    known: Any = defaults
    names = [field.name for field in dataclasses.fields(known)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"no setting {unknown[0]!r}; there are: {', '.join(names)}")
    typed = {name: type(getattr(known, name))(value) for name, value in given.items()}
    replaced: _Settings = dataclasses.replace(known, **typed)
    return replaced
