"""What was known when a configuration was read: its file, and the names that the shelves offer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .errors import KeyPath

ENGINES = ("mindie", "vllm", "sglang", "microserving", "xllm", "disaggpb", "hybrid")
_NO_LINES: Mapping[KeyPath, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Known:
    """Names that a file may use besides `module:Class`.

    Attributes:
        engines: names of the built-in engine protocols.
        policies: names of the built-in policies; None: any name is taken, whoever builds the policy refuses it.
        folder: where the file is: paths in it begin here, and must be there; None: paths are left as they are.
    """

    engines: tuple[str, ...] = ENGINES
    policies: tuple[str, ...] | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where settings come from; no part of what they mean, so all sources are equal."""

    name: str = field(default="configuration", compare=False)
    lines: Mapping[KeyPath, int] = field(default_factory=lambda: _NO_LINES, compare=False)
    known: Known = field(default=Known(), compare=False)
