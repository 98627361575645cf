"""The table of engine protocols: one line each, or a class of the user's own by `module:Class`."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

from coordinator.core.ports import EngineProtocol
from coordinator.engines.context import EngineContext
from coordinator.engines.hybrid import HybridEngine
from coordinator.engines.microserving import MicroservingEngine
from coordinator.engines.mindie import MindieEngine
from coordinator.engines.sglang import SglangEngine
from coordinator.engines.vllm import VllmEngine


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


ENGINES: Mapping[str, EngineClass] = MappingProxyType(
    {
        "mindie": MindieEngine,
        "vllm": VllmEngine,
        "sglang": SglangEngine,
        "microserving": MicroservingEngine,
        "hybrid": HybridEngine,
    }
)


def load_engine(name: str) -> EngineClass:
    """The factory of an engine protocol by its name in the configuration.

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
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {name!r} cannot be loaded: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"engine {name!r} is not a class")  # noqa: TRY004  # the name is the wrong value
    made: Any = found
    return cast("EngineClass", made)
