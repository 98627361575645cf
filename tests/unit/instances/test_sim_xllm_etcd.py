"""Registration in a real etcd (xLLM protocol page §5.1)."""

import asyncio
import itertools
import json

import pytest
from real_etcd import real_etcd
from xllm_service import API, GUARD_S, PD, Cluster, Service, cluster_info, info_of, pd_address, post, rpc, until

from instances.options import Options
from instances.run import Fleet, run_instance
from instances.timing import Timing
from instances.xllm.errors import RpcLost
from instances.xllm.proto.engine_pb2 import InstanceClusterInfo, Status

MASTER = "XLLM:SERVICE:MASTER"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def etcd():
    with real_etcd() as started:
        yield started


def options(etcd, role="prefill", namespace=None, **more):
    settings = {
        "etcd": etcd.url,
        "etcd_namespace": f"n{next(_NUMBERS)}" if namespace is None else namespace,
        "master_poll_s": 0.05,
        "heartbeat_s": 0.05,
        **more.pop("settings", {}),
    }
    return Options(engine="xllm", role=role, settings=settings, **more)


def key_of(instance):
    engine = instance.engine
    prefix = f"/{engine.settings.etcd_namespace}/" if engine.settings.etcd_namespace else ""
    return f"{prefix}XLLM:{engine.type}:{engine.name}"


async def value_of(etcd, instance):
    return await etcd.get(key_of(instance))


async def reads(etcd, key, wanted, guard_s=GUARD_S):
    """The value of a key as soon as it is one that is wanted."""
    async with asyncio.timeout(guard_s):
        while True:
            value = await etcd.get(key)
            if wanted(value):
                return value
            await asyncio.sleep(0.02)


async def comes(etcd, instance, *, guard_s=GUARD_S):
    """The instance's JSON as soon as it is there."""
    return json.loads(await reads(etcd, key_of(instance), bool, guard_s))


async def goes(etcd, instance):
    await reads(etcd, key_of(instance), lambda value: not value)


async def be_master(etcd, instance, address):
    await etcd.ctl("put", f"/{instance.engine.settings.etcd_namespace}/{MASTER}", address)


async def test_nothing_is_served_before_there_is_a_master(etcd):
    async with Service() as service, run_instance(options(etcd)) as instance:
        namespace = instance.engine.settings.etcd_namespace
        await reads(etcd, f"/{namespace}/XLLM_PING", lambda value: value == "PING")
        assert not instance.engine.presence.ready
        assert instance.engine.pd_port == 0
        assert await value_of(etcd, instance) == ""
        status, headers, _ = await post(instance, f"/{API}/Completions", b"{}")
        assert (status, headers["x-bd-error-code"]) == (503, "2003")
        await be_master(etcd, instance, service.address)
        found = await comes(etcd, instance)
        await until(lambda: service.beats[instance.engine.name])
        assert found["rpc_address"] == pd_address(instance)


async def test_what_is_registered(etcd):
    timing = Timing(prefill_ms=10, prefill_token_ms=0.5, decode_ms=20, decode_load=0.1, speed=2)
    settings = {"dp_size": 2, "tp_size": 4}
    async with Service() as service, run_instance(options(etcd, "decode", timing=timing, settings=settings)) as decode:
        await be_master(etcd, decode, service.address)
        found = await comes(etcd, decode)
        assert (found["name"], found["type"], found["dp_size"]) == (f"{decode.host}:{decode.port}", 2, 2)
        assert len(found["cluster_ids"]) == len(found["addrs"]) == len(found["ports"]) == 8
        assert found["incarnation_id"] == decode.engine.presence.incarnation_id
        assert [256, 69.0] in found["ttft_profiling_data"]
        assert [256, 1, 10.0] in found["tpot_profiling_data"]
        assert [256, 8, 17.0] in found["tpot_profiling_data"]
        assert {"kv_split_size", "register_ts_ms", "worker_free_phy_pages", "model_weight_segments"} <= set(found)
        assert not {"k_cache_ids", "device_ips"} & set(found)


@pytest.mark.parametrize(("role", "kind", "number"), [("prefill", "", 1), ("hybrid", "", 0), ("decode", "MIX", 3)])
async def test_keys_of_all_types(etcd, role, kind, number):
    async with Service() as service, run_instance(options(etcd, role, settings={"type": kind, "proto": "old"})) as one:
        await be_master(etcd, one, service.address)
        found = await comes(etcd, one)
        assert found["type"] == number
        assert {"k_cache_ids", "v_cache_ids", "device_ips"} <= set(found)
        assert "kv_split_size" not in found


async def test_a_key_that_is_missing_is_put_again_and_goes_with_the_instance(etcd):
    async with Service() as service:
        async with run_instance(options(etcd)) as instance:
            await be_master(etcd, instance, service.address)
            first = await comes(etcd, instance)
            instance.engine.act("lose_key", "")
            await until(lambda: instance.engine.presence.puts == 2)
            assert await comes(etcd, instance) == first
        assert await value_of(etcd, instance) == ""


@pytest.mark.slow
async def test_a_crash_leaves_the_key_to_its_lease(etcd):
    async with Service() as service, run_instance(options(etcd)) as instance:
        await be_master(etcd, instance, service.address)
        first = await comes(etcd, instance)
        instance.crash()
        await until(lambda: not instance.engine.presence.ready)
        beats = len(service.beats[instance.engine.name])
        assert await value_of(etcd, instance)
        await goes(etcd, instance)
        assert len(service.beats[instance.engine.name]) <= beats + 1
        assert first["incarnation_id"] == instance.engine.presence.incarnation_id


