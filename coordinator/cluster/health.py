"""The condition of one instance as a state machine: facts go in, a state comes out. Pure; times are handed in."""

import math
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.core.instance import State

COOL_DOWN_CAP_S = 60.0
DOUBLINGS_CAP = 16  # a power of two beyond any use; keeps the arithmetic finite


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """The `health` section of the configuration.

    Attributes:
        interval_s: seconds from the start of one health check of an instance to the start of the next.
        timeout_s: seconds after which a check without an answer counts as failed.
        fail_after: failures in a row that take an instance out.
        recover_after: good checks in a row that bring it back.
    """

    interval_s: float = 5.0
    timeout_s: float = 3.0
    fail_after: int = 3
    recover_after: int = 2


class _Reach(Enum):
    """What health checks and connections say; joining instances are not blamed for anything."""

    UNSEEN = auto()
    UP = auto()
    DOUBTFUL = auto()
    LOST = auto()


class Health:
    """What is known about one instance's condition.

    Three things are watched apart from each other and the state is drawn from all of them: whether it can be reached
    (checks, connections), whether its standing links are open, and whether requests go wrong there although it can be
    reached. The last one alone never makes it `down`: one poisonous request that is tried everywhere must not take a
    whole fleet out.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._reach = _Reach.UNSEEN
        self._reach_reason = "not checked yet"
        self._failures = 0
        self._good = 0
        self._charged = False
        self._linked = False
        self._was_linked = False
        self._relinked = False
        self._link_reason = "not linked yet"
        self._errors = 0
        self._trips = 0
        self._error_reason = ""
        self.cools_at_s = -math.inf

    @property
    def linked(self) -> bool:
        """Whether its standing links are open."""
        return self._linked

    @property
    def lost(self) -> bool:
        """Whether it was given up after too many failures in a row."""
        return self._reach is _Reach.LOST

    @property
    def doubtful(self) -> bool:
        """Whether the next check decides: it failed lately and is not given up."""
        return self._reach is _Reach.DOUBTFUL

    def checked(self) -> None:
        """A health check went well."""
        self._failures = 0
        self._charged = False
        if self._reach is _Reach.UP:
            return
        self._good += 1
        first = self._reach is _Reach.UNSEEN
        if first or self._relinked or self._good >= self.settings.recover_after:
            self._reach = _Reach.UP
            self._reach_reason = ""
            self._good = 0
        self._relinked = False

    def check_failed(self, reason: str) -> None:
        """A health check failed."""
        self._charged = False
        self._unreachable(reason)

    def unconnected(self, reason: str) -> None:
        """A request could not connect. Many at once are one piece of evidence: they count once between two checks."""
        if not self._charged:
            self._charged = True
            self._unreachable(reason)

    def _unreachable(self, reason: str) -> None:
        self._good = 0
        self._failures += 1
        self._relinked = False
        self._reach_reason = reason
        if self._reach is _Reach.UNSEEN:
            return
        lost = self._reach is _Reach.LOST or self._failures >= self.settings.fail_after
        self._reach = _Reach.LOST if lost else _Reach.DOUBTFUL

    def link_up(self) -> None:
        """All standing links are open. A link that opens anew proves life: one good check then is enough."""
        self._relinked = not self._linked and self._reach is not _Reach.UNSEEN
        self._linked = self._was_linked = True
        self._link_reason = ""

    def link_down(self, reason: str) -> None:
        """A standing link is lost or not open yet."""
        self._linked = False
        self._link_reason = reason

    def request_failed(self, reason: str, now_s: float) -> None:
        """A request went wrong there.

        `fail_after` in a row start a cool-down of one check interval; each further one starts after a single failure
        and lasts twice as long, up to a minute. Failures during a cool-down change nothing: they belong to it.
        """
        if now_s < self.cools_at_s:
            return
        self._errors += 1
        if self._errors < (1 if self._trips else self.settings.fail_after):
            return
        cool_down_s = self.settings.interval_s * 2.0 ** min(self._trips, DOUBLINGS_CAP)
        self.cools_at_s = now_s + min(cool_down_s, COOL_DOWN_CAP_S)
        self._trips += 1
        self._errors = 0
        self._error_reason = reason

    def request_done(self) -> bool:
        """A request went well there: earlier request failures are forgotten. Returns whether there were any."""
        if not (self._errors or self._trips):
            return False
        self._errors = self._trips = 0
        self.cools_at_s = -math.inf
        return True

    def state(self, now_s: float) -> State:
        """The state at this time, draining apart."""
        if self._reach is _Reach.UNSEEN:
            return State.JOINING
        if not self._linked:
            return State.DOWN if self._was_linked else State.JOINING
        if self._reach is _Reach.LOST:
            return State.DOWN
        if self._reach is _Reach.DOUBTFUL or now_s < self.cools_at_s:
            return State.SUSPECT
        return State.READY

    def reason(self, now_s: float) -> str:
        """Why it is not ready, in a few words; empty if it is."""
        if self._reach is not _Reach.UNSEEN and not self._linked:
            return f"unlinked: {self._link_reason}"
        if self._reach is not _Reach.UP:
            return self._reach_reason
        if now_s < self.cools_at_s:
            return f"requests failed: {self._error_reason}"
        return ""
