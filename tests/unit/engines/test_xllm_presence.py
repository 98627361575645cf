"""The coordinator in etcd: a real one, on a free port."""

import asyncio
import logging

import pytest
from engine_world import GUARD_S, until
from etcd_server import Etcd, needs_etcd

from coordinator.core.instance import Address
from coordinator.engines.xllm import presence
from coordinator.engines.xllm.presence import Presence, endpoint_of
from coordinator.engines.xllm.settings import read_settings, settings_of
from coordinator.transport.client import HttpClient
from coordinator.transport.etcd import Compacted, EtcdClient, EtcdError

pytestmark = [needs_etcd, pytest.mark.xdist_group("etcd")]
LOG = logging.getLogger("test.etcd")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
async def client(etcd):
    http = HttpClient(connect_s=GUARD_S)
    made = EtcdClient(http, Address("127.0.0.1", etcd.port), GUARD_S)
    made.http = http
    for start, end in ((b"XLLM", b"XLLN"), (b"/ns/", b"/ns0")):
        await made._call("/v3/kv/deleterange", {"key": start, "range_end": end}, dict)
    yield made
    await http.aclose()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Members look often, and whatever has to be done within a time has enough of it."""
    monkeypatch.setattr(presence, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(presence, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(presence, "BEATS_PER_LEASE", 50)
    monkeypatch.setattr(presence, "LAST_WORD_S", GUARD_S)


class Noted:
    def __init__(self):
        self.all = []
        self.keys = {}
        self.master = False

    def listed(self, entries):
        self.all.append(dict(entries))
        self.keys = dict(entries)

    def put(self, key, value):
        self.keys[key] = value

    def deleted(self, key, before):
        self.gone = (key, before)
        self.keys.pop(key, None)

    def mastered(self, *, master):
        self.master = master


class Member:
    def __init__(self, etcd, service="127.0.0.1:8889", **more):
        self.noted = Noted()
        self.http = HttpClient(connect_s=GUARD_S)
        given = {"etcd_endpoints": [etcd.endpoint], "lease_ttl_s": GUARD_S, **more}
        self.presence = Presence(settings_of(read_settings(given)), service, self.http, self.noted, LOG)

    async def __aenter__(self):
        self.presence.start()
        return self.noted

    async def __aexit__(self, *_):
        await self.presence.aclose()
        await self.http.aclose()


async def value(client, key):
    return (await client.list(key, key + b"\0")).entries.get(key)


async def keys_of(client, lease):
    return (await client._call("/v3/lease/timetolive", {"ID": str(lease), "keys": True}, dict)).get("keys")


async def comes(client, key, wanted):
    async with asyncio.timeout(15):
        while await value(client, key) != wanted:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)


# --- the client


async def test_keys_come_and_go(client):
    assert await client.create(b"XLLM:A", b"1", 0)
    assert not await client.create(b"XLLM:A", b"2", 0)
    await client.put(b"XLLM:B\xff", b"\x00\xff")
    listing = await client.list(b"XLLM:", b"XLLM;")
    assert listing.entries == {b"XLLM:A": b"1", b"XLLM:B\xff": b"\x00\xff"}
    assert listing.revision > 0


async def test_leases_end_with_their_keys(client):
    lease = await client.grant(60)
    await client.create(b"XLLM:A", b"1", lease)
    assert await client.keep_alive(lease)
    await client.revoke(lease)
    assert await value(client, b"XLLM:A") is None
    assert not await client.keep_alive(lease)
    with pytest.raises(EtcdError, match="lease not found"):
        await client.revoke(lease)


async def test_a_watch_tells_what_changes(client):
    events = []
    start = (await client.list(b"XLLM:", b"XLLM;")).revision + 1
    await client.put(b"XLLM:A", b"before the watch")
    watch = await client.watch(b"XLLM:", b"XLLM;", start, events.append)
    await client.put(b"XLLM:A", b"2")
    await client.put(b"YLLM:A", b"not in the range")
    await client._call("/v3/kv/deleterange", {"key": b"XLLM:A"}, dict)
    await until(lambda: len(events) == 3)
    watch.close()
    assert [(event.type, event.kv.value) for event in events] == [
        ("PUT", b"before the watch"), ("PUT", b"2"), ("DELETE", b"")
    ]  # fmt: skip
    assert events[2].prev_kv.value == b"2"


async def test_a_history_that_is_gone_is_told(client):
    for number in range(3):
        await client.put(b"XLLM:A", b"%d" % number)
    now = (await client.list(b"XLLM:", b"XLLM;")).revision
    await client._call("/v3/kv/compaction", {"revision": str(now)}, dict)
    watch = await client.watch(b"XLLM:", b"XLLM;", now - 2, lambda _: None)
    async with asyncio.timeout(10):
        with pytest.raises(Compacted):
            await watch.ended
    watch.close()


async def test_calls_that_fail_are_told(client):
    with pytest.raises(EtcdError, match="authentication is not enabled"):
        await client.log_in("me", "secret")
    with pytest.raises(EtcdError, match="404"):
        await client._call("/v3/nothing", {}, dict)
    nobody = EtcdClient(client.http, Address("127.0.0.1", 9), GUARD_S)
    with pytest.raises(EtcdError, match="connect"):
        await nobody.put(b"XLLM:A", b"1")
    with pytest.raises(EtcdError, match="connect"):
        await nobody.watch(b"XLLM:", b"XLLM;", 1, lambda _: None)


# --- presence


async def test_a_coordinator_registers_and_gives_its_keys_back(etcd, client, monkeypatch):
    kept = []

    async def keep_alive(self, lease, honest=EtcdClient.keep_alive):
        kept.append((lease, await honest(self, lease)))
        return kept[-1][1]

    monkeypatch.setattr(EtcdClient, "keep_alive", keep_alive)
    async with Member(etcd) as noted:
        await comes(client, b"XLLM:SERVICE:127.0.0.1:8889", b"127.0.0.1:8889")
        await comes(client, b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889")
        assert await value(client, b"XLLM_PING") == b"PING"
        await until(lambda: noted.master and len(kept) > 3)
        assert len(set(kept)) == 1
        assert kept[0][1], "the lease is kept"
        assert await value(client, b"XLLM:SERVICE:MASTER") == b"127.0.0.1:8889"
    assert await value(client, b"XLLM:SERVICE:MASTER") is None
    assert await value(client, b"XLLM:SERVICE:127.0.0.1:8889") is None


async def test_keys_may_stand_under_a_namespace(etcd, client):
    async with Member(etcd, etcd_namespace="/ns/") as noted:
        await comes(client, b"/ns/XLLM:SERVICE:MASTER", b"127.0.0.1:8889")
        await client.put(b"/ns/XLLM:MIX:a:1", b"{}")
        await until(lambda: noted.keys == {b"XLLM:MIX:a:1": b"{}"})
        assert await value(client, b"XLLM:SERVICE:MASTER") is None


async def test_instances_are_followed(etcd, client):
    await client.put(b"XLLM:PREFILL:a:1", b"one")
    async with Member(etcd) as noted:
        await until(lambda: noted.keys == {b"XLLM:PREFILL:a:1": b"one"})
        await client.put(b"XLLM:DECODE:b:1", b"two")
        await until(lambda: noted.keys.get(b"XLLM:DECODE:b:1") == b"two")
        await client._call("/v3/kv/deleterange", {"key": b"XLLM:PREFILL:a:1"}, dict)
        await until(lambda: b"XLLM:PREFILL:a:1" not in noted.keys)
        assert noted.gone == (b"XLLM:PREFILL:a:1", b"one")
        assert set(noted.keys) == {b"XLLM:DECODE:b:1"}


async def test_a_second_coordinator_takes_over_when_the_master_leaves(etcd, client):
    async with Member(etcd, "127.0.0.1:2") as second:
        await until(lambda: second.master)
        async with Member(etcd, "127.0.0.1:3") as third:
            await comes(client, b"XLLM:SERVICE:127.0.0.1:3", b"127.0.0.1:3")
            assert not third.master
            await client._call("/v3/kv/deleterange", {"key": b"XLLM:SERVICE:MASTER"}, dict)
            async with asyncio.timeout(15):
                while (holder := await value(client, b"XLLM:SERVICE:MASTER")) is None:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.02)
            assert holder in {b"127.0.0.1:2", b"127.0.0.1:3"}
            await until(lambda: (second.master, third.master) == (holder[-1:] == b"2", holder[-1:] == b"3"))
    assert await value(client, b"XLLM:SERVICE:MASTER") is None


async def test_a_master_that_is_unmade_before_it_hears_of_its_making_tries_again(etcd, client, monkeypatch):
    """The watch may be ahead of the answer to the call that made us master."""
    made = []

    async def create(self, key, value, lease, honest=EtcdClient.create):
        done = await honest(self, key, value, lease)
        if key == presence.MASTER and not made:
            made.append(value)
            await client._call("/v3/kv/deleterange", {"key": key}, dict)
            await asyncio.sleep(0.3)
        return done

    first = await client.grant(60)
    await client.create(b"XLLM:SERVICE:MASTER", b"127.0.0.1:9", first)
    async with Member(etcd) as noted:
        await comes(client, b"XLLM:SERVICE:127.0.0.1:8889", b"127.0.0.1:8889")
        monkeypatch.setattr(EtcdClient, "create", create)
        await client.revoke(first)
        await until(lambda: made)
        await comes(client, b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889")
        await until(lambda: noted.master)


async def test_what_an_earlier_life_has_left_is_taken_over_before_it_ends(etcd, client):
    """Instances that find no master meanwhile would fail requests."""
    lease = await client.grant(60)
    await client.create(b"XLLM:SERVICE:127.0.0.1:8889", b"127.0.0.1:8889", lease)
    await client.create(b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889", lease)
    async with Member(etcd) as noted:
        await until(lambda: noted.master)
        async with asyncio.timeout(15):
            while await keys_of(client, lease):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        await client.revoke(lease)
        assert await value(client, b"XLLM:SERVICE:127.0.0.1:8889") == b"127.0.0.1:8889"
        assert await value(client, b"XLLM:SERVICE:MASTER") == b"127.0.0.1:8889"
        assert noted.master
    assert await value(client, b"XLLM:SERVICE:MASTER") is None


async def test_a_key_with_another_value_is_not_taken_over(client):
    first, second = await client.grant(60), await client.grant(60)
    assert await client.hold(b"XLLM:A", b"1", first)
    assert not await client.hold(b"XLLM:A", b"2", second)
    assert await client.hold(b"XLLM:A", b"1", second)
    await client.revoke(first)
    assert await value(client, b"XLLM:A") == b"1"
    await client.revoke(second)
    assert await value(client, b"XLLM:A") is None


async def test_a_watch_that_is_lost_is_begun_anew_from_a_new_list(etcd, client):
    made = Member(etcd)
    async with made as noted:
        await until(lambda: noted.all)
        for connection in list(made.http._pool._open):
            connection.close()
        await client.put(b"XLLM:MIX:a:1", b"x")
        await until(lambda: b"XLLM:MIX:a:1" in noted.keys)


async def test_a_compacted_history_is_read_again(etcd, client, monkeypatch):
    await client.put(b"XLLM:MIX:a:1", b"x")
    now = (await client.list(b"XLLM:", b"XLLM;")).revision
    await client._call("/v3/kv/compaction", {"revision": str(now)}, dict)
    asked = []

    async def watch(self, start, end, revision, changed, honest=EtcdClient.watch):
        asked.append(revision)
        return await honest(self, start, end, 1 if len(asked) == 1 else revision, changed)

    monkeypatch.setattr(EtcdClient, "watch", watch)
    async with Member(etcd) as noted:
        await until(lambda: len(noted.all) == 2)
        await client.put(b"XLLM:MIX:b:1", b"y")
        await until(lambda: set(noted.keys) == {b"XLLM:MIX:a:1", b"XLLM:MIX:b:1"})


async def test_while_etcd_is_away_everything_stays_and_then_is_read_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    etcd = await Etcd(tmp_path).started()
    http = HttpClient(connect_s=GUARD_S)
    client = EtcdClient(http, Address("127.0.0.1", etcd.port), GUARD_S)
    try:
        await client.put(b"XLLM:PREFILL:a:1", b"one")
        async with Member(etcd) as noted:
            await until(lambda: noted.master)
            await asyncio.to_thread(etcd.kill)
            await until(lambda: "etcd is lost" in caplog.text)
            assert noted.keys == {b"XLLM:PREFILL:a:1": b"one"}
            await etcd.started()
            await until(lambda: "etcd is back" in caplog.text)
            assert noted.keys == {b"XLLM:PREFILL:a:1": b"one"}
            await comes(client, b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889")
            assert caplog.text.count("etcd is lost") == 1, "said once"
    finally:
        await asyncio.to_thread(etcd.stop)
        await http.aclose()


async def test_other_endpoints_are_tried(etcd, client):
    async with Member(etcd, etcd_endpoints=["http://127.0.0.1:9", etcd.endpoint]) as noted:
        await until(lambda: noted.master)
        await comes(client, b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889")


def test_endpoints():
    assert endpoint_of("10.0.0.1:2379") == Address("10.0.0.1", 2379)
    assert endpoint_of("https://[::1]:2379") == Address("::1", 2379, tls=True)


async def test_an_etcd_that_wants_a_login(tmp_path, caplog, monkeypatch):
    etcd = await Etcd(tmp_path).started()
    http = HttpClient(connect_s=GUARD_S)
    client = EtcdClient(http, Address("127.0.0.1", etcd.port), GUARD_S)
    try:
        for path, given in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            await client._call(f"/v3/auth/{path}", given, dict)
        async with Member(etcd):
            await until(lambda: "etcd is lost" in caplog.text)
        monkeypatch.setenv("ETCD_USERNAME", "root")
        monkeypatch.setenv("ETCD_PASSWORD", "wrong")
        caplog.clear()
        async with Member(etcd):
            await until(lambda: "etcd is lost" in caplog.text)
        assert "wrong" not in caplog.text
        monkeypatch.setenv("ETCD_PASSWORD", "secret")
        async with Member(etcd) as noted:
            await until(lambda: noted.master)
            await client.log_in("root", "secret")
            await comes(client, b"XLLM:SERVICE:MASTER", b"127.0.0.1:8889")
    finally:
        await asyncio.to_thread(etcd.stop)
        await http.aclose()
