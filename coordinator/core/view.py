"""What the scheduler may choose from: an immutable picture of the cluster."""

from dataclasses import dataclass

from .instance import Instance


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One version of the cluster; a decision reads exactly one.

    Attributes:
        version: grows by one with each change.
        ready: instances that take requests.
        suspect: instances to use only where no ready one is left.
    """

    version: int
    ready: tuple[Instance, ...] = ()
    suspect: tuple[Instance, ...] = ()
