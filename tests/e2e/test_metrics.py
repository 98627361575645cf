"""Metrics: the promised names, types and labels, and numbers that are right after known traffic."""

import asyncio
import itertools
import time
from collections import Counter

import pytest
from dialects import BY_NAME, CHAT, CHAT_STREAM, DIALECTS
from processes import until
from raw_client import ask
from traffic import open_streams

from coordinator.core.errors import Outcome

pytestmark = pytest.mark.xdist_group("metrics")
CONTRACT = {
    "requests_total": ("counter", {"api", "outcome"}),
    "requests_in_flight": ("gauge", set()),
    "requests_queued": ("gauge", set()),
    "instance_in_flight": ("gauge", {"instance", "role"}),
    "instance_up": ("gauge", {"instance", "role"}),
    "request_duration_seconds": ("histogram", {"api"}),
    "time_to_first_token_seconds": ("histogram", {"api"}),
    "inter_token_latency_seconds": ("histogram", {"api"}),
    "stage_duration_seconds": ("histogram", {"stage"}),
    "attempts_total": ("counter", {"reason"}),
    "kv_pinned_requests": ("gauge", {"instance"}),
}


@pytest.mark.parametrize("name", CONTRACT)
async def test_names_types_and_labels(cluster, name: str):
    await ask(cluster.port, CHAT.path, CHAT.body("Hello"))
    kind, labels = CONTRACT[name]
    plain = name.removesuffix("_total")
    (family,) = [f for f in cluster.coordinator.metric_families() if f.name == f"pd_coordinator_{plain}"]
    assert family.type == kind
    assert family.samples
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            assert sample.labels.keys() - {"le"} == labels


async def test_every_api_outcome_and_stage_is_there_from_the_start(start):
    coordinator = start.cluster().coordinator
    samples = [s for f in coordinator.metric_families() for s in f.samples if s.name == "pd_coordinator_requests_total"]
    apis = {dialect.api for dialect in DIALECTS}
    outcomes = {outcome.value for outcome in Outcome}
    assert {(s.labels["api"], s.labels["outcome"]) for s in samples} >= set(itertools.product(apis, outcomes))
    assert {s.labels["outcome"] for s in samples} == outcomes
    assert {s.value for s in samples} == {0}
    for stage in ("queue", "prefill", "handoff", "decode"):
        assert coordinator.metric("pd_coordinator_stage_duration_seconds_count", stage=stage) == 0


async def test_sums_after_known_traffic(start):
    cluster = start.cluster(timing={"prefill_ms": 100.0, "prefill_lanes": 64, "decode_ms": 10.0})
    metric = cluster.coordinator.metric
    took_s: Counter[str] = Counter()
    for dialect in DIALECTS:
        began_s = time.monotonic()
        reply = await ask(cluster.port, dialect.path, dialect.body("Hello [[length:11]]", 11))
        assert reply.status == 200
        until(lambda: metric("pd_coordinator_requests_in_flight") == 0, "it is counted")
        took_s[dialect.api] += time.monotonic() - began_s
    await ask(cluster.port, CHAT.path, b"{")
    await ask(cluster.port, CHAT.path, CHAT.body("Hello [[fault:status=500]]"))
    await ask(cluster.port, "/nowhere")
    cluster.coordinator.wait_idle()

    assert metric("pd_coordinator_requests_total", outcome="ok") == len(DIALECTS)
    assert metric("pd_coordinator_requests_total", outcome="client_error") == 1
    assert metric("pd_coordinator_requests_total", outcome="engine_error") == 1
    assert metric("pd_coordinator_requests_total") == len(DIALECTS) + 2
    assert metric("pd_coordinator_attempts_total", reason="first") == len(DIALECTS) + 1
    assert metric("pd_coordinator_unrouted_total", code="unknown_path") == 1
    assert metric("pd_coordinator_engine_failures_total", side="prefill", instance="p0") >= 1
    for api in {dialect.api for dialect in DIALECTS}:
        streams = [dialect for dialect in DIALECTS if dialect.api == api and dialect.stream]
        count = metric("pd_coordinator_inter_token_latency_seconds_count", api=api)
        assert 9 * len(streams) <= count <= 10 * len(streams)  # an empty piece is no token of its own
        between_s = metric("pd_coordinator_inter_token_latency_seconds_sum", api=api)
        assert 0.008 * count < between_s < took_s[api] - 0.1 * len(streams)
    duration_s = metric("pd_coordinator_request_duration_seconds_sum", api="triton")
    assert 3 * 0.15 < duration_s < took_s["triton"]
    assert metric("pd_coordinator_request_duration_seconds_count", api="triton") == 3
    prefill_s = metric("pd_coordinator_stage_duration_seconds_sum", stage="prefill")
    decode_s = metric("pd_coordinator_stage_duration_seconds_sum", stage="decode")
    assert 0.1 * len(DIALECTS) < prefill_s < took_s.total() - decode_s


