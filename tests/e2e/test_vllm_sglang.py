"""vLLM and SGLang clusters of real processes: the demo, the OpenAI client, a decode that dies, hybrids as fallback."""

import subprocess
import sys
from dataclasses import replace

import pytest
from clusters import FAST
from dialects import BY_NAME, MODEL, events
from openai import OpenAI
from processes import call, until
from raw_client import Client, eventually
from traffic import Traffic

pytestmark = pytest.mark.xdist_group("vllm-sglang")
engines = pytest.mark.parametrize("engine", ["vllm", "sglang"])
both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
ARGUMENTS = ("--prefill-ms", "3", "--decode-ms", "3", "--prefill-lanes", "4")
MESSAGES = [{"role": "user", "content": "Tell me about the mountains"}]
CHAT = BY_NAME["chat"]
WHOLE = (CHAT, BY_NAME["completions"])


def streamed_text(body):
    """The text of a stream; the last chunks may hold none."""
    *chunks, done = events(body)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


STREAMS = tuple(replace(BY_NAME[name], streamed=streamed_text) for name in ("chat-stream", "completions-stream"))


def fleet(start, engine, *roles):
    """Simulated instances of an engine in one process."""
    options = [{"role": role, "engine": engine, "timing": FAST} for role in roles]
    return list(start.fleet(options).instances)


def in_front_of(start, engine, instances, **changes):
    """A ready coordinator for them."""
    cluster = start.in_front_of(instances, each={"engine": engine}, **changes)
    until(lambda: set(cluster.coordinator.states().values()) == {"ready"}, "all are ready")
    return cluster


def expired(instances):
    """How often KV has waited in vain at vLLM's prefill instances."""
    return sum(each.state()["handoffs"]["expired"] for each in instances if each.role == "prefill")


