"""Metrics over processes that come and go."""

from prometheus_client.parser import text_string_to_metric_families

from coordinator.observability.metrics import Metrics
from coordinator.workers.sums import MetricSums, packed

APIS = ["openai", "tgi"]


def values(page):
    samples = [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


def busy(count, instance="d0"):
    """A worker's metrics after so many requests."""
    metrics = Metrics(APIS)
    api = metrics.for_api("openai")
    for _ in range(count):
        api.outcomes["ok"].inc()
        api.duration.observe(0.02)
    if count:
        metrics.engine_failures.labels(instance, "decode", "timeout").inc(count)
    return metrics


OK = ("pd_coordinator_requests_total", ("api", "openai"), ("outcome", "ok"))
SECONDS = ("pd_coordinator_request_duration_seconds_count", ("api", "openai"))


def failures(instance):
    return (
        "pd_coordinator_engine_failures_total", ("instance", instance), ("reason", "timeout"), ("side", "decode"),
    )  # fmt: skip


def test_sums_of_all_that_there_are():
    own = Metrics(APIS)
    own.add_gauge("requests_in_flight", lambda: [((), 7)])
    found = values(MetricSums(own).render([packed(busy(3)), packed(busy(4, "d1"))]))
    assert found[OK] == 7
    assert found[SECONDS] == 7
    assert found[failures("d0")] == 3
    assert found[failures("d1")] == 4
    assert found["pd_coordinator_requests_in_flight",] == 7


def test_what_an_ended_worker_counted_stays():
    sums = MetricSums(Metrics(APIS))
    before = values(sums.render([packed(busy(3)), packed(busy(4))]))
    sums.bury(packed(busy(3)))
    after = values(sums.render([packed(busy(4))]))
    assert after[OK] == before[OK] == 7
    assert all(after[name] >= before[name] for name in before if "process" not in name[0] and "python" not in name[0])
    sums.bury(packed(busy(4)))
    sums.bury(None)
    assert values(sums.render([packed(busy(0)), packed(busy(1))]))[OK] == 8


def test_what_an_ended_worker_had_going_does_not_stay():
    own, worker = Metrics(APIS), busy(1)
    own.add_gauge("kv_pinned_requests", lambda: [(("p0",), 2)])
    worker.add_gauge("kv_pinned_requests", lambda: [(("p0",), 3)])
    sums = MetricSums(own)
    pinned = ("pd_coordinator_kv_pinned_requests", ("instance", "p0"))
    assert values(sums.render([packed(worker)]))[pinned] == 5
    sums.bury(packed(worker))
    assert values(sums.render([]))[pinned] == 2


def test_series_of_an_instance_that_is_gone():
    own = busy(2)
    sums = MetricSums(own)
    sums.bury(packed(busy(5)))
    sums.bury(packed(busy(6, "d1")))
    sums.forget_instance("d0")
    found = values(sums.render([]))
    assert failures("d0") not in found
    assert found[failures("d1")] == 6
    assert found[OK] == 13
