"""From registrations to members of the cluster, and what becomes of them."""

import asyncio
import json
import logging

import pytest
from engine_world import GUARD_S, instance, until
from xllm_pair import FakeXllm, Pair

from coordinator.core.instance import Address, Role
from coordinator.engines.xllm import discovery as discovery_module
from coordinator.engines.xllm import linking
from coordinator.engines.xllm.discovery import Discovery
from coordinator.engines.xllm.info import options, read_registration
from coordinator.engines.xllm.registry import Beat

LOG = logging.getLogger("test.discovery")
KINDS = ("DEFAULT", "PREFILL", "DECODE", "MIX")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(discovery_module, "HEALTH_PAUSE_S", 0.01)
    monkeypatch.setattr(discovery_module, "HEALTH_S", GUARD_S)
    monkeypatch.setattr(linking, "FIRST_PAUSE_S", 0.01)


class Work:
    def __init__(self, instance_, requests, blocks):
        self.instance, self.requests, self.blocks = instance_, requests, blocks


class Host:
    """The cluster: attaches and detaches what is announced."""

    def __init__(self, pair):
        self.pair = pair
        self.members = {}
        self.history = []
        self.loads = {}

    def make(self, keys):
        role = Role(keys["role"])
        given = options({key: value for key, value in keys.items() if key not in ("id", "url", "role")})
        host, _, port = keys["id"].rpartition(":")
        letter = {Role.PREFILL: "p", Role.DECODE: "d", Role.HYBRID: "h"}[role]
        made = instance(letter, Address(host, int(port)), engine="xllm", options=given)
        object.__setattr__(made, "id", keys["id"])
        return made

    def announce(self, instances):
        wanted = {one.key: one for one in instances}
        self.history.append(sorted((one.id, one.role.value) for one in instances))
        for key, one in wanted.items():
            if key not in self.members:
                self.pair.attach(f"{one.id} {one.role}", one)
        for key in self.members.keys() - wanted.keys():
            gone = self.pair.engine.detach(self.members[key])
            self.pair.tasks.append(asyncio.create_task(gone, name="detach"))
        self.members = wanted
        return {}

    def works(self):
        return [Work(one, *self.loads.get(one.id, (0, 0))) for one in self.members.values()]

    @property
    def roles(self):
        return {one.id: one.role.value for one in self.members.values()}


