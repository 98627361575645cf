"""Several processes behind one port (`server.workers`)."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from dialects import CHAT, CHAT_STREAM, DIALECTS, events
from processes import HOST, Coordinator, call, listens, port_in, sockets_of, until
from raw_client import Client, ask, eventually
from traffic import HELD, open_streams

pytestmark = pytest.mark.xdist_group("workers")
TWO = {"workers": 2, "port": 0, "management_port": 0, "route_headers": True}
ENDLESS = "[[fault:stall@4]]"


def workers_of(coordinator: Coordinator) -> list[int]:
    """Process ids of the children that serve."""
    children = Path(f"/proc/{coordinator.pid}/task/{coordinator.pid}/children").read_text().split()
    return sorted(int(pid) for pid in children)


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def port_of(client: Client) -> int:
    """The client's own port."""
    return client._writer.get_extra_info("sockname")[1]


def by_worker(coordinator: Coordinator, clients: list[Client]) -> dict[int, list[Client]]:
    """Which worker has which client."""
    found: dict[int, list[Client]] = {}
    for pid in workers_of(coordinator):
        ports = {port_in(fields[2]) for fields in sockets_of(pid)}
        found[pid] = [client for client in clients if port_of(client) in ports]
    return found


async def streams_on_both(coordinator: Coordinator, prompts: list[str], limit: int = 30) -> dict[int, list[Client]]:
    """Streams that have begun, at least two at each worker; the system deals them out by chance."""
    streams = await open_streams(coordinator.port, CHAT_STREAM, prompts, limit)
    shares = by_worker(coordinator, streams)
    while min(map(len, shares.values())) < 2:
        assert len(streams) < 60
        streams += await open_streams(coordinator.port, CHAT_STREAM, prompts[:1], limit)
        shares = by_worker(coordinator, streams)
    assert sum(map(len, shares.values())) == len(streams)
    return shares


@pytest.fixture
def cluster(start):
    """One prefill, two decode instances, two workers."""
    return start.cluster(1, 2, server=TWO, timeouts={"drain_s": 30})


async def test_every_family_is_served_and_one_page_has_the_sums(cluster):
    coordinator = cluster.coordinator
    assert len(workers_of(coordinator)) == 2
    prompt = "Tell me about the sea"
    for dialect in DIALECTS:
        answers = [await ask(cluster.port, dialect.path, dialect.body(prompt)) for _ in range(2)]
        texts = {dialect.text(answer.body, prompt) for answer in answers}
        assert [answer.status for answer in answers] == [200, 200], dialect.name
        assert len(texts) == 1
    done = 2 * len(DIALECTS)
    until(lambda: coordinator.metric("pd_coordinator_requests_total", outcome="ok") == done, "all are counted")
    assert coordinator.metric("pd_coordinator_request_duration_seconds_count") == done
    assert coordinator.metric("pd_coordinator_attempts_total", reason="first") == done
    cluster.wait_idle()
    requests = [line for line in coordinator.log().splitlines() if " request id=" in line]
    until(lambda: len([x for x in coordinator.log().splitlines() if " request id=" in x]) == done, f"{requests}")


async def test_load_is_even_over_decode_instances(start):
    cluster = start.cluster(1, 2, server=TWO, scheduling={"policy": "load_balance"})
    chosen: Counter[str] = Counter()

    async def some(count: int) -> None:
        for number in range(count):
            answer = await ask(cluster.port, CHAT_STREAM.path, CHAT_STREAM.body(f"Story {number}", 10))
            assert answer.status == 200
            chosen[answer.header("x-pd-decode")] += 1

    await asyncio.gather(*(some(20) for _ in range(20)))
    assert chosen.total() == 400
    assert 180 <= chosen["d0"] <= 220, chosen
    cluster.wait_idle()


async def test_a_killed_worker_loses_its_own_requests_only(cluster):
    coordinator = cluster.coordinator
    before = await ask(cluster.port, CHAT.path, CHAT.body("Hello"))
    assert before.status == 200
    until(lambda: coordinator.metric("pd_coordinator_requests_total", outcome="ok") == 1, "it is counted")
    prompts = [f"Story {number} {HELD}" for number in range(20)]
    shares = await streams_on_both(coordinator, prompts)
    going = sum(map(len, shares.values()))
    until(lambda: coordinator.metric("pd_coordinator_requests_in_flight") == going, "all are known")
    victim, survivor = shares
    os.kill(victim, signal.SIGKILL)
    for stream in shares[victim]:
        await stream.rest()
        assert not stream.complete
    await eventually(lambda: both_listen(coordinator), "its successor serves")
    cluster.go_on()
    for stream in shares[survivor]:
        await stream.rest()
        assert stream.complete
        assert events(stream.body)[-1] == "[DONE]"
    cluster.wait_idle()
    served = 1 + len(shares[survivor])
    until(lambda: coordinator.metric("pd_coordinator_requests_total", outcome="ok") == served, "they are counted")
    for _ in range(20):
        assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200
    assert f"{len(shares[victim])} live requests" in coordinator.log()
    for stream in (*shares[victim], *shares[survivor]):
        await stream.leave()