async def test_a_restart_is_another_incarnation(etcd):
    async with Service() as service, run_instance(options(etcd)) as instance:
        await be_master(etcd, instance, service.address)
        first = await comes(etcd, instance)
        pd_port = instance.engine.pd_port
        instance.crash(0.01)
        await until(lambda: instance.engine.presence.incarnation_id != first["incarnation_id"])
        await until(lambda: instance.engine.presence.puts == 2)
        again = await comes(etcd, instance)
        assert again["incarnation_id"] == instance.engine.presence.incarnation_id
        assert (again["name"], again["rpc_address"]) == (first["name"], first["rpc_address"])
        assert instance.engine.pd_port == pd_port
        beats = service.beats[instance.engine.name]
        await until(lambda: any(beat.incarnation_id == again["incarnation_id"] for beat in beats))
        info = InstanceClusterInfo(instance_name="127.0.0.1:1", cluster_ids=[1], dp_size=1)
        assert (await rpc(pd_address(instance), PD, "LinkInstance", info, Status)).ok


@pytest.mark.slow
async def test_a_lost_lease_with_a_beating_heart(etcd):
    async with Service() as service, run_instance(options(etcd, settings={"etcd_ttl_s": 2})) as instance:
        await be_master(etcd, instance, service.address)
        await comes(etcd, instance)
        instance.faults.replace(["lease_lost"])
        await goes(etcd, instance)
        beats = len(service.beats[instance.engine.name])
        await until(lambda: len(service.beats[instance.engine.name]) > beats + 3)
        assert await value_of(etcd, instance) == ""
        instance.faults.replace([])
        await comes(etcd, instance)


@pytest.mark.slow
async def test_silence_with_a_living_lease(etcd):
    settings = {"etcd_ttl_s": 2}
    async with Service() as service, run_instance(options(etcd, faults=("silence",), settings=settings)) as instance:
        await be_master(etcd, instance, service.address)
        await comes(etcd, instance)
        await asyncio.sleep(3.5)  # more than the lease alone would last
        assert await value_of(etcd, instance)
        assert instance.engine.presence.puts == 1
        assert not service.beats[instance.engine.name]


async def test_the_master_changes_goes_and_comes(etcd):
    async with Service() as one, Service() as two, run_instance(options(etcd)) as instance:
        name = instance.engine.name
        await be_master(etcd, instance, one.address)
        await until(lambda: one.beats[name])
        await be_master(etcd, instance, two.address)
        await until(lambda: two.beats[name])
        await etcd.ctl("del", f"/{instance.engine.settings.etcd_namespace}/{MASTER}")
        await until(lambda: instance.engine.presence.master == "")
        await be_master(etcd, instance, one.address)
        seen = len(one.beats[name])
        await until(lambda: len(one.beats[name]) > seen)


async def test_a_pair_that_finds_itself(etcd):
    async with Service() as service, Fleet([options(etcd, role, "pair") for role in ("prefill", "decode")]) as fleet:
        prefill, decode = fleet.instances
        await be_master(etcd, prefill, service.address)
        await until(lambda: prefill.engine.presence.ready and decode.engine.presence.ready)
        service.known = {one.engine.name: info_of(one) for one in fleet.instances}
        assert (await rpc(pd_address(decode), PD, "LinkInstance", cluster_info(prefill), Status)).ok
        cluster = Cluster(0, 0)
        cluster.service, cluster.fleet = service, fleet
        _, gens = await cluster.run("hello [[length:4]]", stream=True)
        assert gens[-1].finished
        assert decode.engine.decode.lost_kv == 0
        # values that are not decode's own, as from a service that mixes instances up
        service.known[decode.engine.name].cluster_ids[:] = prefill.engine.cluster_ids
        ident, _ = await cluster.run("hello [[length:4]]", stream=True)
        assert "<KV-LOST>" in service.text(ident)
        assert await fleet.kv_empty()


@pytest.mark.slow
async def test_etcd_restarts():
    with real_etcd() as own:
        async with Service() as service, run_instance(options(own, settings={"etcd_ttl_s": 2})) as instance:
            await be_master(own, instance, service.address)
            await comes(own, instance)
            await asyncio.to_thread(own.stop)
            await until(lambda: any("lease/keepalive" in note or "kv/range" in note for note in instance.engine.notes))
            beats = len(service.beats[instance.engine.name])
            await until(lambda: len(service.beats[instance.engine.name]) > beats)
            await asyncio.to_thread(own.start)
            await comes(own, instance)
            await be_master(own, instance, "127.0.0.1:1")
            await until(lambda: instance.engine.presence.master == "127.0.0.1:1")


async def test_with_a_password():
    with real_etcd() as own:
        for words in (("user", "add", "root:secret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
            await own.ctl(*words)
        login = {"etcd_username": "root", "etcd_password": "secret", "etcd_namespace": ""}
        async with Service() as service, run_instance(options(own, settings=login)) as instance:
            await own.ctl("--user", "root:secret", "put", MASTER, service.address)
            await until(lambda: service.beats[instance.engine.name])
            found = await own.ctl("--user", "root:secret", "get", "--print-value-only", key_of(instance))
            assert json.loads(found)["name"] == instance.engine.name
        async with run_instance(options(own, settings={**login, "etcd_password": "wrong"})) as instance:
            await until(lambda: any("authenticate" in note for note in instance.engine.notes))
            assert not instance.engine.presence.ready


async def test_no_call_without_a_service():
    async with run_instance(Options(engine="xllm", role="prefill")) as instance:
        with pytest.raises(RpcLost, match="not ip:port"):
            instance.engine.channel(instance.engine.presence.master)
