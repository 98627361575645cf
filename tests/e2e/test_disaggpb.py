"""disaggpb clusters of real processes: the demo, several workers on one port, text, dead instances, TLS, removal."""

import http.client
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
from clusters import QUICK_HEALTH
from openai import OpenAI
from processes import call, until

from instances.disaggpb.vocabulary import write_tokenizer

pytestmark = pytest.mark.xdist_group("disaggpb")
IDS = list(range(20, 60))
ANY_SIZE = ("--max-message-bytes", "-1")
COMPLETIONS = "/v1/completions"


def processes(start, *roles):
    return [start.instance(role, "--engine", "disaggpb", "--model", "m", *ANY_SIZE, "--speed", "0") for role in roles]


def front(start, instances, *, cluster=None, settings=None, **server):
    rows = []
    for each in instances:
        number = sum(row["role"] == each.role for row in rows)
        rows.append({"id": f"{each.role[0]}{number}", "role": each.role, "url": each.url})
    coordinator = start.coordinator(
        {
            "server": {"port": 0, "management_port": 0, "route_headers": True, **server},
            "cluster": {"engine": "disaggpb", "instances": rows, **(cluster or {})},
            "engines": {"disaggpb": {"reconnect_s": 0.1, **(settings or {})}},
            "health": QUICK_HEALTH,
        }
    )
    coordinator.wait_ready()
    return coordinator


def ask(coordinator, ids=IDS, **more):
    """Status, headers, and the answer to a prompt of token ids."""
    body = {"token_ids": list(ids), "max_new_tokens": 8, "stream": False, **more}
    status, headers, answer = call(coordinator.port, COMPLETIONS, body)
    return status, headers, json.loads(answer)


def test_demo():
    words = [sys.executable, "-m", "coordinator", "demo", "--once", "--engine", "disaggpb", "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "token_ids" in done.stdout
    assert "<KV-LOST>" not in done.stdout
    assert re.search(r"\d+ tokens from decode d\d, the prompt computed on prefill p\d", done.stdout)


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_on_one_port(start, workers):
    """With uvloop, which `serve` runs on; each process has channels of its own."""
    instances = processes(start, "prefill", "prefill", "decode", "decode")
    coordinator = front(start, instances, workers=workers)
    status, _, wanted = ask(coordinator)
    assert status == 200
    routes = Counter()
    for _ in range(40):
        status, headers, answer = ask(coordinator)
        assert (status, answer) == (200, wanted)
        routes[headers["x-pd-prefill"], headers["x-pd-decode"]] += 1
    assert len(routes) == 4
    served = partial(coordinator.metric, "pd_coordinator_requests_total", api="disaggpb", outcome="ok")
    until(lambda: served() == 41, "all are counted, by each process")
    until(lambda: coordinator.metric("pd_coordinator_kv_buffered_bytes") == 0, "no KV is left on its way")
    until(lambda: not any(each.kv_blocks() for each in instances), "no KV is left at the instances")


def test_text_through_openais_own_client(start, tmp_path):
    write_tokenizer(tmp_path / "model")
    coordinator = front(start, processes(start, "prefill", "decode"), cluster={"tokenizer": str(tmp_path / "model")})
    with OpenAI(base_url=f"{coordinator.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Tell me something."}]
        whole = client.chat.completions.create(model="m", messages=messages, max_tokens=12)
        text = whole.choices[0].message.content
        assert text
        assert "<KV-LOST>" not in text
        assert whole.usage.completion_tokens > 3
        pieces = client.chat.completions.create(model="m", messages=messages, max_tokens=12, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text


def test_a_decode_process_that_is_killed(start):
    prefill, first, second = processes(start, "prefill", "decode", "decode")
    coordinator = front(start, [prefill, first, second])
    status, _, wanted = ask(coordinator)
    assert status == 200
    second.kill()
    for _ in range(6):
        status, headers, answer = ask(coordinator)
        assert (status, answer, headers["x-pd-decode"]) == (200, wanted, "d0")
    until(lambda: coordinator.states()["d1"] in ("down", "suspect"), "the dead one is found")
    back = start.again(second)
    until(lambda: coordinator.states()["d1"] == "ready", "it is back")
    assert {ask(coordinator)[1]["x-pd-decode"] for _ in range(4)} == {"d0", "d1"}
    until(lambda: back.kv_blocks() == 0, "no KV is left")


def test_a_client_that_leaves(start):
    prefill, decode = processes(start, "prefill", "decode")
    coordinator = front(start, [prefill, decode])
    for stage, instance in (("prefill_stall@2", prefill), ("decode_stall@1", decode)):
        instance.fault(stage)
        connection = http.client.HTTPConnection("127.0.0.1", coordinator.port, timeout=30)
        connection.request("POST", COMPLETIONS, json.dumps({"token_ids": IDS}))
        until(lambda instance=instance: instance.state()["kv"]["allocated"], "it is under way")
        connection.close()
        until(lambda instance=instance: not instance.kv_blocks(), "the call is cancelled")
        instance.fault()
    until(lambda: coordinator.metric("pd_coordinator_requests_in_flight") == 0, "all is over")
    until(lambda: coordinator.metric("pd_coordinator_kv_buffered_bytes") == 0, "no KV is left on its way")
    assert coordinator.metric("pd_coordinator_requests_total", api="disaggpb", outcome="client_gone") == 2
    assert ask(coordinator)[0] == 200


def test_instances_come_and_go(start):
    instances = processes(start, "prefill", "decode", "decode")
    coordinator = front(start, instances[:2])
    status, _, wanted = ask(coordinator)
    row = {"id": "d9", "role": "decode", "url": instances[2].url}
    assert call(coordinator.management_port, "/v1/instances", row)[0] == 201
    until(lambda: coordinator.states()["d9"] == "ready", "the new one is ready")
    assert call(coordinator.management_port, "/v1/instances/d0", method="DELETE")[0] == 202
    until(lambda: "d0" not in coordinator.states(), "the old one is gone")
    for _ in range(3):
        status, headers, answer = ask(coordinator)
        assert (status, answer, headers["x-pd-decode"]) == (200, wanted, "d9")


def test_it_drains(start):
    """SIGTERM while a request runs: it is answered, and the process ends with status 0."""
    prefill, decode = processes(start, "prefill", "decode")
    coordinator = front(start, [prefill, decode])
    decode.fault("decode_slow=0.1")
    connection = http.client.HTTPConnection("127.0.0.1", coordinator.port, timeout=30)
    connection.request("POST", COMPLETIONS, json.dumps({"token_ids": IDS, "max_new_tokens": 5}))
    until(lambda: decode.state()["kv"]["allocated"], "it is under way")
    coordinator.signal(signal.SIGTERM)
    body = connection.getresponse().read()
    assert b'"done":true' in body
    connection.close()
    assert coordinator.wait() == 0


def test_a_workers_limit_for_messages(start):
    """gRPC's default, which the original gateway runs into: 413, and the worker is not blamed."""
    shape = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    prefill = start.instance("prefill", "--engine", "disaggpb", *shape, *ANY_SIZE)
    decode = start.instance("decode", "--engine", "disaggpb", *shape)
    coordinator = front(start, [prefill, decode])
    status, _, answer = ask(coordinator, range(20, 80))
    assert status == 413
    assert "too long" in answer["error"]
    assert ask(coordinator, range(20, 40))[0] == 200
    assert coordinator.metric("pd_coordinator_engine_failures_total") == 0
