"""Instances from files, DNS and Kubernetes, in front of real processes."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from certificates import Authority
from clusters import cluster_config
from dialects import CHAT, CHAT_STREAM
from dns_server import Dns
from kubernetes_api import KubernetesApi, changed, pod, terminating, write_kubeconfig
from processes import call, replace_file
from raw_client import eventually
from traffic import HELD, open_streams

pytestmark = pytest.mark.xdist_group("discovery")
PAIR = [{"role": "prefill"}, {"role": "decode"}]
WORKERS = pytest.mark.parametrize("workers", [1, 2])


def row(instance, ident):
    return {"id": ident, "role": instance.role, "url": instance.url}


def config(discovery, workers=1):
    """A configuration without a single instance of its own."""
    return cluster_config([], {"discovery": discovery, "server": {"workers": workers}})


def replace(path: Path, rows):
    """Write a file of instances in one step."""
    replace_file(path, rows if isinstance(rows, str) else json.dumps(rows))


def sources(coordinator):
    return {one["source"].partition(":")[0]: one for one in coordinator.manage("/v1/discovery")["sources"]}


async def serve(coordinator, prefill, decode):
    """Ask until these instances have served, whichever process was asked: each is told of changes a little later."""

    def served():
        status, headers, body = call(coordinator.port, CHAT.path, CHAT.body("Hello"))
        assert status == 200, body
        return (headers["x-pd-prefill"], headers["x-pd-decode"])

    await eventually(lambda: {served() for _ in range(6)} == {(prefill, decode)}, f"{prefill} and {decode} serve")


@WORKERS
async def test_files(start, tmp_path, workers):
    p0, d0, p1, d1 = start.fleet(PAIR * 2).instances
    path = tmp_path / "instances.d" / "a.json"
    path.parent.mkdir()
    replace(path, [row(p0, "p0"), row(d0, "d0")])
    coordinator = start.coordinator(config({"files": ["instances.d/*.json"]}, workers))
    await eventually(coordinator.ready, "instances of the file serve", 30)
    await serve(coordinator, "p0", "d0")

    prompts = [f"Story {number} {HELD}" for number in range(4)]
    streams = await open_streams(coordinator.port, CHAT_STREAM, prompts)
    replace(path, [row(p1, "p1"), row(d1, "d1")])
    await eventually(lambda: coordinator.states().get("d1") == "ready", "the new ones are ready", 30)
    await eventually(lambda: coordinator.states()["d0"] == "draining", "the old one drains")
    await serve(coordinator, "p1", "d1")
    d0.act("go_on")
    for prompt, stream in zip(prompts, streams, strict=True):
        assert CHAT_STREAM.text(await stream.rest(), prompt)  # those that ran there went on to their ends
        await stream.leave()
    await eventually(lambda: coordinator.states().keys() == {"p1", "d1"}, "the old ones are gone", 30)

    replace(path, '[{"role": "prefill",\n "urk": "http://10.0.0.1:1"}]')
    await eventually(lambda: not sources(coordinator)["files"]["up"], "the broken file is told", 30)
    assert "a.json:2: instances[0].urk: unknown key; did you mean 'url'?" in sources(coordinator)["files"]["reason"]
    coordinator.said("its 2 instances stay", 30)
    assert coordinator.metric("pd_coordinator_discovery_up") == 0
    assert coordinator.metric("pd_coordinator_discovery_instances") == 2
    await serve(coordinator, "p1", "d1")
    replace(path, [row(p0, "p0"), row(d0, "d0"), row(d1, "d1")])
    wanted = {"p0": "ready", "d0": "ready", "d1": "ready"}
    await eventually(lambda: coordinator.states() == wanted, "the good file counts again", 30)
    assert coordinator.metric("pd_coordinator_discovery_up") == 1


async def test_dns(start):
    p0, d0, d1 = start.fleet([*PAIR, {"role": "decode"}]).instances
    with Dns() as dns:
        for name, instances in (("prefill", [p0]), ("decode", [d0])):
            dns.set(f"{name}.test.", "SRV", *((0, 0, one.port, "machine.test.") for one in instances))
        dns.set("machine.test.", "A", "127.0.0.1")
        common = {"type": "SRV", "nameservers": [dns.address], "min_interval_s": 0.1, "max_interval_s": 0.2}
        records = [{"name": f"{role}.test", "role": role, **common} for role in ("prefill", "decode")]
        coordinator = start.coordinator(config({"dns": records}))
        await eventually(coordinator.ready, "instances of the records serve", 30)
        await serve(coordinator, f"prefill-127.0.0.1:{p0.port}", f"decode-127.0.0.1:{d0.port}")

        dns.set("decode.test.", "SRV", (0, 0, d1.port, "machine.test."))
        wanted = {f"prefill-127.0.0.1:{p0.port}": "ready", f"decode-127.0.0.1:{d1.port}": "ready"}
        await eventually(lambda: coordinator.states() == wanted, "the other one has taken its place", 30)
        dns.mode = "servfail"
        dns.forget("decode.test.")
        await eventually(lambda: coordinator.metric("pd_coordinator_discovery_up") == 0, "it cannot be asked", 30)
        assert coordinator.states() == wanted
        await serve(coordinator, f"prefill-127.0.0.1:{p0.port}", f"decode-127.0.0.1:{d1.port}")
        dns.mode = "ok"
        await eventually(lambda: len(coordinator.states()) == 1, "there is no decode any more, says the zone", 30)
        assert not coordinator.ready()
        coordinator.said("dns:decode.test is back", 30)
    assert coordinator.log().count("dns:decode.test has trouble, its 1 instances stay") == 1


def pod_of(instance, name, **more):
    labels = {"app": "engine", "pd-coordinator.io/role": instance.role}
    return pod(name, "127.0.0.1", labels=labels, ports={"http": instance.port}, **more)


@WORKERS
async def test_kubernetes(start, tmp_path, workers):
    p0, d0, d1 = start.fleet([*PAIR, {"role": "decode"}]).instances
    authority = Authority(tmp_path)
    token = tmp_path / "token"
    token.write_text("secret-1")

    with KubernetesApi(authority.issue("api")) as api:
        api.tokens = {"secret-1"}
        api.put(pod_of(p0, "p0"))
        api.put(pod_of(d0, "d0"))
        api.put(pod_of(d1, "d1", ready=False))
        path = write_kubeconfig(tmp_path / "kubeconfig", api, authority=authority.file, token_file=token)
        given = {"kubeconfig": str(path), "label_selector": "app=engine", "port": "http"}
        coordinator = start.coordinator(config({"kubernetes": [given]}, workers))
        await eventually(coordinator.ready, "ready pods serve", 30)
        assert coordinator.states() == {"p0": "ready", "d0": "ready"}
        await serve(coordinator, "p0", "d0")

        streams = await open_streams(coordinator.port, CHAT_STREAM, [f"Story {HELD}"])
        api.put(pod_of(d1, "d1"))
        api.put(terminating(pod_of(d0, "d0")))
        await eventually(lambda: coordinator.states().get("d1") == "ready", "a pod that became ready serves", 30)
        # from the moment on that its end begins
        await eventually(lambda: coordinator.states()["d0"] == "draining", "the terminating one drains")
        await serve(coordinator, "p0", "d1")
        d0.act("go_on")
        assert CHAT_STREAM.text(await streams[0].rest(), f"Story {HELD}")
        await streams[0].leave()
        await eventually(lambda: coordinator.states().keys() == {"p0", "d1"}, "it went once it was idle", 30)
        api.delete("Pod", "d0")

        await miss_something(api, coordinator, token, pod_of(d0, "d2"))
        await serve(coordinator, "p0", "d2")
        api.put(changed(pod_of(p0, "p0"), metadata={"labels": {"app": "engine"}}))
        await eventually(lambda: sources(coordinator)["kubernetes"]["refused"], "a pod without a role is told", 30)
        assert "it has no role" in sources(coordinator)["kubernetes"]["refused"]["p0"]


async def miss_something(api, coordinator, token, fresh):
    """The API server is away while d1 goes, another pod comes, the token is exchanged and the history is cut."""
    await asyncio.to_thread(api.away)
    await eventually(lambda: not sources(coordinator)["kubernetes"]["up"], "the API server is away", 20)
    await serve(coordinator, "p0", "d1")
    api.put(fresh)
    api.delete("Pod", "d1")
    api.tokens = {"secret-2"}
    api.compact()
    token.write_text("secret-2")
    await asyncio.to_thread(api.back)
    wanted = {"p0": "ready", fresh["metadata"]["name"]: "ready"}
    await eventually(lambda: coordinator.states() == wanted, "what happened meanwhile is caught up", 40)
    assert coordinator.metric("pd_coordinator_discovery_up") == 1
    await eventually(lambda: api.watching == 1, "one process looks, however many serve")


async def test_sources_beside_each_other_and_a_reload(start, tmp_path):
    p0, d0, d1 = start.fleet([*PAIR, {"role": "decode"}]).instances
    path = tmp_path / "more.json"
    replace(path, [row(d0, "d0"), row(d1, "d1")])
    settings = cluster_config([p0, d0], {})
    coordinator = start.coordinator(settings)
    await eventually(coordinator.ready, "instances of the configuration serve", 30)

    settings["discovery"] = {"files": [str(path)]}
    coordinator.write_config(settings)
    coordinator.signal(signal.SIGHUP)
    wanted = {"p0": "ready", "d0": "ready", "d1": "ready"}
    await eventually(lambda: coordinator.states() == wanted, "the source was added", 30)
    assert sources(coordinator)["files"]["refused"] == {"d0": "file has named this id before"}
    coordinator.said("d0 of files:", 30)
    assert sources(coordinator)["files"]["instances"] == 1

    settings["cluster"]["instances"] = settings["cluster"]["instances"][:1]
    coordinator.write_config(settings)
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: sources(coordinator)["files"]["instances"] == 2, "what the file lets go is taken", 30)
    assert coordinator.states() == wanted
    assert d0.state()["dresult"]["opened"] == 1  # and its links were left alone

    coordinator.manage("/v1/instances/d1", method="DELETE")
    await eventually(lambda: "d1" not in coordinator.states(), "it was removed by hand", 30)
    replace(path, [row(d0, "d0"), row(d1, "d1"), {"role": "hybrid", "url": "http://127.0.0.1:9", "id": "h0"}])
    await eventually(lambda: "h0" in coordinator.states(), "the file was read again", 30)
    assert sources(coordinator)["files"]["refused"] == {"d1": "removed by hand"}

    del settings["discovery"]
    coordinator.write_config(settings)
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: coordinator.states() == {"p0": "ready"}, "the source and what it named are gone", 30)
    assert coordinator.manage("/v1/discovery") == {"sources": []}
