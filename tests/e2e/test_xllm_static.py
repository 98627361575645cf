"""xLLM without etcd: the demo, and instances that stand in the file, over several processes."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from clusters import QUICK_HEALTH
from processes import NEVER_IN_A_LOG, call, call_json, until

pytest.importorskip("google.protobuf")
from instances.xllm.vocabulary import write_tokenizer

pytestmark = pytest.mark.xdist_group("xllm static")
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}


@pytest.fixture
def reserved_port():
    """A port that the system gives to nobody else, and on which one process can listen nevertheless."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_the_demo():
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "demo", "--engine", "xllm", "--once", "--port", "0", "--prefill", "1",
         "--decode", "1"],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in (*NEVER_IN_A_LOG, " ERROR ")), done.stderr  # a slow machine may warn
    shown = re.search(r"(\d+) tokens from decode d0, the prompt computed on prefill p0", done.stdout)
    assert shown
    assert int(shown.group(1)) > 3


def test_the_demo_serves_several_choices(start):
    demo = start.command("demo", "--engine", "xllm", "--port", "0", "--prefill", "1", "--decode", "1")
    port = int(demo.said(r"The coordinator serves on http://127\.0\.0\.1:(\d+)").group(1))
    demo.said("Ctrl-C ends it")
    answer = call_json(port, "/v1/chat/completions", {**CHAT, "model": "demo", "n": 2})
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1]
    demo.signal(signal.SIGINT)
    assert demo.wait() == 0


def entry(each, ident, number):
    pd_port = re.search(r"pd_port (\d+)", each.log()).group(1)
    return {"role": each.role, "url": each.url, "id": ident, "rpc_address": f"127.0.0.1:{pd_port}",
            "cluster_ids": [number + 1], "addrs": ["127.0.0.1"], "ports": [1]}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_instances_in_the_file_with_policies_of_their_own(start, tmp_path, reserved_port, workers):
    write_tokenizer(tmp_path / "tokenizer")
    rpc_port = reserved_port
    told = ["--engine", "xllm", "--service", f"127.0.0.1:{rpc_port}", "--prefix-blocks", "200",
            "--set", "cache_events=1", "--set", "heartbeat_s=0.1", "--prefill-ms", "3", "--decode-ms", "3"]  # fmt: skip
    instances = {name: start.instance("prefill" if name[0] == "p" else "decode", *told) for name in ("p0", "p1", "d0")}
    coordinator = start.coordinator(
        {
            "server": {"port": 0, "management_port": 0, "route_headers": True, "workers": workers},
            "cluster": {
                "engine": "xllm",
                "tokenizer": str(tmp_path / "tokenizer"),
                "instances": [entry(each, name, at) for at, (name, each) in enumerate(instances.items())],
            },
            "engines": {"xllm": {"rpc_port": rpc_port}},
            "scheduling": {"policy": {"prefill": "xllm_cache_aware", "decode": "xllm_slo"}},
            "health": QUICK_HEALTH,
        }
    )
    coordinator.wait_ready()
    until(lambda: set(coordinator.states().values()) == {"ready"}, "all are ready")
    prompt = "word " * 600
    status, headers, body = call(coordinator.port, "/v1/completions", {"prompt": prompt, "max_tokens": 5})
    assert status == 200, body
    first = headers["x-pd-prefill"]
    until(lambda: instances[first].state()["presence"]["heartbeats"] > 3, "it beats")
    beats = instances[first].state()["presence"]["heartbeats"]
    until(lambda: instances[first].state()["presence"]["heartbeats"] > beats + 2, "its cache is told of")
    again = [call(coordinator.port, "/v1/completions", {"prompt": prompt, "max_tokens": 5})[1] for _ in range(4)]
    assert {one["x-pd-prefill"] for one in again} == {first}, "the prompt is in its cache"
    coordinator.wait_idle()
    assert all(each.state()["other_ids"] == 0 for each in instances.values())
