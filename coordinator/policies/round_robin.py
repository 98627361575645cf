"""Round robin: each instance in its turn, whatever it holds."""

from coordinator.core.instance import Instance

from .accounting import Accounting
from .policy import Demand, LoadView, Policy


class RoundRobin(Policy):
    """Knows no difference between instances, which leaves the choice to who was picked least recently.

    The order of turns lives with the instances and not in a counter over a list: a refresh that lists them in another
    order, an instance that joins or one that is skipped for a request disturbs nobody else's turn.
    """

    constant = True

    def __init_subclass__(cls) -> None:
        """A policy made out of this one knows a difference as soon as it has a cost of its own."""
        super().__init_subclass__()
        if "cost" in cls.__dict__ and "constant" not in cls.__dict__:
            cls.constant = False

    def __init__(self, accounting: Accounting | None = None) -> None:
        self.accounting = accounting or Accounting()

    def cost(self, load: LoadView, instance: Instance, demand: Demand) -> float:  # noqa: ARG002
        """The same for all."""
        return 0.0
