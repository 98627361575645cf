"""What all workers have counted and seen, for the live feed."""

from collections.abc import Callable

import msgspec

from coordinator.observability.recent import Recently, merged
from coordinator.sight import Counts
from coordinator.workers.crew import Crew
from coordinator.workers.messages import AskRecent, Seen
from coordinator.workers.sums import MetricSums

_DECODER = msgspec.msgpack.Decoder(Recently)


class CrewCounts:
    """Where several processes serve (sight.Counted).

    Args:
        sums: knows what workers that have ended had counted.
        crew: gives all workers; asked late, since they are made after this.
    """

    def __init__(self, sums: MetricSums, crew: Callable[[], Crew]) -> None:
        self._sums = sums
        self._crew = crew
        self._seen: dict[int, Recently] = {}

    async def read(self) -> tuple[Counts, Recently]:
        """See sight.Counted; of a worker that does not answer, what it said last."""
        crew = self._crew()
        crew.tell(None, AskRecent())  # answered before the question for metrics, which is asked behind it
        snapshots = await crew.snapshots()
        return self._sums.parts(snapshots), merged(self._seen.values())

    def take(self, message: Seen) -> None:
        """A worker has answered. What one had seen that has ended stays until its successor answers."""
        self._seen[message.worker] = _DECODER.decode(message.data)