def both_listen(coordinator: Coordinator) -> bool:
    """Whether there are two workers that take connections."""
    return [listens(pid, coordinator.port) for pid in workers_of(coordinator)] == [True, True]


async def test_what_a_killed_worker_left_at_decode_is_stopped(cluster):
    coordinator = cluster.coordinator
    prompt = "Story [[fault:slow=0.05]] [[length:2000]]"
    shares = await streams_on_both(coordinator, [prompt] * 12, 2000)
    victim, survivor = shares
    os.kill(victim, signal.SIGKILL)
    await eventually(
        lambda: sum(decode.state()["stopped"] for decode in cluster.of("decode")) == len(shares[victim]),
        "its successor stops what it had going",
    )
    for stream in (*shares[victim], *shares[survivor]):
        await stream.reset()
    cluster.wait_idle()


@pytest.mark.slow
async def test_a_worker_that_hangs_is_replaced(cluster):
    """A stopped process takes connections and answers none; its place must not stay empty."""
    coordinator = cluster.coordinator
    hung, _ = workers_of(coordinator)
    os.kill(hung, signal.SIGSTOP)
    await eventually(lambda: hung not in workers_of(coordinator) and len(workers_of(coordinator)) == 2, "replaced", 60)
    assert "does not move" in coordinator.log()


async def test_a_worker_that_is_told_to_end_ends_well(cluster):
    coordinator = cluster.coordinator
    shares = await streams_on_both(coordinator, [f"Story {number} {HELD}" for number in range(12)])
    told = next(iter(shares))
    os.kill(told, signal.SIGTERM)
    for _ in range(10):  # its share of new connections goes to the other
        assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200
    cluster.go_on()
    for stream in [stream for share in shares.values() for stream in share]:
        await stream.rest()
        assert stream.complete
        await stream.leave()
    await eventually(lambda: told not in workers_of(coordinator) and len(workers_of(coordinator)) == 2, "replaced")
    served = sum(map(len, shares.values())) + 10
    until(lambda: coordinator.metric("pd_coordinator_requests_total", outcome="ok") == served, "all are counted")
    cluster.wait_idle()


async def test_all_streams_end_before_the_end(cluster):
    coordinator = cluster.coordinator
    shares = await streams_on_both(coordinator, [f"Story {number} {HELD}" for number in range(12)])
    pids = workers_of(coordinator)
    coordinator.signal(signal.SIGTERM)
    await eventually(lambda: not coordinator.ready(), "not ready at once")
    cluster.go_on()
    for stream in [stream for share in shares.values() for stream in share]:
        await stream.rest()
        assert stream.complete
        await stream.leave()
    assert coordinator.wait() == 0
    assert not any(map(alive, pids))
    cluster.wait_kv_free()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_reaches_every_process(cluster, number):
    """A terminal, or a service manager, tells all of them at once."""
    coordinator = cluster.coordinator
    shares = await streams_on_both(coordinator, [f"Story {count} {HELD}" for count in range(12)])
    for pid in (*workers_of(coordinator), coordinator.pid):
        os.kill(pid, number)
    cluster.go_on()
    for stream in [stream for share in shares.values() for stream in share]:
        await stream.rest()
        assert stream.complete
        await stream.leave()
    assert coordinator.wait() == 0
    assert "is killed" not in coordinator.log()


async def test_what_outlives_the_grace_time_is_ended_visibly(start):
    cluster = start.cluster(1, 2, server=TWO, timeouts={"drain_s": 0.5})
    shares = await streams_on_both(cluster.coordinator, [ENDLESS] * 12)
    cluster.coordinator.signal(signal.SIGTERM)
    for stream in [stream for share in shares.values() for stream in share]:
        assert events(await stream.rest())[-1]["error"]["code"] == "draining"
        assert not stream.complete
        await stream.leave()
    assert cluster.coordinator.wait() == 0
    cluster.wait_kv_free()


async def test_a_second_signal_cuts_it_short(start):
    cluster = start.cluster(1, 2, server=TWO, timeouts={"drain_s": 60})
    shares = await streams_on_both(cluster.coordinator, [ENDLESS] * 12)
    pids = workers_of(cluster.coordinator)
    cluster.coordinator.signal(signal.SIGTERM)
    await eventually(lambda: not cluster.coordinator.ready(), "the first signal has arrived")
    began_s = time.monotonic()
    cluster.coordinator.signal(signal.SIGTERM)
    assert cluster.coordinator.wait() == 1
    assert time.monotonic() - began_s < 40  # and not after the minute that it had
    assert not any(map(alive, pids))
    for stream in [stream for share in shares.values() for stream in share]:
        await stream.rest()
        assert not stream.complete
        await stream.leave()
    assert not any(cluster.kv_blocks())


