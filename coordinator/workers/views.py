"""What workers are told of the cluster."""

from collections.abc import Callable

from coordinator.cluster import Cluster
from coordinator.core.view import ClusterView
from coordinator.workers.messages import View
from coordinator.workers.slots import Slots


class ViewSender:
    """Tells all workers of each change.

    Args:
        tell: sends a message to all of them.
    """

    def __init__(self, cluster: Cluster, slots: Slots, tell: Callable[[View], None]) -> None:
        self._cluster = cluster
        self._slots = slots
        self._tell = tell
        self._sent: View | None = None
        cluster.subscribe(self._changed)

    def view(self) -> View:
        """The cluster as it is."""
        cluster = self._cluster
        known = cluster.known()
        places = {instance: position for position, instance in enumerate(known)}
        pair, why = cluster.ready_pair()
        return View(
            cluster.view.version,
            [(instance, self._slots.of(instance)) for instance in known],
            [places[instance] for instance in cluster.view.ready if instance in places],
            [places[instance] for instance in cluster.view.suspect if instance in places],
            list(cluster.models()),
            any_name=cluster.accepts(""),
            pair=pair,
            why=why,
        )

    def refresh(self) -> None:
        """Tell of what has changed although the view has not: names, reasons, who is leaving."""
        view = self.view()
        if view != self._sent:
            self._sent = view
            self._tell(view)

    def _changed(self, _view: ClusterView) -> None:
        self.refresh()
