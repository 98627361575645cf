"""Traces end to end: a client's context in, engines' context out, spans at a real receiver, with several workers."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dialects import BY_NAME
from processes import call, call_json, until
from raw_client import Client, ask, eventually

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import itertools

from otlp_receiver import Receiver

FAST = {"prefill_ms": 3.0, "decode_ms": 3.0, "prefill_lanes": 4}
pytestmark = pytest.mark.xdist_group("tracing")
CHAT, STREAM = BY_NAME["chat"], BY_NAME["chat-stream"]
STAGES = ["queue", "prefill", "handoff", "decode"]


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


def site(start, receiver, engine="vllm", workers=1, **more):
    """A ready coordinator that traces, and its instances."""
    fleet = start.fleet([{"role": role, "engine": engine, "timing": FAST} for role in ("prefill", "decode")])
    cluster = start.in_front_of(
        list(fleet.instances),
        each={"engine": engine},
        server={"port": 0, "management_port": 0, "workers": workers},
        tracing={"endpoint": receiver.endpoint, "service_name": "front"} | more.pop("tracing", {}),
        **more,
    )
    until(lambda: set(cluster.coordinator.states().values()) == {"ready"}, "all are ready")
    return cluster


def context(number, sampled=1):
    """Trace headers of a client, and the id of its trace."""
    trace_id = f"{number + 1:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{'c' * 16}-0{sampled}", "tracestate": "vendor=7"}


def heard(instance, trace_id):
    """The trace headers of every inference call of a trace that an instance has got."""
    calls = call_json(instance.port, "/sim/requests?last=400")
    found = []
    for one in calls["requests"] if isinstance(calls, dict) else calls:
        headers = {name.lower(): value for name, value in one["headers"]}
        if trace_id in headers.get("traceparent", ""):
            found.append((headers["traceparent"], headers.get("tracestate")))
    return found


@pytest.mark.parametrize("engine", ["vllm", "mindie", "sglang"])
async def test_a_stream_in_its_client_s_trace(start, receiver, engine):
    cluster = site(start, receiver, engine)
    trace_id, headers = context(41)
    prompt = "Hello [[length:12]]"
    reply = await ask(cluster.port, STREAM.path, STREAM.body(prompt, 12), headers)
    assert reply.status == 200
    spans = await eventually(lambda: len(found := receiver.of(trace_id)) > len(STAGES) and found, "its spans arrive")
    request, *stages = spans
    assert [span.name for span in stages] == STAGES
    assert (request.name, request.kind, request.parent, request.state) == ("request", "SERVER", "c" * 16, "vendor=7")
    assert {span.parent for span in stages} == {request.id}
    assert {span.error for span in spans} == {None}
    # MindIE's decode instances hear of a request from prefill alone
    for instance in [cluster.prefill] if engine == "mindie" else cluster.instances:
        parent = f"00-{trace_id}-{request.id}-01"
        assert heard(instance, trace_id)[0] == (parent, "vendor=7")
    assert [span.attributes.get("pd.instance") for span in stages] == [None, "p0", "d0", "d0"]
    assert request.attributes["pd.outcome"] == "ok"
    assert request.attributes["pd.answer.events"] > 5
    assert request.events == [("first token", {})]
    for before, after in itertools.pairwise(stages):
        assert before.end_s == pytest.approx(after.start_s, abs=1e-5)  # no gap
    assert request.start_s <= stages[0].start_s <= stages[-1].end_s <= request.end_s + 1e-5
    assert all(b"Hello" not in span.raw for span in spans)
    line = cluster.coordinator.said(rf"request id=.* trace_id={trace_id}").group()
    wire = re.search(r"wire=(\S+)", line)[1]
    assert stages[1].attributes["pd.wire_ids"] == wire.split(",")


async def test_two_workers(start, receiver):
    """Whichever worker serves, its spans arrive; those that are left are sent when it stops."""
    cluster = site(start, receiver, workers=2, logging={"format": "json"})
    ids = []
    for number in range(24):
        trace_id, headers = context(number)
        ids.append(trace_id)
        async with await Client.connect(cluster.port) as client:  # each may land at the other worker
            await client.ask(CHAT.path, CHAT.body("Hello"), headers)
            await client.rest()
            assert client.status == 200
    cluster.coordinator.stop()
    traces = {trace_id: receiver.of(trace_id) for trace_id in ids}
    assert {tuple(span.name for span in spans) for spans in traces.values()} == {("request", *STAGES)}
    processes = {span.resource["process.pid"] for spans in traces.values() for span in spans}
    assert len(processes) == 2
    first = traces[ids[0]][0]
    assert first.resource["service.name"] == "front"
    assert first.resource["service.instance.id"].endswith(f":{first.resource['process.pid']}")
    lines = [json.loads(line) for line in cluster.coordinator.log().splitlines() if '"message":"request"' in line]
    assert {line["trace_id"] for line in lines} == set(ids)


async def test_sampling(start, receiver):
    cluster = site(start, receiver, tracing={"sample_ratio": 0})
    _, refused = context(0, sampled=0)
    kept_id, kept = context(1)
    for headers in (refused, {}, {"traceparent": "rubbish"}, kept):
        assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"), headers)).status == 200
    await eventually(lambda: receiver.of(kept_id), "the one that its client records arrives")
    cluster.coordinator.stop()
    assert {span.trace_id for span in receiver.spans} == {kept_id}
    assert [parent[-2:] for parent, _ in heard(cluster.prefill, f"{1:032x}")] == ["00"]
    log = cluster.coordinator.log()
    assert len(re.findall(r" trace_id=[0-9a-f]{32}", log)) == 4


@pytest.mark.parametrize("workers", [1, 2])
async def test_it_is_switched_on_and_off_while_serving(start, receiver, workers):
    cluster = site(start, receiver, workers=workers)
    coordinator, config = cluster.coordinator, cluster.config

    async def serve(number):
        trace_id, headers = context(number)
        assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"), headers)).status == 200
        return trace_id

    first = await serve(0)
    for tracing, number in (({}, 1), (config["tracing"] | {"service_name": "back"}, 2)):
        coordinator.write_config(config | {"tracing": tracing})
        coordinator.manage("/v1/config/reload", {}, method="POST")
        last = await serve(number)
    await eventually(lambda: receiver.of(last), "spans arrive again")
    names = [[span.resource["service.name"] for span in receiver.of(trace_id)][:1] for trace_id in (first, last)]
    assert names == [["front"], ["back"]]  # the former one has sent what it had
    assert {span.trace_id for span in receiver.spans} == {first, last}
    coordinator.write_config(config | {"tracing": {"endpoint": "http://a", "headers_env": "NO_SUCH_VARIABLE"}})
    status, _, body = call(coordinator.management_port, "/v1/config/reload", b"{}")
    assert status == 400
    assert b"NO_SUCH_VARIABLE" in body


async def test_failures_and_retries(start, receiver):
    cluster = site(start, receiver)
    trace_id, headers = context(0)
    reply = await ask(cluster.port, CHAT.path, CHAT.body("Hello [[fault:status=500]]"), headers)
    assert reply.status == 502
    request, *stages = await eventually(lambda: receiver.of(trace_id), "its spans arrive")
    assert request.error == "http_5xx"
    assert request.attributes["error.type"] == "http_5xx"
    assert request.attributes["http.response.status_code"] == 502
    failed = [span for span in stages if span.error]
    assert {(span.name, span.error) for span in failed} == {("prefill", "http_5xx")}
    assert [span.attributes["pd.attempt"] for span in failed] == list(range(1, len(failed) + 1))
    assert {span.attributes["pd.guilty"] for span in failed} == {"p0"}


async def test_a_receiver_that_hangs_or_is_gone_costs_no_request_anything(start, receiver):
    receiver.hold.clear()
    cluster = site(start, receiver)
    replies = await asyncio.gather(*(ask(cluster.port, CHAT.path, CHAT.body("Hello")) for _ in range(20)))
    assert {reply.status for reply in replies} == {200}
    await asyncio.to_thread(receiver.arrived.wait, 10)
    receiver.close()
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200
    metric = cluster.coordinator.metric
    await eventually(lambda: metric("pd_coordinator_traces_total", result="failed") > 0, "it is counted", 20)
    cluster.coordinator.stop()
    assert "the receiver of traces did not take them" in cluster.coordinator.log()


async def test_without_tracing_a_context_travels_through(start):
    cluster = start.cluster()
    trace_id, headers = context(5)
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"), headers)).status == 200
    for instance in cluster.instances:
        assert all(found == tuple(headers.values()) for found in heard(instance, trace_id))
    assert heard(cluster.prefill, trace_id)
    assert "trace_id=" not in cluster.coordinator.log()


def test_without_tracing_nothing_of_it_is_imported():
    """OpenTelemetry takes a good part of a second and of memory to import."""
    lines = (
        "import sys",
        "import coordinator.workers.worker",
        "from coordinator.app import App",
        "from coordinator.config import Settings",
        "from coordinator.observability.logs import configure",
        "App(Settings(), configure('info', 'text').access)",
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests', 'urllib3'))])",
    )
    program = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
