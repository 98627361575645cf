"""SIGHUP and POST /v1/config/reload: the file is read again."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from clusters import cluster_config
from dialects import CHAT, CHAT_STREAM
from processes import call, listens
from raw_client import ask, eventually
from traffic import HELD, open_streams

pytestmark = pytest.mark.xdist_group("reload")


async def test_instances_come_and_go(start):
    p0, d0, p1, d1 = start.fleet([{"role": role} for role in ("prefill", "decode") * 2]).instances
    cluster = start.in_front_of([p0, d0])
    coordinator = cluster.coordinator

    coordinator.write_config(cluster_config([p0, d0, p1, d1], {}))
    coordinator.signal(signal.SIGHUP)
    four = dict.fromkeys(("p0", "d0", "p1", "d1"), "ready")
    await eventually(lambda: coordinator.states() == four, "the new ones are ready")
    assert d0.state()["dresult"]["opened"] == 1  # what was there was left alone

    prompts = [f"Story {number} {HELD}" for number in range(8)]
    streams = await open_streams(cluster.port, CHAT_STREAM, prompts)
    assert d0.state()["decoding"]
    coordinator.write_config(without_first_pair(cluster_config([p0, d0, p1, d1], {})))
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: coordinator.states().get("d0") == "draining", "the one that is gone drains")
    before = d0.state()["accepted"]
    for number in range(6):
        reply = await ask(cluster.port, CHAT.path, CHAT.body(f"Question {number}"))
        assert (reply.header("x-pd-prefill"), reply.header("x-pd-decode")) == ("p1", "d1")
    assert d0.state()["accepted"] == before
    for decode in (d0, d1):
        decode.act("go_on")
    for prompt, stream in zip(prompts, streams, strict=True):
        assert CHAT_STREAM.text(await stream.rest(), prompt)  # those that ran there were not hurt
        await stream.leave()
    await eventually(lambda: coordinator.states().keys() == {"p1", "d1"}, "they are removed")
    await eventually(lambda: not d0.state()["dresult"]["open"], "its result stream is closed")
    assert not [s for f in coordinator.metric_families() for s in f.samples if s.labels.get("instance") == "d0"
                and s.name == "pd_coordinator_instance_up"]  # fmt: skip
    cluster.wait_idle()


def without_first_pair(config: dict) -> dict:
    """The file without p0 and d0."""
    config["cluster"]["instances"] = config["cluster"]["instances"][2:]
    return config


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("cluster: [", "cluster"),
        ("", "empty"),
        ('cluster: {engine: mindie, instances: [{role: prefil, url: "http://127.0.0.1:1"}]}', "did you mean 'prefill'"),
    ],
    ids=["no YAML", "empty", "wrong value"],
)
async def test_a_bad_file_changes_nothing_and_the_next_good_one_counts(start, bad: str, words: str):
    cluster = start.cluster()
    coordinator = cluster.coordinator
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [f"Story {HELD}"])
    for _ in range(3):
        before = coordinator.metric("pd_coordinator_config_reloads_total", result="invalid")
        coordinator.write_config(bad)
        coordinator.signal(signal.SIGHUP)
        await eventually(
            lambda b=before: coordinator.metric("pd_coordinator_config_reloads_total", result="invalid") > b, "seen"
        )
    coordinator.said("configuration not reloaded, nothing has changed")
    coordinator.said(re.escape(words))
    assert coordinator.states() == {"p0": "ready", "d0": "ready"}
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200

    coordinator.write_config(cluster.config)
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: coordinator.metric("pd_coordinator_config_reloads_total", result="ok") == 1, "it counts")
    assert cluster.decode.state()["dresult"]["opened"] == 1
    cluster.go_on()
    assert CHAT_STREAM.text(await stream.rest(), "")
    await stream.leave()


@pytest.mark.parametrize("workers", [1, 2])
async def test_everything_but_addresses_is_taken_while_streams_run(start, workers: int):
    server = {"workers": workers, "port": 0, "management_port": 0, "route_headers": True}
    cluster = start.cluster(server=server)
    coordinator = cluster.coordinator
    prompts = [f"Story {number} {HELD}" for number in range(8)]
    streams = await open_streams(cluster.port, CHAT_STREAM, prompts)

    changed = {
        "server": server | {"port": 7, "route_headers": False},
        "limits": {"max_requests": 1000, "max_body_bytes": 2000},
        "timeouts": {"drain_s": 5, "request_s": 50},
        "scheduling": {"policy": "round_robin"},
        "retry": {"max_attempts": 2},
        "logging": {"level": "debug"},
    }
    coordinator.write_config(cluster.config | changed)
    told = coordinator.manage("/v1/config/reload", b"", method="POST")
    assert told["applied"]
    assert {change["path"] for change in told["changed"]} == {
        "server.route_headers", "limits.max_body_bytes", "timeouts.request_s", "scheduling.policy",
        "retry.max_attempts", "logging.level",
    }  # fmt: skip
    assert told["restart"] == ["server.port"]
    shown = coordinator.manage("/v1/config")
    assert shown["settings"]["limits"]["max_body_bytes"] == 2000
    assert shown["settings"]["server"]["port"] == 0
    await eventually(lambda: all_refuse(cluster), "every process goes by it")
    for _ in range(12):  # each on a connection of its own, so that every process gets some
        reply = await ask(cluster.port, CHAT.path, CHAT.body("Question"))
        assert reply.status == 200
        assert not [name for name, _ in reply.headers if name.lower().startswith("x-pd-")]

    cluster.go_on()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert CHAT_STREAM.text(await stream.rest(), prompt)
        await stream.leave()
    cluster.wait_idle()

    before = coordinator.manage("/v1/config")
    coordinator.write_config("limits:\n  max_requests: many\nhelth: {}\n")
    status, _, text = call(coordinator.management_port, "/v1/config/reload", b"", method="POST")
    body = json.loads(text)
    assert status == 400
    assert [(problem["path"], problem["line"]) for problem in body["problems"]] == [
        ("limits.max_requests", 2), ("helth", 3),
    ]  # fmt: skip
    assert body["problems"][1]["hint"] == "did you mean 'health'?"
    assert coordinator.manage("/v1/config") == before
    for _ in range(6):
        assert (await ask(cluster.port, CHAT.path, CHAT.body("long " * 500))).status == 413


async def test_a_worker_that_starts_later_goes_by_what_is_in_force(start):
    cluster = start.cluster(server={"workers": 2, "port": 0, "management_port": 0})
    coordinator = cluster.coordinator
    coordinator.write_config(cluster.config | {"limits": {"max_requests": 1000, "max_body_bytes": 2000}})
    assert coordinator.manage("/v1/config/reload", b"", method="POST")["applied"]
    children = children_of(coordinator)
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)

    def both_are_back() -> bool:
        found = children_of(coordinator)
        listening = [pid for pid in found if listens(int(pid), cluster.port)]
        return len(listening) == 2 and not set(found) & set(children) and coordinator.ready()

    await eventually(both_are_back, "new workers serve", 60)
    assert all_refuse(cluster)
    assert "was killed by signal 9" in coordinator.log()


def all_refuse(cluster) -> bool:
    """Whether a long request is refused, each on a connection of its own, so that every process gets some."""
    long = CHAT.body("long " * 500)
    return all(call(cluster.port, CHAT.path, long)[0] == 413 for _ in range(12))


def children_of(coordinator) -> list[str]:
    """Process ids of its workers."""
    return Path(f"/proc/{coordinator.pid}/task/{coordinator.pid}/children").read_text().split()


@pytest.mark.parametrize("workers", [1, 2])
async def test_levels_of_the_log_are_changed_in_all_processes(start, workers: int):
    cluster = start.cluster(server={"workers": workers, "port": 0, "management_port": 0})
    coordinator = cluster.coordinator

    async def ask_often(prefix: str) -> None:
        for number in range(10):
            assert (
                await ask(cluster.port, CHAT.path, CHAT.body(f"{prefix} {number}"), {"X-Request-Id": prefix})
            ).status == 200

    quiet = coordinator.manage("/v1/log-level", {"levels": {"pd_coordinator.access": "error"}}, method="PUT")
    assert quiet == {"level": "info", "levels": {"pd_coordinator.access": "error"}}
    coordinator.metric_families()  # each process is asked behind what it was told
    await ask_often("quiet")
    assert coordinator.manage("/v1/config/reload", b"", method="POST")["changed"] == []
    await ask_often("loud")
    await eventually(lambda: coordinator.log().count(" id=loud ") == 10, "they are written again")
    assert " id=quiet " not in coordinator.log()  # it would be there by now
    coordinator.write_config(
        cluster.config | {"logging": {"format": "json", "levels": {"pd_coordinator.audit": "debug"}}}
    )
    assert coordinator.manage("/v1/config/reload", b"", method="POST")["applied"]
    await ask_often("json")
    await eventually(lambda: coordinator.log().count('"id":"json"') == 10, "they are JSON")
    coordinator.manage("/v1/instances")
    await eventually(lambda: '"logger":"pd_coordinator.audit"' in coordinator.log(), "its lines are written")
