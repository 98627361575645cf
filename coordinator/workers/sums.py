"""Metrics over processes that come and go: one page with sums that never go backwards."""

from collections.abc import Iterable, Mapping

import msgspec

from coordinator.observability.instruments import CallbackGauge, Cells
from coordinator.observability.metrics import Metrics
from coordinator.observability.moving import ITL, REQUESTS, TTFT
from coordinator.observability.recent import Recent
from coordinator.workers.messages import Seen

_DECODER = msgspec.msgpack.Decoder(dict[str, dict[tuple[str, ...], list[float]]])
INSTANCE = "instance"


class _Moving(msgspec.Struct):
    """What the live feed needs of a snapshot; all else is passed over unread."""

    requests: Cells = msgspec.field(name=REQUESTS, default_factory=dict)
    ttft: Cells = msgspec.field(name=TTFT, default_factory=dict)
    itl: Cells = msgspec.field(name=ITL, default_factory=dict)


_MOVING_DECODER = msgspec.msgpack.Decoder(_Moving)


def packed(metrics: Metrics) -> bytes:
    """A process's numbers for `MetricSums`."""
    return msgspec.msgpack.encode(metrics.snapshot())


def seen(worker: int, recent: Recent) -> Seen:
    """What a worker has just seen, for `counts.CrewCounts`."""
    return Seen(worker, msgspec.msgpack.encode(recent.read()))


class MetricSums:
    """The sums of this process, of the workers there are, and of those that have ended.

    What a worker counted between the last page and a sudden end is lost with it.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._past: dict[str, Cells] = {}

    def bury(self, snapshot: bytes | None) -> None:
        """Keep what a worker that has ended had counted; what it had going has ended with it."""
        if snapshot is None:
            return
        last = _DECODER.decode(snapshot)
        for instrument in self._metrics.instruments:
            if isinstance(instrument, CallbackGauge):
                continue
            parts = [part.get(instrument.name, {}) for part in (self._past, last)]
            self._past[instrument.name] = instrument.merge(parts)

    def forget_instance(self, instance_id: str) -> None:
        """Drop the series of an instance that is gone."""
        self._metrics.forget_instance(instance_id)
        for instrument in self._metrics.instruments:
            if INSTANCE in instrument.label_names:
                at = instrument.label_names.index(INSTANCE)
                cells = self._past.get(instrument.name, {})
                self._past[instrument.name] = {
                    labels: values for labels, values in cells.items() if labels[at] != instance_id
                }

    def parts(self, snapshots: Iterable[bytes]) -> list[Mapping[str, Cells]]:
        """The counters of the live feed: of workers that have ended, and of each that there is."""
        read = map(_MOVING_DECODER.decode, snapshots)
        return [self._past, *({REQUESTS: one.requests, TTFT: one.ttft, ITL: one.itl} for one in read)]

    def render(self, snapshots: Iterable[bytes]) -> bytes:
        """The text for `/metrics`."""
        return self._metrics.render([self._past, *map(_DECODER.decode, snapshots)])
