"""Which instance stands where on the board."""

from collections.abc import Iterator

from coordinator.core.instance import Instance


class Slots:
    """Gives each instance, by its key, a slot for as long as requests may run on it.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken: dict[object, tuple[Instance, int]] = {}

    def take(self, instance: Instance) -> int | None:
        """The slot of an instance, a new one if need be; None: all are taken."""
        entry = self._taken.get(instance.key)
        if entry is None and not self._free:
            return None
        slot = self._free.pop() if entry is None else entry[1]
        self._taken[instance.key] = (instance, slot)
        return slot

    def find(self, instance: Instance) -> int | None:
        """The slot of an instance, if it has one."""
        entry = self._taken.get(instance.key)
        return None if entry is None else entry[1]

    def free(self, instance: Instance) -> int:
        """Take an instance's slot back; returns it, to be cleared. Raises KeyError if it has none."""
        slot = self._taken.pop(instance.key)[1]
        self._free.append(slot)
        return slot

    def pairs(self) -> Iterator[tuple[Instance, int]]:
        """Instances and their slots."""
        return iter(list(self._taken.values()))
