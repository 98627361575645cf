"""What is on each instance: plain counters, and the shares that move them."""

from typing import TYPE_CHECKING

from coordinator.core.instance import Instance

from .board import NOTHING, Figures

if TYPE_CHECKING:
    from .ranking import Seat


class Load:
    """What the coordinator has put on one instance; outlives views for as long as anything is on it.

    Only shares and leases change the numbers, and the board with what other processes have there. Policies read them as
    a `LoadView`, which says what they mean.
    """

    __slots__ = ("blocks", "instance", "lengths", "others", "picked", "pinned", "requests", "seat", "slot", "tokens")

    def __init__(self, instance: Instance, picked: int) -> None:
        self.instance = instance
        self.picked = picked
        self.requests = 0
        self.blocks = 0
        self.tokens = 0
        self.pinned = 0
        self.lengths: dict[int, int] = {}
        self.slot: int | None = None
        """Where it stands on the board that processes share; None: it is on none."""
        self.others = NOTHING
        """What of its numbers is the other processes'."""
        self.seat: Seat | None = None
        """Its place among those that can be chosen; None while the instance is not in the view."""

    @property
    def own(self) -> Figures:
        """What of its numbers is this process's own."""
        requests, blocks, tokens, pinned = self.others
        return Figures(self.requests - requests, self.blocks - blocks, self.tokens - tokens, self.pinned - pinned)

    def take_others(self, others: Figures) -> bool:
        """Exchange what the other processes have here. Returns whether that is a change."""
        was = self.others
        if others == was:
            return False
        self.requests += others.requests - was.requests
        self.blocks += others.blocks - was.blocks
        self.tokens += others.tokens - was.tokens
        self.pinned += others.pinned - was.pinned
        self.others = others
        return True

    @property
    def in_flight(self) -> int:
        """Requests that still need the instance, be it for its KV alone."""
        return self.requests + self.pinned


class Share:
    """One request's part of the load of one instance: taken when made, given back once."""

    __slots__ = ("_blocks", "_held", "_tokens", "load")

    def __init__(self, load: Load, tokens: int, blocks: int) -> None:
        self.load = load
        self._tokens = tokens
        self._blocks = blocks
        self._held = True
        load.requests += 1
        load.blocks += blocks
        load.tokens += tokens
        load.lengths[tokens] = load.lengths.get(tokens, 0) + 1

    def same_on(self, load: Load) -> "Share | None":
        """The same request's part on another instance, beside this one; None: this one was given back."""
        return Share(load, self._tokens, self._blocks) if self._held else None

    def give_back(self) -> bool:
        """Take the request's numbers off the load. Returns whether they were on it: the second call does nothing."""
        if not self._held:
            return False
        self._held = False
        load, tokens = self.load, self._tokens
        load.requests -= 1
        load.blocks -= self._blocks
        load.tokens -= tokens
        left = load.lengths[tokens] - 1
        if left:
            load.lengths[tokens] = left
        else:
            del load.lengths[tokens]
        return True
