"""The engine protocols of one process: made once, told of other settings while they serve."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.core.abilities import CertificateUser, RenewableEngine
from coordinator.core.ports import EngineProtocol
from coordinator.engines.context import EngineContext
from coordinator.engines.table import load_engine


@dataclass(frozen=True, slots=True)
class Habits:
    """What the configuration says to all engines; see EngineContext."""

    connect_s: float
    health_path: str | None
    health_timeout_s: float

    def given_to(self, context: EngineContext) -> EngineContext:
        """The same context with these in it."""
        context.connect_s = self.connect_s
        context.health_path = self.health_path
        context.health_timeout_s = self.health_timeout_s
        return context


class EngineSet(dict[str, EngineProtocol]):
    """Engine protocols by name.

    Args:
        context: what they all are given, apart from settings of their own.

    Attributes:
        on_new: called with the name and the protocol of each that is added by `prepare`.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__()
        self._context = context
        self._contexts: dict[str, EngineContext] = {}
        self.on_new: Callable[[str, EngineProtocol], None] | None = None

    def make(self, name: str, settings: Mapping[str, object]) -> None:
        """Make one; raises ValueError if there is no such engine."""
        self._contexts[name] = context = replace(self._context, settings=settings)
        self[name] = load_engine(name)(context)

    def renew_certificates(self) -> None:
        """Have those that read certificates by themselves read them again."""
        for engine in self.values():
            if isinstance(engine, CertificateUser):
                engine.renew_certificates()

    def prepare(self, wanted: Mapping[str, Mapping[str, object]], habits: Habits) -> Callable[[], None]:
        """Make what is missing of the wanted ones; the result, when called, puts them and all settings to use.

        Args:
            wanted: validated settings of each engine, by its name.
            habits: what is to hold for all of them.

        Raises:
            ValueError: there is no such engine; nothing has changed.
        """
        context = habits.given_to(replace(self._context))
        contexts = {name: replace(context, settings=own) for name, own in wanted.items() if name not in self}
        new = {name: load_engine(name)(own) for name, own in contexts.items()}

        def apply() -> None:
            self._context = context
            self._contexts |= contexts
            for name, own in self._contexts.items():
                if name not in contexts:
                    self._renew(name, habits.given_to(own), wanted.get(name, own.settings))
            for name, engine in new.items():
                self[name] = engine
                if self.on_new is not None:
                    self.on_new(name, engine)

        return apply

    def _renew(self, name: str, context: EngineContext, settings: Mapping[str, object]) -> None:
        context.settings = settings
        engine = self[name]
        if isinstance(engine, RenewableEngine):
            try:
                engine.renew(settings)
            except Exception:  # the border to engines: the others must not be left behind
                context.log.exception("engine %s could not take its settings", name)


def fixed_settings(engine: object, names: Iterable[str]) -> frozenset[str]:
    """Those of an engine's settings that it cannot exchange while it serves."""
    renewable = engine.renewable if isinstance(engine, RenewableEngine) else ()
    return frozenset(names).difference(renewable)
