"""What a process that has died has left running at decode instances."""

from collections.abc import Callable

from coordinator.core.ids import WireIds
from coordinator.core.instance import Instance

MAX_REMEMBERED = 10000


class Strays:
    """Ends requests that carry our process number and are not ours: those of the process whose place we have taken.

    Nobody else would: the one who could have sent their stop is gone, and decode would go on to the last token.

    Args:
        ids: this process's; what lies between its first id and its next one is its own.
        stop: tells an instance to end a request.
    """

    def __init__(self, ids: WireIds, stop: Callable[[str, Instance], None]) -> None:
        self._ids = ids
        self._first = int(ids.next())
        self._stop = stop
        self._stopped: dict[bytes, None] = {}

    def met(self, instance: Instance, wire_id: bytes) -> None:
        """A message came for a request that is not there; each is stopped once."""
        if wire_id in self._stopped or self._first < int(wire_id) < int(self._ids.next()):
            return
        if len(self._stopped) >= MAX_REMEMBERED:
            del self._stopped[next(iter(self._stopped))]
        self._stopped[wire_id] = None
        self._stop(wire_id.decode(), instance)
