"""The condition of a registered instance as a state machine (xLLM protocol page §7). Pure; times are handed in.

Mended here: a lease that lives without heartbeats does not keep an instance in use, and an instance that is given up
although its lease lives is taken again as soon as it is heard, since it would not register anew.
"""

from enum import Enum

UNHEARD = 4  # before its first heartbeat an instance has so many times the silence: it must find us first


class State(Enum):
    """active: its lease lives. lease_lost: it beats without one. suspect: neither can be relied on; not to be used."""

    ACTIVE = "active"
    LEASE_LOST = "lease_lost"
    SUSPECT = "suspect"


class Condition:
    """One start of one instance.

    Args:
        incarnation: of this start.
        now_s: when it registered (monotonic).
        silence_s: so long without heartbeats makes it suspect.
        suspect_s: what is suspect for so long has lost its requests.

    Attributes:
        leased: whether its key is there.
        given_up: whether its requests are lost.
    """

    def __init__(self, incarnation: str, now_s: float, *, silence_s: float, suspect_s: float) -> None:
        self.incarnation = incarnation
        self.leased = True
        self.given_up = False
        self.state = State.ACTIVE
        self.judge_by(silence_s, suspect_s)
        self._heard_s = now_s
        self._ever_heard = False
        self._since_s = now_s

    def judge_by(self, silence_s: float, suspect_s: float) -> None:
        """Go by these times from the next `tick` on."""
        self._silence_s = silence_s
        self._suspect_s = suspect_s

    @property
    def usable(self) -> bool:
        """Whether it may get requests."""
        return self.state is not State.SUSPECT

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left: no key, and suspect for too long."""
        return self.given_up and not self.leased

    @property
    def trouble(self) -> str:
        """Why it is not usable; empty if it is."""
        if self.usable:
            return ""
        return "it sends no heartbeats" if self.leased else "it is not registered any more, and silent"

    def registered(self, now_s: float) -> None:
        """Its key was written, by the same start of it."""
        self.leased = True
        self._heard_s = now_s
        self._become(State.ACTIVE, now_s)

    def lease_lost(self, now_s: float, *, alive: bool) -> None:
        """Its key is gone; `alive`: it has answered a health check since."""
        self.leased = False
        if self.state is State.ACTIVE:
            self._heard_s = max(self._heard_s, now_s) if alive else self._heard_s
            self._become(State.LEASE_LOST if alive else State.SUSPECT, now_s)

    def beat(self, now_s: float) -> None:
        """A heartbeat came."""
        self._heard_s = now_s
        self._ever_heard = True
        if self.state is State.SUSPECT:
            self._become(State.ACTIVE if self.leased else State.LEASE_LOST, now_s)

    def tick(self, now_s: float, *, expects_beats: bool) -> None:
        """Time passes. `expects_beats`: heartbeats come to us, so their silence means something."""
        if not expects_beats and self.leased:
            self._heard_s = now_s
            self._ever_heard = False
        patient = self.leased and not self._ever_heard
        if self.usable and now_s - self._heard_s > self._silence_s * (UNHEARD if patient else 1):
            self._become(State.SUSPECT, now_s)
        if self.state is State.SUSPECT and now_s - self._since_s >= self._suspect_s:
            self.given_up = True

    def _become(self, state: State, now_s: float) -> None:
        if state is not self.state:
            self.state = state
            self._since_s = now_s
        if state is not State.SUSPECT:
            self.given_up = False
