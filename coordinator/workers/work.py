"""The work of all workers, read off the board."""

from collections.abc import Iterator

from coordinator.controlplane import InstanceLoad
from coordinator.core.instance import Instance
from coordinator.scheduler import LoadBoard
from coordinator.workers.slots import Slots


class BoardWork:
    """The work of all workers as the board shows it (controlplane.Work)."""

    def __init__(self, board: LoadBoard, slots: Slots) -> None:
        self._board = board
        self._slots = slots

    def loads(self) -> Iterator[InstanceLoad]:
        """What is on each instance."""
        for instance, slot in self._slots.items():
            figures = self._board.total(slot)
            yield InstanceLoad(instance, figures.requests, figures.blocks, figures.pinned)

    def in_flight(self, instance: Instance) -> int:
        """Requests that still need an instance."""
        slot = self._slots.find(instance)
        if slot is None:
            return 0
        figures = self._board.total(slot)
        return figures.requests + figures.pinned

    def in_common(self, prefill_id: str, decode_id: str) -> int:
        """Requests that run on both, as far as the board can tell: no more than on either of them."""
        found = {load.instance.id: load.requests + load.pinned for load in self.loads()}
        return min(found.get(prefill_id, 0), found.get(decode_id, 0))

    def live(self) -> int:
        """Requests that are there."""
        return self._board.live()

    def queued(self) -> int:
        """Requests that wait for an instance."""
        return self._board.queued()
