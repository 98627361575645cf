"""Where requests are at this moment, and which stage they have been waiting in of late."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from coordinator.observability.metrics import WAITING_STAGES

LOG = logging.getLogger("pd_coordinator.management")
SAMPLE_S = 1.0
SAMPLES = 60

Counts = Mapping[str, int]
Series = tuple[tuple[str], float]


class StageWatch:
    """Counts the requests in each stage once a second, and names the bottleneck.

    A request that is seen in a stage stands for a second of waiting there. The bottleneck is the stage that holds the
    most of these seconds within the last minute; what waits and never ends counts as well as what has gone on. There is
    none as long as nothing waits.

    Args:
        count: the requests in each stage at this moment, all stages of `WAITING_STAGES` among them.
    """

    def __init__(self, count: Callable[[], Counts]) -> None:
        self._count = count
        self._samples: deque[tuple[int, ...]] = deque(maxlen=SAMPLES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._look(), name="watch stages")

    async def aclose(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def sample(self) -> None:
        """Look once."""
        counts = self._count()
        self._samples.append(tuple(counts[stage] for stage in WAITING_STAGES))

    def bottleneck(self) -> str | None:
        """The stage that holds the most waiting time; the earlier one of two that hold as much."""
        waited = [sum(column) for column in zip(*self._samples, strict=True)]
        most = max(waited, default=0)
        return WAITING_STAGES[waited.index(most)] if most else None

    def read_counts(self) -> Iterator[Series]:
        """For the gauge of requests by stage."""
        yield from (((stage,), count) for stage, count in self._count().items())

    def read_bottleneck(self) -> Iterable[Series]:
        """For the gauge of the bottleneck: 1 for it, 0 for the others."""
        worst = self.bottleneck()
        return [((stage,), float(stage == worst)) for stage in WAITING_STAGES]

    async def _look(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # the border to all that is counted: one fault must not end the watch
                LOG.exception("counting requests by stage failed")
            await asyncio.sleep(SAMPLE_S)
