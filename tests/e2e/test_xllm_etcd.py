"""xLLM, two prefill and two decode instances that register in a real etcd: whatever restarts, clients see no more of it
than the contract says."""

import json
import sys
import time
from pathlib import Path

import pytest
from processes import call, until

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from etcd_server import Etcd, needs_etcd

from instances.xllm.vocabulary import write_tokenizer

pytestmark = [needs_etcd, pytest.mark.xdist_group("xllm etcd")]
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}
HASTY = {"heartbeat_timeout_s": 1.5, "suspect_s": 1.0, "lease_ttl_s": 1}


class Site:
    """Everything that runs."""

    def __init__(self, start, etcd, folder):
        self.start, self.etcd, self.folder = start, etcd, folder
        self.tokenizer = folder / "tokenizer"
        write_tokenizer(self.tokenizer)
        self.rpc_port = etcd.ports.take()
        self.instances = {}
        self.coordinator = None

    def instance(self, name):
        role = {"p": "prefill", "d": "decode", "m": "prefill"}[name[0]]
        more = ["--type", "MIX"] if name[0] == "m" else []
        self.instances[name] = self.start.instance(
            role, "--engine", "xllm", "--etcd", f"http://{self.etcd.endpoint}", "--set", "etcd_ttl_s=1",
            "--set", "heartbeat_s=0.2", "--set", "master_poll_s=0.2", "--decode-ms", "3", "--prefill-ms", "3", *more,
        )  # fmt: skip
        return self.instances[name]

    def serve(self, workers=1, **settings):
        given = {"rpc_port": self.rpc_port, "etcd_endpoints": [self.etcd.endpoint], **HASTY, **settings}
        self.coordinator = self.start.coordinator(
            {
                "server": {"port": 0, "management_port": 0, "route_headers": True, "workers": workers},
                "cluster": {"engine": "xllm", "tokenizer": str(self.tokenizer)},
                "engines": {"xllm": given},
                "health": {"interval_s": 0.2, "timeout_s": 2, "fail_after": 2, "recover_after": 1},
                "timeouts": {"drain_s": 3},
            }
        )
        return self.coordinator

    @property
    def names(self):
        return {name: f"127.0.0.1:{each.port}" for name, each in self.instances.items()}

    def ready(self, *names):
        wanted = {self.names[name] for name in names}

        def look():
            states = self.coordinator.states()
            return {name for name, state in states.items() if state == "ready"} == wanted

        until(look, f"{names} are ready", 30)

    def ask(self, **more):
        return call(self.coordinator.port, "/v1/chat/completions", {**CHAT, **more})

    def works(self, times=4):
        for _ in range(times):
            status, _, body = self.ask()
            assert status == 200, body
            assert b"KV-LOST" not in body

    def log(self):
        return self.coordinator.log()


@pytest.fixture
def site(start, tmp_path):
    etcd = Etcd(tmp_path)
    etcd.start()
    made = Site(start, etcd, tmp_path)
    for name in ("p0", "p1", "d0", "d1"):
        made.instance(name)
    yield made
    for each in made.instances.values():
        if each.running:
            assert each.state()["aborts"] == []
    start.close()
    start._started.clear()
    etcd.stop()


@pytest.mark.parametrize("workers", [1, 2])
def test_instances_that_register_serve(site, workers):
    site.serve(workers)
    site.ready("p0", "p1", "d0", "d1")
    site.works(8)
    links = [site.instances[name].state()["links"] for name in ("d0", "d1")]
    assert all(len(each["peers"]) == 2 and not each["implicit"] for each in links)
    assert all(site.instances[name].state()["presence"]["heartbeats_refused"] == 0 for name in site.instances)
    site.coordinator.wait_idle()


def test_an_instance_that_is_killed_and_comes_back(site):
    site.serve()
    site.ready("p0", "p1", "d0", "d1")
    site.works()
    gone = site.instances["d0"]
    gone.kill()
    site.ready("p0", "p1", "d1")
    site.works()
    site.instances["d0"] = site.start.again(gone)
    site.ready("p0", "p1", "d0", "d1")
    site.works(8)
    state = site.instances["d0"].state()
    assert state["presence"]["heartbeats_refused"] == 0
    assert len(state["links"]["peers"]) == 2
    assert not state["links"]["implicit"]


def test_etcd_that_is_killed_and_comes_back(site):
    site.serve()
    site.ready("p0", "p1", "d0", "d1")
    site.etcd.kill()
    site.coordinator.said("etcd is lost, instances stay as they are known")
    site.works()
    site.etcd.start()
    site.coordinator.said("etcd is back")
    site.ready("p0", "p1", "d0", "d1")
    site.works()


def test_a_coordinator_that_is_killed_and_comes_back(site):
    first = site.serve()
    site.ready("p0", "p1", "d0", "d1")
    first.kill()
    site.serve()
    site.ready("p0", "p1", "d0", "d1")
    until_s = time.monotonic() + 3  # the lease of the first one ends meanwhile
    while time.monotonic() < until_s:
        site.works(1)


def test_two_coordinators_each_get_their_own_results(site):
    first = site.serve()
    site.ready("p0", "p1", "d0", "d1")
    second = site.serve(rpc_port=site.etcd.ports.take())
    site.ready("p0", "p1", "d0", "d1")
    for _ in range(4):
        answers = [call(each.port, "/v1/chat/completions", CHAT)[::2] for each in (first, second)]
        assert [status for status, _ in answers] == [200, 200]
        texts = [json.loads(body)["choices"][0]["message"]["content"] for _, body in answers]
        assert texts[0] == texts[1]
    first.stop()
    second.said("now master")
    site.ready("p0", "p1", "d0", "d1")
    site.works()
    until(lambda: site.instances["d0"].state()["presence"]["master"].endswith(str(second_port(second))), "found it", 20)


def second_port(coordinator):
    return coordinator.said(r"reach this coordinator at \S+:(\d+)").group(1)


def test_mix_instances_beside_the_others(site):
    site.serve()
    site.ready("p0", "p1", "d0", "d1")
    site.instance("m0")
    site.ready("p0", "p1", "d0", "d1", "m0")
    rows = {row["id"]: row["role"] for row in site.coordinator.manage("/v1/instances")["instances"]}
    assert rows[site.names["m0"]] == "prefill"
    site.works(8)


def test_without_instances_of_one_role_there_is_503(site):
    site.serve()
    site.ready("p0", "p1", "d0", "d1")
    for name in ("d0", "d1"):
        site.instances[name].kill()
    until(lambda: not site.coordinator.ready(), "no pair is left", 30)
    status, headers, _ = site.ask()
    assert status == 503
    assert int(headers["retry-after"]) >= 1
