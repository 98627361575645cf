"""What the live feed looks at: instances and their work, and what all processes have counted and seen."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from coordinator.cluster import Cluster
from coordinator.core.instance import Address, Instance, Role
from coordinator.management import StageWatch
from coordinator.management.live_picture import Look, Row
from coordinator.observability.instruments import Cells
from coordinator.observability.metrics import Metrics
from coordinator.observability.moving import own_part
from coordinator.observability.recent import Recent, Recently
from coordinator.work import Work

Counts = Sequence[Mapping[str, Cells]]
STEADY_S = 2  # rounding must not make a time of change another one


class Counted(Protocol):
    """What processes have counted and seen."""

    async def read(self) -> tuple[Counts, Recently]:
        """The counters, one part for each process, and what all of them have just seen."""
        ...


class OwnCounts:
    """Where one process serves."""

    def __init__(self, metrics: Metrics, recent: Recent) -> None:
        self._metrics = metrics
        self._recent = recent

    async def read(self) -> tuple[Counts, Recently]:
        """See Counted."""
        return [own_part(self._metrics)], self._recent.read()


class ClusterSight:
    """Puts together one look (management.live.Sight).

    Args:
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        stages: StageWatch,
        counted: Counted,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._work = work
        self._stages = stages
        self._counted = counted
        self._wall = wall
        # by position: what of a row stays, and state and time of its change as they were told last
        self._known: tuple[Instance, ...] = ()
        self._steady: list[tuple[str, str, str, str, tuple[str, Role, Address]]] = []
        self._told: list[tuple[str, int]] = []

    async def look(self) -> Look:
        """See management.live.Sight; the only wait is that for other processes."""
        parts, recently = await self._counted.read()
        ready, why = self._cluster.ready_pair()
        return Look(
            rows=self._rows(),
            recently=recently,
            parts=parts,
            ready=ready,
            why=why,
            in_flight=self._work.live(),
            queued=self._work.queued(),
            stages={stage: int(count) for (stage,), count in self._stages.read_counts()},
            bottleneck=self._stages.bottleneck(),
        )

    def _rows(self) -> list[Row]:
        known = self._cluster.known()
        if known != self._known:
            self._known = known
            self._steady = [(one.id, one.role.value, one.engine, one.url, one.key) for one in known]
            self._told = [("", 0)] * len(known)
        carried = {load.instance.key: load for load in self._work.loads()}
        now_s = self._wall()
        rows: list[Row] = []
        for position, told in enumerate(self._cluster.describe()):
            ident, role, engine, url, key = self._steady[position]
            state, since_s = str(told["state"]), round(now_s - cast("float", told["since_s"]))
            was, then_s = self._told[position]
            if state == was and abs(since_s - then_s) < STEADY_S:
                since_s = then_s
            self._told[position] = (state, since_s)
            requests = pinned = blocks = 0
            if (load := carried.get(key)) is not None:
                requests, pinned, blocks = load.requests, load.pinned + load.left, load.blocks
            model, reason = cast("str | None", told["model"]) or "", cast("str", told["reason"])
            rows.append(Row(ident, role, engine, url, model, state, since_s, reason, requests, pinned, blocks))
        return rows
