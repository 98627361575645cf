"""The cluster as a worker knows it: what the supervisor has told (core.ports.Members)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance
from coordinator.core.view import ClusterView
from coordinator.scheduler import LoadBoard
from coordinator.workers.messages import Charge, Credit, View


class Moves(NamedTuple):
    """Who has come and who has gone with a view."""

    joined: list[Instance]
    gone: list[Instance]


class Mirror:
    """Answers from the last view, and passes on what happens to instances.

    Args:
        say: sends a message to the supervisor.
        board: shows which instances have failed requests, in whichever process.
    """

    def __init__(self, say: Callable[[object], None], board: LoadBoard) -> None:
        self._say = say
        self._board = board
        self._told = View(0, [], [], [], [], any_name=True, pair=False, why="no instance is known")
        self._members: dict[object, tuple[Instance, int]] = {}
        self._forgiven: dict[object, int] = {}
        self.view = ClusterView(0)

    @property
    def members(self) -> list[Instance]:
        """Every instance that requests may run on."""
        return [instance for instance, _ in self._members.values()]

    @property
    def slots(self) -> dict[object, int]:
        """Where instances stand on the board, by their keys."""
        return {key: slot for key, (_, slot) in self._members.items()}

    def take(self, told: View) -> Moves:
        """Exchange the picture; an instance that has not changed stays the same object."""
        before, self._members = self._members, {}
        members: list[Instance] = []
        joined: list[Instance] = []
        for new, slot in told.members:
            known = before.pop(new.key, None)
            if known is None:
                joined.append(new)
                self._forgiven[new.key] = self._board.faults(slot)
            instance = known[0] if known is not None and known[0] == new else new
            members.append(instance)
            self._members[new.key] = (instance, slot)
        gone = [instance for instance, _ in before.values()]
        for key in before:
            del self._forgiven[key]
        self._told = told
        self.view = ClusterView(
            told.number, tuple(members[i] for i in told.ready), tuple(members[i] for i in told.suspect)
        )
        return Moves(joined, gone)

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        """An instance has failed a request."""
        slots = [slot for one, slot in self._members.values() if one.key == instance.key or one.id == error.doubted]
        for slot in slots:  # of the doubted one, too: what goes well there has to be told
            self._board.count_fault(slot)
        words = (error.reason, error.detail)
        self._say(Charge(instance.id, instance.url, error.side, *words, error.connecting, error.doubted))

    def credit(self, instance: Instance) -> None:
        """A request went well; worth a message only where one went wrong since the last, in whichever process."""
        entry = self._members.get(instance.key)
        if entry is None:
            return
        faults = self._board.faults(entry[1])
        if faults != self._forgiven[instance.key]:
            self._forgiven[instance.key] = faults
            self._say(Credit(instance.id, instance.url))

    def models(self) -> Sequence[str]:
        """Model names for lists."""
        return self._told.names

    def accepts(self, model: str | None) -> bool:
        """Whether some member serves this name or any name."""
        return model is None or self._told.any_name or model in self._told.names

    def ready_pair(self) -> tuple[bool, str]:
        """Whether a request could be placed, and a sentence why (not)."""
        return self._told.pair, self._told.why
