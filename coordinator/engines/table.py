"""The table of engine protocols: one line each, or a class of the user's own by `module:Class`."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from coordinator.core.ports import EngineProtocol
from coordinator.engines.context import EngineContext
from coordinator.engines.hybrid import HybridEngine
from coordinator.engines.mindie import MindieEngine

EngineFactory = Callable[[EngineContext], EngineProtocol]

ENGINES: Mapping[str, EngineFactory] = MappingProxyType({"mindie": MindieEngine, "hybrid": HybridEngine})


def load_engine(name: str) -> EngineFactory:
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
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {name!r} cannot be loaded: {error}") from error
    if not isinstance(factory, type):
        raise ValueError(f"engine {name!r} is not a class")  # noqa: TRY004  # the name is the wrong value
    return factory
