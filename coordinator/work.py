"""The work that is on the instances, over all processes."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from coordinator.core.instance import Instance


class InstanceLoad(NamedTuple):
    """What is on one instance.

    Attributes:
        pinned: live requests whose KV it keeps for decode.
        left: ended requests whose KV, or the room for it, is still to be released.
    """

    instance: Instance
    requests: int
    blocks: int
    pinned: int
    left: int = 0


class Work(Protocol):
    """The work of all processes, as far as gauges, the live feed and the MindIE controller ask for it."""

    def loads(self) -> Iterable[InstanceLoad]:
        """What is on each instance."""
        ...

    def in_flight(self, instance: Instance) -> int:
        """Requests that still need an instance, be it for its KV alone."""
        ...

    def in_common(self, prefill_id: str, decode_id: str) -> int:
        """Requests that run on both instances."""
        ...

    def live(self) -> int:
        """Requests that are there."""
        ...

    def queued(self) -> int:
        """Requests that wait for an instance."""
        ...


class LoadsById:
    """Work as the MindIE controller asks for it: by instance id (management.LoadReader)."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.pair_running = work.in_common
        self.live = work.live

    def allocated(self, instance_id: str) -> tuple[int, int]:
        """Requests and KV blocks placed on an instance; its parts, if it is listed as several, together."""
        found = [load for load in self._work.loads() if load.instance.id == instance_id]
        return sum(load.requests for load in found), sum(load.blocks for load in found)

    def running(self, instance_id: str) -> int:
        """Requests that need an instance."""
        return sum(load.requests + load.pinned for load in self._work.loads() if load.instance.id == instance_id)
