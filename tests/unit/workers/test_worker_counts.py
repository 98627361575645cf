"""What workers have counted and seen, put together for the live feed."""

import msgspec

from coordinator.core.errors import Outcome
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.observability.moving import own_part, totals
from coordinator.observability.recent import Recent
from coordinator.workers.counts import CrewCounts
from coordinator.workers.messages import AskRecent, Down, Seen, Up
from coordinator.workers.sums import MetricSums, packed, seen

APIS = ["openai", "tgi"]


class FakeWorker:
    def __init__(self, number, at_s):
        self.number = number
        self.metrics = Metrics(APIS)
        self.recent = Recent(lambda: at_s)

    def finish(self, ident):
        cells = self.metrics.for_api("openai")
        cells.outcome(Outcome.OK).inc()
        cells.ttft.observe(0.2)
        cells.itl.observe(0.01)
        self.metrics.engine_failures.labels(f"d{ident}", "decode", "reset").inc()
        self.recent.take(RequestRecord(ident, "openai", "/", prefill="p0", decode="d0"))


class FakeCrew:
    """Workers that answer at once, in the order in which they are asked."""

    def __init__(self, *workers):
        self.workers = list(workers)
        self.silent = set()
        self.counts = None

    def tell(self, number, message):
        assert number is None
        assert isinstance(message, AskRecent)
        for worker in self.workers:
            if worker.number not in self.silent:
                answer = seen(worker.number, worker.recent)
                self.counts.take(msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Up))

    async def snapshots(self):
        return (packed(worker.metrics) for worker in self.workers)


def together(*workers):
    crew, sums = FakeCrew(*workers), MetricSums(Metrics(APIS))
    counts = crew.counts = CrewCounts(sums, lambda: crew)
    return crew, sums, counts


async def test_counters_and_paths_of_all():
    one, two = FakeWorker(0, 5.0), FakeWorker(1, 6.0)
    _, _, counts = together(one, two)
    for worker, ident in ((one, "a"), (one, "b"), (two, "c")):
        worker.finish(ident)
    parts, recently = await counts.read()
    whole = totals(parts, 1.0)
    assert (whole.finished, sum(whole.ttft), sum(whole.itl)) == (3, 3, 3)
    assert [path.id for path in recently.paths] == ["c", "b", "a"]
    assert whole == totals([own_part(one.metrics), own_part(two.metrics)], 1.0)


async def test_what_an_ended_worker_had_counted_stays():
    one, two = FakeWorker(0, 5.0), FakeWorker(1, 6.0)
    crew, sums, counts = together(one, two)
    one.finish("a")
    await counts.read()
    sums.bury(packed(one.metrics))
    crew.workers.remove(one)
    two.finish("b")
    parts, recently = await counts.read()
    assert totals(parts, 1.0).finished == 2
    assert [path.id for path in recently.paths] == ["b", "a"]
    crew.workers.append(FakeWorker(0, 9.0))
    _, recently = await counts.read()
    assert [path.id for path in recently.paths] == ["b"]


async def test_a_silent_worker_is_shown_as_it_was():
    one = FakeWorker(0, 5.0)
    crew, _, counts = together(one)
    one.finish("a")
    await counts.read()
    crew.silent.add(0)
    one.finish("b")
    _, recently = await counts.read()
    assert [path.id for path in recently.paths] == ["a"]


def test_only_what_is_needed_of_a_snapshot_is_read():
    worker = FakeWorker(0, 5.0)
    worker.finish("a")
    _, part = MetricSums(Metrics(APIS)).parts([packed(worker.metrics)])
    assert part == own_part(worker.metrics)


def test_messages_travel():
    for message, kind in ((AskRecent(), Down), (Seen(3, b"x"), Up)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
