"""A scheduler's loads and the board of all processes, kept in step."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .board import NOTHING, LoadBoard

if TYPE_CHECKING:
    from .load import Load

READ_ALL_S = 0.5
"""How often everything is read, whatever the journals say: some processors may show a journal's entry before what was
written earlier."""


class SharedLoads:
    """Writes what this process puts on instances, and brings in what the others do."""

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._slots: Mapping[object, int] = {}
        self._loads: dict[int, Load] = {}
        self._read_all_s = -math.inf
        self.queued_elsewhere = board.queued_elsewhere
        self.publish_queued = board.write_queued

    def assign(self, slots: Mapping[object, int]) -> None:
        """Take over where instances stand, by their keys. Each load is then to be placed anew."""
        self._slots = slots
        self._loads.clear()
        self._read_all_s = -math.inf

    def place(self, load: "Load") -> None:
        """Give a load its place and write it there."""
        load.slot = slot = self._slots.get(load.instance.key)
        if slot is None:
            load.take_others(NOTHING)
        else:
            self._loads[slot] = load
            self._board.write(slot, load.own)

    def publish(self, load: "Load") -> None:
        """Write what this process has on an instance."""
        if load.slot is not None:
            self._board.write(load.slot, load.own)

    def refresh(self, now_s: float) -> list["Load"]:
        """Read what the others have changed; returns the loads that it changes here."""
        slots: Iterable[int] | None = self._board.changes()
        if slots is None or now_s - self._read_all_s >= READ_ALL_S:
            self._read_all_s = now_s
            slots = list(self._loads)
        elif not slots:
            return []
        loads, others = self._loads, self._board.others
        return [load for slot in slots if (load := loads.get(slot)) is not None and load.take_others(others(slot))]