async def test_time_to_first_token(start):
    cluster = start.cluster(timing={"prefill_ms": 200.0, "prefill_lanes": 64, "decode_ms": 20.0})
    metric = cluster.coordinator.metric
    began_s = time.monotonic()
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, ["Hello [[length:20]]"], 20)
    first_s = time.monotonic() - began_s
    ttft_s = metric("pd_coordinator_time_to_first_token_seconds_sum", api="openai")
    assert 0.2 <= ttft_s <= first_s
    await stream.rest()
    await stream.leave()
    assert metric("pd_coordinator_time_to_first_token_seconds_count", api="openai") == 1


async def test_gauges_show_live_work(start):
    cluster = start.cluster(1, 2)
    metric = cluster.coordinator.metric
    streams = await open_streams(cluster.port, CHAT_STREAM, ["Hello [[fault:stall@4]]"] * 6)
    assert metric("pd_coordinator_requests_in_flight") == 6
    assert metric("pd_coordinator_instance_in_flight", role="decode") == 6
    assert metric("pd_coordinator_instance_in_flight", instance="d0") == 3
    assert metric("pd_coordinator_instance_up") == 3
    # the first piece is prefill's: what decode adds to it comes a little later
    until(lambda: metric("pd_coordinator_stage_requests", stage="decode") == 6, "all are at decode")
    assert metric("pd_coordinator_stage_requests") == 6
    for stream in streams:
        await stream.reset()
    cluster.wait_idle()


async def test_stages_before_the_first_token(start):
    cluster = start.cluster(timing={"prefill_ms": 200.0, "prefill_lanes": 64, "decode_ms": 20.0})
    metric = cluster.coordinator.metric
    streams = await open_streams(cluster.port, CHAT_STREAM, ["Hello [[length:20]]"] * 3, 20)
    for stream in streams:
        await stream.rest()
        await stream.leave()
    cluster.wait_idle()
    part = "pd_coordinator_ttft_stage_seconds_sum"
    whole_s = metric("pd_coordinator_time_to_first_token_seconds_sum", api="openai")
    assert metric(part) == pytest.approx(whole_s, abs=1e-6)
    assert metric(part, stage="prefill", instance="p0") > 0.9 * 3 * 0.2
    assert metric("pd_coordinator_ttft_stage_seconds_count", stage="prefill") == 3


async def test_the_bottleneck_is_where_requests_wait(start):
    """A prefill instance that computes one prompt at a time, slowly: that is where the time goes."""
    cluster = start.cluster(timing={"prefill_ms": 600.0, "prefill_lanes": 1, "decode_ms": 1.0})
    metric = cluster.coordinator.metric
    assert metric("pd_coordinator_bottleneck_stage") == 0
    asked = [ask(cluster.port, CHAT.path, CHAT.body("Hello")) for _ in range(4)]
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    assert metric("pd_coordinator_bottleneck_stage", stage="prefill") == 1
    assert metric("pd_coordinator_bottleneck_stage") == 1


async def test_what_clients_choose_makes_no_series(cluster):
    dialect = BY_NAME["chat"]
    before = await count_series(cluster)
    calls = []
    for number in range(60):
        body = dialect.body("Hello") | {"model": f"model-{number}", "user": f"user-{number}"}
        calls.append(ask(cluster.port, dialect.path, body, {"X-Request-Id": f"id-{number}"}))
        calls.append(ask(cluster.port, f"/path/{number}", {}))
        calls.append(ask(cluster.port, f"/v2/models/model-{number}/generate", {"text_input": "Hello"}))
    await asyncio.gather(*calls)
    assert await count_series(cluster) - before < 20


async def count_series(cluster) -> int:
    """Samples on the page."""
    return sum(len(family.samples) for family in cluster.coordinator.metric_families())
