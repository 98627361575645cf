"""What workers are told of the cluster, and what they have made of it."""

import logging
from collections.abc import Callable

from coordinator.cluster import Cluster
from coordinator.core.instance import Instance
from coordinator.core.view import ClusterView
from coordinator.workers.messages import View
from coordinator.workers.slots import Slots

LOG = logging.getLogger("pd_coordinator.workers")


class ViewSender:
    """Tells all workers of each change.

    Args:
        slots: where each instance gets its place on the board; one that gets none is not shown to the workers.
        tell: sends a message to all of them.
        acknowledged: the oldest picture, by its number, that some worker still goes by; infinity if there is none.
    """

    def __init__(
        self, cluster: Cluster, slots: Slots, tell: Callable[[View], None], acknowledged: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._slots = slots
        self._tell = tell
        self._acknowledged = acknowledged
        self._number = 0
        self._picture: object = None
        self._listed: dict[object, int] = {}
        self._refused: set[str] = set()
        cluster.subscribe(self._changed)

    def view(self) -> View:
        """The cluster as it is."""
        cluster = self._cluster
        placed = [(instance, slot) for instance in cluster.known() if (slot := self._place(instance)) is not None]
        positions = {id(instance): position for position, (instance, _) in enumerate(placed)}
        pair, why = cluster.ready_pair()
        return View(
            self._number,
            placed,
            [positions[id(instance)] for instance in cluster.view.ready if id(instance) in positions],
            [positions[id(instance)] for instance in cluster.view.suspect if id(instance) in positions],
            list(cluster.models()),
            any_name=cluster.accepts(""),
            pair=pair,
            why=why,
        )

    def refresh(self) -> None:
        """Tell of what has changed, be it only names, reasons, or who is leaving."""
        cluster = self._cluster
        picture = (cluster.view, cluster.known(), cluster.models(), cluster.accepts(""), cluster.ready_pair())
        if picture == self._picture:
            return
        self._picture = picture
        self._number += 1
        for instance in (*cluster.view.ready, *cluster.view.suspect):
            self._listed[instance.key] = self._number
        self._tell(self.view())

    def may_get_requests(self, instance: Instance) -> bool:
        """Whether an instance that the workers have been told to choose no more may still be chosen by one of them."""
        listed = self._listed.get(instance.key)
        return listed is not None and listed < self._number and self._acknowledged() <= listed

    def forget(self, instance: Instance) -> None:
        """An instance is gone."""
        self._listed.pop(instance.key, None)

    def _place(self, instance: Instance) -> int | None:
        slot = self._slots.take(instance)
        if slot is None and instance.id not in self._refused:
            self._refused.add(instance.id)
            LOG.error(
                "instance %s is not used: more than %d instances cannot be shared among workers",
                instance.id,
                self._slots.size,
            )
        return slot

    def _changed(self, _view: ClusterView) -> None:
        self.refresh()
