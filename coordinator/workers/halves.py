"""A worker's halves of the engine protocols whose streams the supervisor holds."""

from collections.abc import Callable, Mapping

from coordinator.core.abilities import AnsweringEngine
from coordinator.core.ports import EngineProtocol, SplitEngine
from coordinator.workers.messages import Said, Told


class Halves:
    """Makes each of them follow the supervisor, and carries messages both ways.

    Args:
        engines: the engine protocols of this worker.
        say: sends a message to the supervisor.
    """

    def __init__(self, engines: Mapping[str, EngineProtocol], say: Callable[[object], None]) -> None:
        self._say = say
        self._halves: dict[str, SplitEngine] = {}
        for name, engine in engines.items():
            self.add(name, engine)

    def add(self, name: str, engine: EngineProtocol) -> None:
        """Make an engine protocol follow, if it is one of these."""
        if isinstance(engine, SplitEngine):
            self._halves[name] = engine
            engine.follow()
            if isinstance(engine, AnsweringEngine):
                engine.answer_with(self._sayer(name))

    def told(self, message: Told) -> None:
        """Hand over what the other half has sent; hot."""
        half = self._halves.get(message.engine)
        if half is not None:
            half.told(message.data)

    def _sayer(self, engine: str) -> Callable[[bytes], None]:
        return lambda data: self._say(Said(engine, data))
