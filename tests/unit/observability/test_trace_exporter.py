"""The way of finished requests to the receiver: bounded, in batches, and in nobody's way."""

import asyncio
import threading

import pytest

from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import Metrics
from coordinator.observability.trace import Trace
from coordinator.observability.tracing import TraceExporter, Tracer, exporter

GUARD_S = 10.0


def request(number=0):
    return Trace(number + 1, 1, 0, True, b"", 0.0, 0.0, "POST"), RequestRecord(id=str(number), api="openai", path="/")


class Site:
    """An exporter whose receiver a test holds."""

    def __init__(self):
        self.batches = []
        self.taken = True
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.metrics = Metrics(["openai"])
        self.exporter = TraceExporter(self.metrics, self.send, self.gate.set)

    def send(self, batch):
        self.asked.set()
        self.gate.wait(GUARD_S)
        self.batches.append([record.id for _, record in batch])
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken

    def results(self):
        return {labels[0]: int(cell[0]) for labels, cell in self.metrics.traces.snapshot().items()}

    async def until(self, check):
        async with asyncio.timeout(GUARD_S):
            while not check():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def site(monkeypatch):
    monkeypatch.setattr(exporter, "EVERY_S", 0.01)
    monkeypatch.setattr(exporter, "FLUSH_S", GUARD_S)
    made = Site()
    yield made
    made.gate.set()
    await made.exporter.aclose()
    thread = made.exporter._thread
    if thread is not None:
        await asyncio.to_thread(thread.join, GUARD_S)
        assert not thread.is_alive()


async def test_what_is_put_is_sent(site):
    for number in range(3):
        site.exporter.put(*request(number))
    await site.until(lambda: site.results()["exported"] == 3)
    assert [ident for batch in site.batches for ident in batch] == ["0", "1", "2"]


async def test_a_batch_has_a_bound(site, monkeypatch):
    monkeypatch.setattr(exporter, "BATCH", 10)
    site.gate.clear()
    site.exporter.put(*request())
    await site.until(site.asked.is_set)
    for number in range(25):
        site.exporter.put(*request(number))
    site.gate.set()
    await site.until(lambda: site.results()["exported"] == 26)
    assert [len(batch) for batch in site.batches] == [1, 10, 10, 5]


async def test_too_many_are_dropped_and_counted(site, monkeypatch):
    monkeypatch.setattr(exporter, "QUEUE", 5)
    site.gate.clear()
    site.exporter.put(*request())
    await site.until(site.asked.is_set)
    for number in range(12):
        site.exporter.put(*request(number))
    assert site.batches == []  # nobody has waited for the receiver
    assert site.results()["dropped"] == 7
    site.gate.set()
    await site.until(lambda: site.results()["exported"] == 6)


@pytest.mark.parametrize("trouble", [False, RuntimeError("a prompt")])
async def test_what_is_not_taken_is_counted_and_said(site, trouble, caplog):
    site.taken = trouble
    site.exporter.put(*request())
    await site.until(lambda: site.results()["failed"] == 1)
    site.taken = True
    site.exporter.put(*request())
    await site.until(lambda: site.results()["exported"] == 1)
    assert "a prompt" not in caplog.text


async def test_what_is_there_is_sent_at_the_end(site, monkeypatch):
    monkeypatch.setattr(exporter, "EVERY_S", 60.0)
    for number in range(3):
        site.exporter.put(*request(number))
    await site.exporter.aclose()
    assert site.results() == {"exported": 3, "failed": 0, "dropped": 0}
    site.exporter.put(*request())
    assert site.results()["dropped"] == 1


async def test_the_end_does_not_wait_for_ever(site, monkeypatch):
    monkeypatch.setattr(exporter, "FLUSH_S", 0.05)
    monkeypatch.setattr(exporter, "BATCH", 1)
    site.gate.clear()
    for number in range(3):
        site.exporter.put(*request(number))
    await site.until(site.asked.is_set)
    async with asyncio.timeout(GUARD_S):
        await site.exporter.aclose()  # and it ends the one that hangs
    assert site.results()["dropped"] == 2
    await site.until(lambda: site.results()["exported"] == 1)


async def test_closing_what_was_never_used():
    made = Site()
    await made.exporter.aclose()
    await made.exporter.aclose()
    assert made.exporter._thread is None


async def test_closing_twice(site):
    site.exporter.put(*request())
    await site.exporter.aclose()
    await site.exporter.aclose()
    assert site.results() == {"exported": 1, "failed": 0, "dropped": 0}


# --- which requests are traced


class Taker:
    def __init__(self):
        self.taken = []

    def put(self, trace, record):
        self.taken.append((trace, record))

    async def aclose(self):
        pass


def parent(sampled):
    return [(b"traceparent", f"00-{'a' * 32}-{'b' * 16}-0{int(sampled)}".encode())]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_caller_that_has_decided_is_followed(ratio, sampled):
    trace = Tracer(ratio, Taker()).begin(parent(sampled), "POST", 5.0)
    assert (trace.id, trace.parent_id, trace.sampled) == ("a" * 32, int("b" * 16, 16), sampled)
    assert trace.span_id != trace.parent_id
    assert trace.arrived_s == 5.0


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.25, 150, 350), (1.0, 1000, 1000)])
def test_for_others_the_ratio_decides(ratio, least, most):
    tracer = Tracer(ratio, Taker())
    traces = [tracer.begin((), "POST", 0.0) for _ in range(1000)]
    assert least <= sum(trace.sampled for trace in traces) <= most
    assert len({trace.trace_id for trace in traces}) == len({trace.span_id for trace in traces}) == 1000
    assert {trace.parent_id for trace in traces} == {0}


def test_only_what_is_sampled_is_handed_on():
    taker = Taker()
    tracer = Tracer(0.0, taker)
    for sampled in (True, False):
        record = RequestRecord(id="1", api="openai", path="/")
        record.trace = tracer.begin(parent(sampled), "POST", 0.0)
        tracer.finished(record)
    tracer.finished(RequestRecord(id="2", api="openai", path="/"))
    assert [trace.sampled for trace, _ in taker.taken] == [True]
