import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core.errors import Outcome
from coordinator.observability.metrics import STAGES, Metrics

APIS = ("openai", "vllm", "tgi", "triton", "mindie")

# the public contract: name, type, labels
CONTRACT = {
    "pd_coordinator_requests_total": ("counter", {"api", "outcome"}),
    "pd_coordinator_requests_in_flight": ("gauge", set()),
    "pd_coordinator_requests_queued": ("gauge", set()),
    "pd_coordinator_instance_in_flight": ("gauge", {"instance", "role"}),
    "pd_coordinator_instance_up": ("gauge", {"instance", "role"}),
    "pd_coordinator_request_duration_seconds": ("histogram", {"api"}),
    "pd_coordinator_time_to_first_token_seconds": ("histogram", {"api"}),
    "pd_coordinator_inter_token_latency_seconds": ("histogram", {"api"}),
    "pd_coordinator_stage_duration_seconds": ("histogram", {"stage"}),
    "pd_coordinator_attempts_total": ("counter", {"reason"}),
    "pd_coordinator_kv_pinned_requests": ("gauge", {"instance"}),
}


@pytest.fixture
def metrics():
    return Metrics(APIS)


def samples(text: bytes):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text: bytes, name: str, **labels: str):
    return samples(text)["pd_coordinator_" + name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(metrics, name):
    kind, labels = CONTRACT[name]
    metrics.add_gauge("instance_in_flight", lambda: [(("p0", "prefill"), 1)])
    metrics.add_gauge("instance_up", lambda: [(("p0", "prefill"), 1)])
    metrics.add_gauge("kv_pinned_requests", lambda: [(("p0",), 1)])
    text = metrics.render()
    assert f"# TYPE {name} {kind}\n".encode() in text
    tail = "_bucket" if kind == "histogram" else ""
    found = [dict(labels) for known, labels in samples(text) if known == name + tail]
    assert found
    assert all(set(each) - {"le"} == labels for each in found)


@pytest.mark.parametrize(
    "name", ["request_duration_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"]
)
@pytest.mark.parametrize("api", APIS)
def test_histograms_of_each_api_are_there_at_once(metrics, name, api):
    text = metrics.render()
    assert value(text, f"{name}_count", api=api) == 0
    assert value(text, f"{name}_sum", api=api) == 0
    assert value(text, f"{name}_bucket", api=api, le="+Inf") == 0


def test_gauges_without_labels_are_there_at_zero(metrics):
    text = metrics.render()
    assert value(text, "requests_in_flight") == 0
    assert value(text, "requests_queued") == 0


def test_each_outcome_of_each_api_is_there_at_once(metrics):
    text = metrics.render()
    assert {value(text, "requests_total", api=api, outcome=outcome) for api in APIS for outcome in Outcome} == {0}


def test_bound_cells_are_the_series_of_their_api(metrics):
    api = metrics.for_api("tgi")
    api.ttft.observe(0.3)
    api.itl.observe(0.02)
    api.itl.observe(0.04)
    api.duration.observe(2)
    api.outcome(Outcome.OK).inc()
    text = metrics.render()
    assert value(text, "time_to_first_token_seconds_sum", api="tgi") == 0.3
    assert value(text, "time_to_first_token_seconds_bucket", api="tgi", le="0.2") == 0
    assert value(text, "time_to_first_token_seconds_bucket", api="tgi", le="0.3") == 1
    assert value(text, "inter_token_latency_seconds_count", api="tgi") == 2
    assert value(text, "request_duration_seconds_sum", api="tgi") == 2
    assert value(text, "requests_total", api="tgi", outcome="ok") == 1
    assert value(text, "requests_total", api="vllm", outcome="ok") == 0


def test_buckets_are_cumulative_in_the_text(metrics):
    for value_s in (0.0001, 0.3, 5000):
        metrics.stages.prefill.observe(value_s)
    buckets = [
        number for (name, labels), number in samples(metrics.render()).items()
        if name == "pd_coordinator_stage_duration_seconds_bucket" and ("stage", "prefill") in labels
    ]  # fmt: skip
    assert buckets[0] == 1
    assert buckets == sorted(buckets)
    assert buckets[-2:] == [2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_stages_are_bound_to_their_series(metrics, stage):
    getattr(metrics.stages, stage).observe(0.5)
    text = metrics.render()
    assert {s: value(text, "stage_duration_seconds_count", stage=s) for s in STAGES} == {
        s: int(s == stage) for s in STAGES
    }


def test_buckets_are_few(metrics):
    for instrument in metrics.instruments:
        assert len(getattr(instrument, "buckets", ())) <= 20


def test_api_that_nobody_named_is_counted_all_the_same(metrics):
    metrics.for_api("plugin").outcome(Outcome.OK).inc()
    metrics.for_api("plugin").outcome(Outcome.OK).inc()
    assert value(metrics.render(), "requests_total", api="plugin", outcome="ok") == 2


def test_gauge_must_be_declared(metrics):
    with pytest.raises(KeyError):
        metrics.add_gauge("nonsense", list)
    with pytest.raises(KeyError):
        metrics.add_gauge("requests_total", list)


def test_series_of_a_removed_instance_disappear(metrics):
    metrics.engine_failures.labels("p0", "prefill", "connect").inc()
    metrics.link_reconnects.labels("p0").inc()
    metrics.link_reconnects.labels("p1").inc()
    metrics.forget_instance("p0")
    text = metrics.render()
    assert b'"p0"' not in text
    assert value(text, "link_reconnects_total", instance="p1") == 1


def test_one_scrape_gives_the_sums_over_processes():
    first, second = Metrics(APIS), Metrics(APIS)
    for metrics in (first, second):
        metrics.for_api("vllm").ttft.observe(0.5)
        metrics.for_api("vllm").outcome(Outcome.OK).inc(3)
        metrics.add_gauge("requests_in_flight", lambda: [((), 2)])
        metrics.add_gauge("instance_up", lambda: [(("p0", "prefill"), 1)])
    second.add_gauge("instance_in_flight", lambda: [(("d0", "decode"), 5)])
    text = first.render([second.snapshot()])
    assert value(text, "time_to_first_token_seconds_count", api="vllm") == 2
    assert value(text, "time_to_first_token_seconds_sum", api="vllm") == 1
    assert value(text, "requests_total", api="vllm", outcome="ok") == 6
    assert value(text, "requests_in_flight") == 4
    assert value(text, "instance_up", instance="p0", role="prefill") == 1
    assert value(text, "instance_in_flight", instance="d0", role="decode") == 5
    assert value(first.render(), "requests_total", api="vllm", outcome="ok") == 3


def test_two_objects_share_nothing():
    first, second = Metrics(APIS), Metrics(APIS)
    first.recomputes.inc()
    assert value(second.render(), "recomputes_total") == 0


def test_process_figures_are_there(metrics):
    known = {name for name, _ in samples(metrics.render())}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= known


def test_text_format(metrics):
    assert metrics.content_type == "text/plain; version=0.0.4; charset=utf-8"
    text = metrics.render().decode()
    assert text.endswith("\n")
    assert "_created" not in text
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {instrument.name for instrument in metrics.instruments} <= set(names)


def test_label_values_are_escaped(metrics):
    metrics.missing_kv.labels('a"b\\c\nd').inc()
    assert value(metrics.render(), "missing_kv_total", engine='a"b\\c\nd') == 1


def test_requests_of_a_key_are_counted_until_it_is_forgotten_and_then_from_the_start():
    metrics = Metrics([])
    for outcome in (Outcome.OK, Outcome.OK, Outcome.REJECTED):
        metrics.key_outcome("a", outcome)
    metrics.key_outcome("b", Outcome.OK)
    assert metrics.key_requests.snapshot() == {("a", "ok"): [2], ("a", "rejected"): [1], ("b", "ok"): [1]}
    metrics.forget_key("a")
    metrics.key_outcome("a", Outcome.OK)
    assert metrics.key_requests.snapshot() == {("a", "ok"): [1], ("b", "ok"): [1]}
