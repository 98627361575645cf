"""The table of engine protocols: one line each, or a class of the user's own by `module:Class` or `file.py:Class`."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

from coordinator.core.instance import Instance
from coordinator.core.ports import EngineProtocol
from coordinator.engines.context import EngineContext
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.engines.hybrid import HybridEngine
from coordinator.engines.microserving import MicroservingEngine, pattern_of
from coordinator.engines.mindie import MindieEngine
from coordinator.engines.sglang import SglangEngine
from coordinator.engines.vllm import VllmEngine
from coordinator.engines.xllm import XllmEngine
from coordinator.sdk.loading import load_file
from coordinator.sdk.router import Router

Flaw = tuple[Instance, str]
METHODS = ("options", "attach", "detach", "probe", "serve", "call", "aclose")  # of core.ports.EngineProtocol


class EngineClass(Protocol):
    """What the table holds: a class that makes an engine protocol, and checks its keys before there is one."""

    def __call__(self, context: EngineContext, /) -> EngineProtocol:
        """Make the one object of this protocol."""
        ...

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """See core.ports.EngineProtocol.options."""
        ...


@runtime_checkable
class HasSettings(Protocol):
    """An engine class with settings of its own, in the section `engines` of the configuration."""

    @staticmethod
    def settings(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate the settings and fill in the defaults; raises config.OptionError, or ValueError with a sentence."""
        ...


@runtime_checkable
class HasChecks(Protocol):
    """An engine class that looks at its instances together before anything is started."""

    @classmethod
    def check(cls, settings: Mapping[str, object], instances: Sequence[Instance], default: object) -> Iterator[Flaw]:
        """What is wrong with them: the instance, and a sentence.

        Args:
            settings: of the engine, validated.
            instances: of the configuration, as far as they speak its protocol.
            default: the tokenizer of instances that have none of their own; None: there is none.
        """
        ...


ENGINES: Mapping[str, EngineClass] = MappingProxyType(
    {
        "mindie": MindieEngine,
        "vllm": VllmEngine,
        "sglang": SglangEngine,
        "microserving": MicroservingEngine,
        "xllm": XllmEngine,
        "disaggpb": DisaggpbEngine,
        "hybrid": HybridEngine,
    }
)


def load_engine(name: str) -> EngineClass:
    """The factory of an engine protocol by its name in the configuration.

    A class of the user's own is an engine protocol itself, or a Router of coordinator.sdk. A relative path of a file
    begins where the process works; the configuration gives absolute ones.

    Raises:
        ValueError: no such engine, in a sentence that lists those there are.
    """
    factory = ENGINES.get(name)
    if factory is not None:
        return factory
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"unknown engine {name!r}; one of: {', '.join(ENGINES)}, or module:Class")
    try:
        module = load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        found: Any = getattr(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"engine {name!r} cannot be loaded: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"engine {name!r} is not a class")  # noqa: TRY004  # the name is the wrong value
    if issubclass(found, Router):
        return pattern_of(found)
    lacking = [method for method in METHODS if not callable(getattr(found, method, None))]
    if lacking:
        raise ValueError(
            f"engine {name!r} is neither a Router of coordinator.sdk nor an engine protocol: it has no "
            f"{', '.join(lacking)}"
        )
    made: Any = found
    return cast("EngineClass", made)