async def test_workers_do_not_outlive_their_supervisor(start):
    cluster = start.cluster(1, 1, server=TWO)
    pids = workers_of(cluster.coordinator)
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS])
    cluster.coordinator.kill()
    await stream.rest()
    assert not stream.complete
    await eventually(lambda: not any(map(alive, pids)), "they end by themselves")
    await stream.leave()


async def test_the_file_is_read_again(cluster):
    coordinator = cluster.coordinator
    config = cluster.config
    rows = config["cluster"]["instances"]
    coordinator.write_config({**config, "cluster": {**config["cluster"], "instances": rows[:2]}})
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: coordinator.states() == {"p0": "ready", "d0": "ready"}, "d1 is gone")
    await eventually(lambda: chosen_by(coordinator) == {"d0"}, "both know")
    coordinator.write_config(config)
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: coordinator.states().get("d1") == "ready", "d1 is back")
    await eventually(lambda: len(workers_of(coordinator)) == 2, "nobody took the signal for an end")
    await eventually(lambda: chosen_by(coordinator) == {"d0", "d1"}, "both know")


def chosen_by(coordinator: Coordinator) -> set[str]:
    """The decode instances of some requests, each on a connection of its own."""
    answers = [call(coordinator.port, CHAT.path, CHAT.body("Hello")) for _ in range(12)]
    assert {status for status, _, _ in answers} == {200}
    return {headers["x-pd-decode"] for _, headers, _ in answers}


async def test_an_instance_goes_when_its_last_request_has_ended(cluster):
    coordinator = cluster.coordinator
    streams = await open_streams(cluster.port, CHAT_STREAM, [f"Story {number} {HELD}" for number in range(8)])
    assert call(coordinator.management_port, "/v1/instances/d1", method="DELETE")[0] == 202
    assert coordinator.states()["d1"] == "draining"
    cluster.go_on()
    for stream in streams:
        await stream.rest()
        assert stream.complete
        await stream.leave()
    await eventually(lambda: "d1" not in coordinator.states(), "it is gone")
    await eventually(lambda: instances_on_the_page(coordinator) == {"p0", "d0"}, "its series are gone")


def instances_on_the_page(coordinator: Coordinator) -> set[str]:
    """Every instance that a metric names."""
    samples = [sample for family in coordinator.metric_families() for sample in family.samples]
    return {sample.labels["instance"] for sample in samples if sample.labels.get("instance")}


async def test_limits_hold_for_all_processes_together(start):
    cluster = start.cluster(1, 1, server=TWO, limits={"max_requests": 10})
    streams = await open_streams(cluster.port, CHAT_STREAM, [ENDLESS] * 10)
    for _ in range(12):
        answer = await ask(cluster.port, CHAT.path, CHAT.body("Hello"))
        assert answer.status == 429
    for stream in streams:
        await stream.reset()
    cluster.wait_idle()
    assert (await ask(cluster.port, CHAT.path, CHAT.body("Hello"))).status == 200


def test_a_port_that_is_shared_by_another_coordinator(start):
    """SO_REUSEPORT alone would let a second one in."""
    cluster = start.cluster(1, 1, server=TWO)
    path = cluster.coordinator.config_path.with_name("second.yaml")
    path.write_text(json.dumps({**cluster.config, "server": {**TWO, "host": HOST, "port": cluster.port}}))
    second = start.command("serve", "--config", str(path))
    assert second.wait() == 1
    assert len(second.log().splitlines()) == 1
    assert "cannot listen" in second.log()
    cluster.coordinator.signal(signal.SIGTERM)
    assert cluster.coordinator.wait() == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_engines_without_a_standing_stream(start, engine):
    options = [{"role": role, "engine": engine} for role in ("prefill", "decode", "decode")]
    instances = list(start.fleet(options).instances)
    cluster = start.in_front_of(instances, server=TWO, each={"engine": engine})
    chosen = set()
    for dialect in (CHAT, CHAT_STREAM) * 8:
        answer = await ask(cluster.port, dialect.path, dialect.body("Tell me about the sea"))
        assert answer.status == 200
        assert answer.complete
        assert (b"[DONE]" in answer.body) is (dialect is CHAT_STREAM)
        chosen.add(answer.header("x-pd-decode"))
    assert chosen == {"d0", "d1"}
    shares = await streams_on_both(cluster.coordinator, [ENDLESS] * 12)
    victim, survivor = shares
    os.kill(victim, signal.SIGKILL)
    for stream in shares[victim]:
        await stream.rest()
        assert not stream.complete
    until(lambda: cluster.coordinator.metric("pd_coordinator_requests_in_flight") == len(shares[survivor]), "its load")
    for stream in (*shares[victim], *shares[survivor]):
        await stream.reset()
    cluster.wait_idle()