@engines
def test_demo(engine):
    words = [sys.executable, "-m", "coordinator", "demo", "--once", "--engine", engine, "--prefill", "2", "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "curl" in done.stdout
    assert "<KV-LOST>" not in done.stdout


@engines
def test_openai_client_on_two_of_each(start, engine):
    cluster = in_front_of(start, engine, fleet(start, engine, "prefill", "prefill", "decode", "decode"))
    with OpenAI(base_url=f"{cluster.coordinator.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        for _ in range(4):
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
            chunks = list(
                client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
                )
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == whole.choices[0].message.content
            assert "<KV-LOST>" not in text
            assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        one = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
        parts = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in parts) == one.choices[0].text
        several = client.completions.create(model=MODEL, prompt=["a b", "c d"], max_tokens=4, n=2)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert [model.id for model in client.models.list()] == [MODEL]
    assert all(instance.state()["generated_tokens"] for instance in cluster.instances), "one has had no work"
    cluster.wait_idle()


@engines
async def test_a_decode_that_is_killed_is_worked_around_and_used_again(start, engine):
    victim = start.instance("decode", "--engine", engine, *ARGUMENTS)
    instances = fleet(start, engine, "prefill", "prefill", "decode")
    cluster = in_front_of(start, engine, [*instances, victim])
    coordinator = cluster.coordinator
    whole, streams = Traffic(cluster.port, WHOLE, clients=5), Traffic(cluster.port, STREAMS, clients=5)
    async with whole, streams:
        await whole.more(20)
        await streams.more(20)
        assert victim.state()["requests"] > 0
        victim.kill()
        await eventually(lambda: coordinator.states()["d1"] != "ready", "it is out")
        await whole.more(30)
        await streams.more(30)
        back = start.again(victim)
        await eventually(lambda: coordinator.states()["d1"] == "ready", "it is back")
        await eventually(lambda: back.state()["generated_tokens"], "it gets work again")
    assert whole.counts.keys() == {"whole"}, (whole.counts, whole.notes)
    assert streams.counts.keys() <= {"whole", "broken"}, (streams.counts, streams.notes)
    assert streams.counts["broken"] <= 5  # those that were under way
    assert coordinator.metric("pd_coordinator_engine_failures_total", instance="d1") > 0
    assert coordinator.metric("pd_coordinator_engine_failures_total", side="prefill") == 0
    if engine == "sglang":
        cluster.wait_idle()
        return
    # KV that the dead one was reading can be read by nobody else (the simulator's rule); the rest is fetched at once
    coordinator.wait_idle()
    assert sum(cluster.kv_blocks()) <= 10
    assert expired(instances) == 0


@engines
@both
async def test_clients_that_leave_between_prefill_and_decode_leave_nothing(start, engine, stream):
    """Seen from outside: our gauge and the instances' own books go back to zero long before any lease ends."""
    cluster = in_front_of(start, engine, fleet(start, engine, "prefill", "decode", "decode"))
    for instance in cluster.of("decode"):
        instance.fault("delay=3600")
    gone = []
    for number in range(20):
        client = await Client.connect(cluster.port)
        await client.ask(CHAT.path, CHAT.body(f"Tell me about {number}") | {"stream": stream})
        gone.append(client)
    if engine == "vllm":
        await eventually(lambda: cluster.coordinator.metric("pd_coordinator_kv_pinned_requests") == 20, "all pinned")
    else:
        await eventually(lambda: sum(len(each.state()["rooms"]) for each in cluster.of("prefill")) == 20, "rooms")
    for instance in cluster.of("decode"):
        instance.fault()  # whoever comes from here on is not kept waiting
    for client in gone:
        await client.reset()
    cluster.wait_idle()
    if engine == "vllm":
        assert expired(cluster.instances) == 0
        assert cluster.coordinator.metric("pd_coordinator_handoffs_abandoned_total") == 0


async def test_releases_with_several_processes(start):
    """Each process knows all decode instances, so that KV is fetched by one that works."""
    cluster = in_front_of(start, "vllm", fleet(start, "vllm", "prefill", "decode", "decode"), server={"workers": 2})
    cluster.of("decode")[0].fault("status=500")
    for _ in range(10):
        status, headers, _ = call(cluster.port, CHAT.path, CHAT.body("Tell me about the sea"))
        assert (status, headers["x-pd-decode"]) == (200, "d1")
    cluster.wait_idle()
    assert expired(cluster.instances) == 0

    def released_and_failed() -> list[float]:
        counted = cluster.coordinator.metric
        failed = counted("pd_coordinator_engine_failures_total", instance="d0")
        return [counted("pd_coordinator_aborts_total", result="sent"), failed]

    until(lambda: len(set(released_and_failed())) == 1, "as many are released as have failed")
    assert released_and_failed()[0] > 0


def with_hybrid(start, engine, victim, fallback):
    """A pair, whose decode is `victim`, and an ordinary engine beside it."""
    pair = [*fleet(start, engine, "prefill"), victim]
    beside = fleet(start, engine, "hybrid")
    rows = [
        {"id": f"{each.role[0]}0", "role": each.role, "url": each.url, "engine": engine, "model": MODEL}
        for each in pair
    ]
    rows.append({"id": "h0", "role": "hybrid", "url": beside[0].url, "engine": "hybrid", "model": MODEL})
    scheduling, timeouts = {"fallback": fallback}, {"schedule_s": 1}
    changes = {"cluster": {"engine": engine, "instances": rows}, "scheduling": scheduling, "timeouts": timeouts}
    cluster = start.in_front_of([*pair, *beside], **changes)
    until(lambda: set(cluster.coordinator.states().values()) == {"ready"}, "all are ready")
    return cluster


@engines
def test_a_hybrid_serves_while_the_pair_is_down(start, engine):
    victim = start.instance("decode", "--engine", engine, *ARGUMENTS)
    cluster = with_hybrid(start, engine, victim, "hybrid")
    for stream in (True, False):
        status, headers, _ = call(cluster.port, CHAT.path, CHAT.body("Hello") | {"stream": stream})
        assert (status, headers["x-pd-prefill"], headers["x-pd-decode"]) == (200, "p0", "d0")
    victim.kill()
    until(lambda: cluster.coordinator.states()["d0"] == "down", "it is down")
    assert cluster.coordinator.ready()
    for stream in (True, False):
        status, headers, body = call(cluster.port, CHAT.path, CHAT.body("Hello") | {"stream": stream})
        assert (status, headers["x-pd-prefill"], headers["x-pd-decode"]) == (200, "h0", "h0")
        assert body.endswith(b"data: [DONE]\n\n") is stream
    start.again(victim)
    until(lambda: cluster.coordinator.states()["d0"] == "ready", "it is back")
    assert call(cluster.port, CHAT.path, CHAT.body("Hello"))[1]["x-pd-decode"] == "d0"


@engines
def test_without_the_fallback_the_pair_alone_serves(start, engine):
    victim = start.instance("decode", "--engine", engine, *ARGUMENTS)
    cluster = with_hybrid(start, engine, victim, "none")
    assert call(cluster.port, CHAT.path, CHAT.body("Hello"))[0] == 200
    victim.kill()
    until(lambda: cluster.coordinator.states()["d0"] == "down", "it is down")
    status, headers, _ = call(cluster.port, CHAT.path, CHAT.body("Hello"))
    assert (status, headers["retry-after"]) == (503, "1")
