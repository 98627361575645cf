"""The work of all workers, read off the board."""

from collections.abc import Callable, Iterator

from coordinator.core.instance import Instance
from coordinator.scheduler import LoadBoard
from coordinator.work import InstanceLoad
from coordinator.workers.slots import Slots


class BoardWork:
    """The work of all workers as the board shows it (coordinator.work.Work).

    Attributes:
        may_come: whether a worker may still choose an instance that is to get no more requests.
    """

    def __init__(self, board: LoadBoard, slots: Slots) -> None:
        self._board = board
        self._slots = slots
        self.may_come: Callable[[Instance], bool] = lambda _: False

    def loads(self) -> Iterator[InstanceLoad]:
        """What is on each instance."""
        for instance, slot in self._slots.pairs():
            figures = self._board.total(slot)
            yield InstanceLoad(instance, figures.requests, figures.blocks, figures.pinned)

    def in_flight(self, instance: Instance) -> int:
        """Requests that still need an instance; 1 in place of 0 until no worker can place one there any more."""
        slot = self._slots.find(instance)
        if slot is None:
            return 0
        figures = self._board.total(slot)
        return figures.requests + figures.pinned or int(self.may_come(instance))

    def in_common(self, prefill_id: str, decode_id: str) -> int:
        """Requests that run on both, as far as the board can tell: no more than on either of them.

        The controller asks this of instances that get no more requests, where either number falls to zero in the end.
        """
        found = {load.instance.id: load.requests + load.pinned for load in self.loads()}
        return min(found.get(prefill_id, 0), found.get(decode_id, 0))

    def live(self) -> int:
        """Requests that are there."""
        return self._board.live()

    def queued(self) -> int:
        """Requests that wait for an instance."""
        return self._board.queued()