class World(Pair):
    """An engine with discovery, without etcd: tests say what is registered."""

    def __init__(self):
        super().__init__(0, 0)
        self.now_s = 1000.0
        self.tasks = []

    async def __aenter__(self):
        await super().__aenter__()
        engine = self.engine
        await engine._inbound.listen()
        self.host = Host(self)
        self.discovery = Discovery(
            engine._settings, engine._fleet, self.host, engine._calls, LOG, clock=lambda: self.now_s
        )
        engine._fleet.registered = self.discovery
        self.discovery.mastered(master=True)
        return self

    async def __aexit__(self, *exit_):
        await self.discovery.aclose()
        await asyncio.gather(*self.tasks)
        await super().__aexit__(*exit_)

    async def register(self, kind, name, fake=None, incarnation="one", **more):
        fake = fake or await FakeXllm().listen()
        self.fakes[name] = fake
        self.discovery.put(*registration(kind, fake.name, incarnation, **more))
        return fake

    def watcher(self, fake, role):
        return self.watchers[f"{fake.name} {role}"]

    def beat(self, fake, incarnation="one"):
        return self.engine._fleet.beat(Beat(fake.name, incarnation, 0, 0.0))

    def state(self, fake):
        return self.discovery._entries[fake.name].condition.state.value

    def pass_(self, seconds, *beating):
        """Let time pass; these beat all the while."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 0.5, end_s)
            for fake in beating:
                self.beat(fake)
            self.discovery.look()

    def delete(self, kind, fake, incarnation="one"):
        key, value = registration(kind, fake.name, incarnation)
        self.discovery.deleted(key, value)


def registration(kind, name, incarnation="one", **more):
    told = {"name": name, "rpc_address": name, "type": KINDS.index(kind), "incarnation_id": incarnation,
            "register_ts_ms": 1, "cluster_ids": [3], "addrs": ["a"], "dp_size": 1, "ports": [5]}  # fmt: skip
    return f"XLLM:{kind}:{name}".encode(), json.dumps(told | more).encode()


# --- registrations


async def test_registered_instances_become_members_with_their_roles():
    async with World() as world:
        prefill, decode = await world.register("PREFILL", "p"), await world.register("DECODE", "d")
        both = await world.register("DEFAULT", "h")
        assert world.host.roles == {prefill.name: "prefill", decode.name: "decode", both.name: "hybrid"}
        await world.up()
        assert decode.links == [prefill.name]
        assert prefill.name not in both.links
        info = await prefill.channel.info(decode.name)
        assert (list(info.cluster_ids), list(info.ports), info.incarnation_id) == ([3], [5], "one")


async def test_a_list_names_all_there_are():
    async with World() as world:
        fakes = [await FakeXllm().listen() for _ in range(2)]
        world.fakes |= dict(enumerate(fakes))
        entries = dict(registration("PREFILL", fake.name) for fake in fakes)
        world.discovery.listed(entries)
        assert len(world.host.members) == 2
        assert len(world.host.history) == 1, "one change of members for all"
        gone = fakes[1]
        await gone.refuse()
        world.discovery.listed(dict([registration("PREFILL", fakes[0].name)]))
        await until(lambda: world.state(gone) == "suspect")
        assert len(world.host.members) == 2, "it is given time"


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"[1]", b"\xff", b'{"name":"a:1","rpc_address":"a:2","type":9}',
     b'{"name":"nonsense","rpc_address":"a:2","type":1}', b'{"name":"other:1","rpc_address":"a:2","type":1}',
     b'{"name":"a:1","rpc_address":"a:2","type":2}',
     b'{"name":"a:1","rpc_address":"a:2","type":1,"cluster_ids":[1,2,3],"dp_size":2}'],
)  # fmt: skip
async def test_a_registration_that_cannot_be_used_is_told_once(value, caplog):
    async with World() as world:
        for _ in range(2):
            world.discovery.put(b"XLLM:PREFILL:a:1", value)
        assert world.host.members == {}
        assert caplog.text.count("is not used") == 1


async def test_keys_of_something_else_are_passed_over():
    async with World() as world:
        world.discovery.put(b"XLLM:LOADMETRICS:a:1", b"{}")
        world.discovery.deleted(b"XLLM:LOADMETRICS:a:1", b"{}")
        world.discovery.deleted(b"XLLM:PREFILL:nobody:1", b"{}")
        assert world.host.history == []


def test_everything_but_name_address_and_type_may_be_missing():
    kind, keys = read_registration(b'{"name":"a:1","rpc_address":"a:2","type":1,"new_field":{"x":[1]}}')
    assert kind.name == "PREFILL"
    assert (keys["id"], keys["url"], keys["rpc_address"], keys["cluster_ids"]) == ("a:1", "http://a:1", "a:2", [])


# --- conditions


async def test_heartbeats_of_unknown_and_stale_starts_are_refused():
    async with World() as world:
        fake = await world.register("PREFILL", "p")
        assert world.beat(fake)
        assert not world.beat(fake, "another")
        assert not world.engine._fleet.beat(Beat("nobody:1", "", 0, 0.0))


async def test_silence_takes_an_instance_out_and_a_heartbeat_brings_it_back():
    async with World() as world:
        fake, other = await world.register("PREFILL", "p"), await world.register("PREFILL", "p2")
        await world.up()
        world.pass_(10, fake, other)
        world.pass_(4, other)
        assert not world.watcher(fake, "prefill").up
        assert world.watcher(other, "prefill").up
        assert world.beat(fake)
        assert world.watcher(fake, "prefill").up


async def test_a_lost_lease_of_a_live_instance_leaves_it_in_use_while_it_beats():
    async with World() as world:
        fake = await world.register("PREFILL", "p")
        await world.up()
        world.beat(fake)
        world.delete("PREFILL", fake)
        await until(lambda: world.state(fake) == "lease_lost")
        world.pass_(30, fake)
        assert world.watcher(fake, "prefill").up
        world.discovery.put(*registration("PREFILL", fake.name))
        assert world.state(fake) == "active"


async def test_a_dead_instance_is_suspect_then_loses_its_requests_and_is_gone(caplog):
    async with World() as world:
        prefill, decode = await world.register("PREFILL", "p0"), await world.register("DECODE", "d0")
        await world.up()
        world.beat(decode)
        world.instances["p0"], world.instances["d0"] = world.host.members.values()
        served = world.serve()
        await served.body()
        await decode.refuse()
        world.delete("DECODE", decode)
        await until(lambda: world.state(decode) == "suspect")
        assert not world.watcher(decode, "decode").up
        world.pass_(14, prefill)
        assert not served.task.done()
        world.pass_(2, prefill)
        error = await served.result()
        assert (error.instance_id, error.reason) == (decode.name, "instance_lost")
        assert decode.name not in world.host.roles
        assert prefill.name in world.host.roles
        assert "is given up" in caplog.text


async def test_deletion_of_another_start_does_not_count():
    async with World() as world:
        fake = await world.register("PREFILL", "p", incarnation="two")
        world.delete("PREFILL", fake, "one")
        await asyncio.sleep(0.05)
        assert world.state(fake) == "active"


async def test_a_new_incarnation_replaces_the_old_one_with_its_requests():
    async with World() as world:
        prefill, decode = await world.register("PREFILL", "p0"), await world.register("DECODE", "d0")
        await world.up()
        world.instances["p0"], world.instances["d0"] = world.host.members.values()
        served = world.serve()
        await served.body()
        decode.links.clear()
        world.discovery.put(*registration("DECODE", decode.name, "two", cluster_ids=[9]))
        error = await served.result()
        assert (error.instance_id, error.reason) == (decode.name, "instance_lost")
        await until(lambda: decode.links == [prefill.name])
        assert list((await prefill.channel.info(decode.name)).cluster_ids) == [9]
        assert not world.beat(decode, "one")
        assert world.beat(decode, "two")


async def test_silence_does_not_count_while_somebody_else_is_master():
    async with World() as world:
        fake = await world.register("PREFILL", "p")
        await world.up()
        world.beat(fake)
        world.discovery.mastered(master=False)
        world.pass_(60)
        assert world.watcher(fake, "prefill").up


# --- MIX


async def test_mix_instances_share_the_roles_and_move_with_the_load():
    async with World() as world:
        profiles = {"tpot_profiling_data": [[n, b, 5 + 10 * b] for n in (10, 500) for b in (1, 2, 9)]}
        fakes = [await world.register("MIX", f"m{at}", **profiles) for at in range(3)]
        await world.up()
        roles = world.host.roles
        assert [roles[fake.name] for fake in fakes] == ["decode", "prefill", "prefill"]
        for fake in fakes:
            others = {other.name for other in fakes if other is not fake}
            assert set(fake.links) <= others
        world.host.loads = {fakes[0].name: (40, 40)}
        assert world.discovery._mixing.look()
        world.discovery._announce()
        assert sorted(world.host.roles.values()) == ["decode", "decode", "prefill"]
        await world.up()
        assert await fakes[0].channel.names("GetStaticPrefillList") == []
        world.host.loads = {}
        looks = [world.discovery._mixing.look() for _ in range(8)]
        assert sum(looks) == 1, "an effect must show before the next change"
        world.discovery._announce()
        assert sorted(world.host.roles.values()) == ["decode", "prefill", "prefill"]


async def test_a_mix_instance_that_leaves_is_forgotten():
    async with World() as world:
        first, second = [await world.register("MIX", f"m{at}") for at in range(2)]
        await world.up()
        await first.refuse()
        world.delete("MIX", first)
        await until(lambda: world.state(first) == "suspect")
        world.pass_(16, second)
        assert set(world.host.roles) == {second.name}
