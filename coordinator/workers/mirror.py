"""The cluster as a worker knows it: what the supervisor has told (core.ports.Members)."""

from collections.abc import Callable, Sequence

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance
from coordinator.core.view import ClusterView
from coordinator.workers.messages import Charge, Credit, View


class Mirror:
    """Answers from the last view, and passes on what happens to instances.

    Args:
        say: sends a message to the supervisor.
    """

    def __init__(self, say: Callable[[object], None]) -> None:
        self._say = say
        self._told = View(0, [], [], [], [], any_name=True, pair=False, why="no instance is known")
        self._same: dict[Instance, Instance] = {}
        self._charged: set[str] = set()
        self.view = ClusterView(0)

    def take(self, told: View) -> ClusterView:
        """Exchange the picture; an instance that has not changed stays the same object."""
        same = {instance: self._same.get(instance, instance) for instance, _ in told.members}
        members = [same[instance] for instance, _ in told.members]
        self._same = same
        self._told = told
        self.view = ClusterView(
            told.version, tuple(members[i] for i in told.ready), tuple(members[i] for i in told.suspect)
        )
        return self.view

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        """An instance has failed a request."""
        self._charged.add(instance.id)
        self._say(Charge(instance.id, error.side, error.reason, error.detail, error.connecting))

    def credit(self, instance: Instance) -> None:
        """A request went well; worth a message only where one went wrong before."""
        if instance.id in self._charged:
            self._charged.discard(instance.id)
            self._say(Credit(instance.id))

    def models(self) -> Sequence[str]:
        """Model names for lists."""
        return self._told.names

    def accepts(self, model: str | None) -> bool:
        """Whether some member serves this name or any name."""
        return model is None or self._told.any_name or model in self._told.names

    def ready_pair(self) -> tuple[bool, str]:
        """Whether a request could be placed, and a sentence why (not)."""
        return self._told.pair, self._told.why
