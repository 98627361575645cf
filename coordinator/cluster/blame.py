"""Whose failures they were: what is charged at once, and what comes to light by what goes well later."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Instance

from .roster import Key, Roster

FRESH_S = 60.0  # older failures say nothing about what goes well now
MOST = 16  # failures of one pair that are counted; more of them say no more


@dataclass(slots=True)
class _Run:
    """Failures of a charged instance since something last went well there.

    Attributes:
        with_whom: how many of them each doubted partner had a part in.
        last_s: when the last one was.
    """

    with_whom: dict[Key, int] = field(default_factory=dict)
    last_s: float = 0.0


class Blame:
    """Charges failures to members, and credits what went well.

    Some failures may be either instance's of a pair (`EngineFailed.doubted`): a decode instance fails, and it may be
    for want of prefill's KV. The one that has failed is charged at once. If something goes well at

    - the doubted one, the other was to blame, and all of its run is its own;
    - the charged one, and it had failed with that partner alone since it last went well, the partner was to blame, and
      is charged with all of that. Where it had failed with several, it may have been ill itself for a while.

    So one instance that is broken is found, be it the one or the other, and does not take its partners with it. One
    that is good and wrongly charged is cleared by the next request that goes well there.

    Args:
        roster: the members.
        clock: monotonic seconds.
    """

    def __init__(self, roster: Roster, clock: Callable[[], float]) -> None:
        self._roster = roster
        self._clock = clock
        self._runs: dict[Key, _Run] = {}

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        """A request failed there. An engine's refusal (4xx) is no failure and must not be reported."""
        member = self._roster.holder(instance)
        if member is None:
            return
        member.charge(error)
        doubted = self._roster.current.get(error.doubted)
        if doubted is not None:
            self._note(instance.key, doubted.instance.key)

    def credit(self, instance: Instance) -> None:
        """A request went well there. Hot; of a pair, the doubted one has to come first."""
        member = self._roster.holder(instance)
        if member is None:
            return
        member.credit()
        if self._runs:
            self._conclude(instance.key)

    # --- inside

    def _note(self, charged: Key, doubted: Key) -> None:
        now_s = self._clock()
        self._runs = {key: run for key, run in self._runs.items() if now_s - run.last_s <= FRESH_S}
        run = self._runs.setdefault(charged, _Run())
        run.with_whom[doubted] = min(run.with_whom.get(doubted, 0) + 1, MOST)
        run.last_s = now_s

    def _conclude(self, well: Key) -> None:
        for charged in [key for key, run in self._runs.items() if well in run.with_whom]:
            del self._runs[charged]
        run = self._runs.pop(well, None)
        if run is None or len(run.with_whom) > 1 or self._clock() - run.last_s > FRESH_S:
            return
        ((guilty, times),) = run.with_whom.items()
        member = self._roster.under(guilty)
        if member is not None:
            for _ in range(times):
                member.charge(EngineFailed(Side.PREFILL, member.instance.id, "handoff_failed"))
