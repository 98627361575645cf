"""What one source names, and what of it the cluster takes."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.cluster import Cluster
from coordinator.core.instance import Address, Instance, Role

SHOWN = 200  # faults and clashes that are listed for a source
LOGGED = 20  # of those that come at once


class Membership:
    """The share of one source in the cluster.

    An id or a place (role and address) belongs to the source that named it first. What others hold is left to them and
    told; once they let go, it is taken. An instance that was removed by hand stays away until its source has ceased to
    name it.

    Args:
        name: of the source, in logs, in metrics and as the members' `source`.
        cluster: gets the instances.
        log: one line for each change.
        clock: monotonic seconds.

    Attributes:
        up: whether the source could be asked the last time, in all its parts.
        reason: why not.
        held: keys of the members that are its own, by id.
    """

    def __init__(
        self, name: str, cluster: Cluster, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.up = False
        self.reason = "not looked yet"
        self.held: dict[str, object] = {}
        self._cluster = cluster
        self._log = log
        self._clock = clock
        self._changed_at_s = clock()
        self._heard = False
        self._wanted: tuple[Instance, ...] = ()
        self._faults: dict[str, str] = {}
        self._clashes: dict[str, str] = {}
        self._unusable: dict[str, str] = {}
        self._dismissed: set[object] = set()
        self._complained: dict[str, str] = {}

    # --- what the source tells

    def found(
        self, instances: Sequence[Instance], faults: Mapping[str, str], trouble: str, *, incomplete: bool
    ) -> None:
        """See source.Report."""
        self._note_dismissed()
        wanted, doubles = _distinct(instances)
        if incomplete:
            wanted = _distinct((*wanted, *self._wanted))[0]
        self._wanted = wanted
        self._faults = {**faults, **doubles}
        self._dismissed &= {one.key for one in wanted}
        self._bring_in()
        self._judge(trouble)
        self._complain()

    def lost(self, reason: str) -> None:
        """See source.Report."""
        self._judge(reason)

    # --- what others do

    def settle(self) -> bool:
        """Others have named or dropped instances; returns whether that changed what this source has."""
        self._note_dismissed()
        clashes = self._clash()
        own = {one.id for one in self._wanted if one.id not in clashes and one.key not in self._dismissed}
        if clashes == self._clashes and own - self._unusable.keys() == self.held.keys():
            return False
        self._bring_in()
        self._complain()
        return True

    def close(self) -> None:
        """The source is no longer configured: its instances drain and go."""
        self._wanted = ()
        self._faults, self._clashes, self._unusable, self.held = {}, {}, {}, {}
        self._cluster.replace(self.name, ())

    def describe(self) -> dict[str, object]:
        """Its row on the management plane. `since_s`: seconds since it came up or was lost."""
        refused = {**self._faults, **self._clashes, **self._unusable}
        refused |= {one.id: "removed by hand" for one in self._wanted if one.key in self._dismissed}
        return {
            "source": self.name,
            "up": self.up,
            "reason": self.reason,
            "since_s": round(self._clock() - self._changed_at_s, 3),
            "instances": len(self.held),
            "refused": dict(sorted(refused.items())[:SHOWN]),
        }

    # --- inside

    def _note_dismissed(self) -> None:
        """What was ours and nobody's now was removed by hand: any other way would have told us."""
        for ident, key in self.held.items():
            holders = [source for source, holder in self._cluster.claimants(ident) if holder.key == key]
            if not holders:
                self._dismissed.add(key)

    def _clash(self) -> dict[str, str]:
        """Instances whose id or place others hold, with the reason."""
        clashes: dict[str, str] = {}
        for one in self._wanted:
            for source, holder in self._cluster.claimants(one.id, (one.role, one.address)):
                if source != self.name:
                    same = "this id" if holder.id == one.id else f"its place, as {holder.id},"
                    clashes[one.id] = f"{source} has named {same} before"
                    break
        return clashes

    def _bring_in(self) -> None:
        self._clashes = self._clash()
        ours = [one for one in self._wanted if one.id not in self._clashes and one.key not in self._dismissed]
        self._unusable = dict(self._cluster.replace(self.name, ours).refused)
        self.held = {one.id: one.key for one in ours if one.id not in self._unusable}

    def _judge(self, trouble: str) -> None:
        changed = self._heard is False or self.up is bool(trouble)
        if changed:
            self._changed_at_s = self._clock()
        if trouble and trouble != self.reason:
            stays = f"its {len(self.held)} instances stay" if self.held else "it gives no instances"
            self._log.warning("discovery: %s has trouble, %s: %s", self.name, stays, trouble)
        elif changed and not trouble:
            self._log.info(
                "discovery: %s is %s, %d instances", self.name, "back" if self._heard else "up", len(self.held)
            )
        self.up, self.reason, self._heard = not trouble, trouble, True

    def _complain(self) -> None:
        told = {**self._faults, **self._clashes, **self._unusable}
        new = [(name, why) for name, why in told.items() if self._complained.get(name) != why]
        for name, why in new[:LOGGED]:
            self._log.warning("discovery: %s of %s is not used: %s", name, self.name, why)
        if len(new) > LOGGED:
            self._log.warning("discovery: %d more of %s are not used", len(new) - LOGGED, self.name)
        self._complained = told


def _distinct(instances: Iterable[Instance]) -> tuple[tuple[Instance, ...], dict[str, str]]:
    """Instances with ids and places of their own; of the others, the reason by id."""
    ids: dict[str, Instance] = {}
    places: dict[tuple[Role, Address], Instance] = {}
    doubles: dict[str, str] = {}
    for one in instances:
        place = (one.role, one.address)
        if one.id in ids:
            doubles[f"{one.id} at {one.url}"] = f"this id stands for {ids[one.id].url} already"
        elif place in places:
            doubles[one.id] = f"its place {one.url} is that of {places[place].id} already"
        else:
            ids[one.id] = places[place] = one
    return tuple(ids.values()), doubles
