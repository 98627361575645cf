"""Who links to whom, when an instance may be used, and what instances are told of each other."""

import asyncio

import pytest
from engine_world import Watcher, instance, turns, until
from held_ports import HeldPorts
from xllm_pair import FakeXllm, Pair, xllm

from coordinator.core.errors import EngineFailed, Side
from coordinator.engines.xllm import linking


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(linking, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(linking, "LONGEST_PAUSE_S", 0.02)


async def test_decode_links_to_prefill_whoever_comes_first():
    async with Pair(0, 0) as pair:
        for name in ("p0", "d0", "d1", "p1"):
            await pair.add(name)
            await pair.up()
        prefills = {pair.fakes["p0"].name, pair.fakes["p1"].name}
        for name in ("d0", "d1"):
            assert set(pair.fakes[name].links) == prefills
        for name in ("p0", "p1"):
            assert pair.fakes[name].links == []
        assert pair.fakes["d0"].peers_told[0] == {
            "instance_name": pair.fakes["p0"].name,
            "cluster_ids": [1],
            "addrs": ["127.0.0.1"],
            "ports": [7],
            "dp_size": 1,
            "kv_split_size": 0,
        }


async def test_all_at_once_gives_every_link_once():
    async with Pair(3, 3) as pair:
        for name, fake in pair.fakes.items():
            wanted = sorted(pair.fakes[p].name for p in ("p0", "p1", "p2")) if name[0] == "d" else []
            assert sorted(fake.links) == wanted


async def test_a_mix_instance_links_to_everybody():
    async with Pair(1, 1) as pair:
        mix = await pair.add("p9", options={"mix": True})
        await pair.up()
        assert set(mix.links) == {pair.p.name, pair.d.name}
        late = await pair.add("p1")
        await pair.up()
        assert late.name in mix.links


async def test_a_refused_link_is_undone_and_tried_again():
    async with Pair(2, 0) as pair:
        fake = await FakeXllm().listen()
        fake.refuse_links = 1
        await pair.add("d0", fake)
        await pair.up()
        assert set(fake.links) == {pair.fakes["p0"].name, pair.fakes["p1"].name}
        told = pair.watchers["d0"].told
        assert any("refused" in word for word in told), told
        assert told[-1] == "linked"


async def test_while_a_link_is_refused_none_is_left():
    async with Pair(2, 0) as pair:
        fake = await FakeXllm().listen()
        good = fake.link
        refused = asyncio.Event()

        def link(call, peer):
            if (
                peer["instance_name"] == pair.fakes["p1"].name
                and call.target.endswith("LinkInstance")
                and (not call.target.endswith("UnlinkInstance"))
            ):
                refused.set()
                call.reply(b'{"ok":false}')
            else:
                good(call, peer)

        fake.link = link
        await pair.add("d0", fake)
        await refused.wait()
        await until(lambda: any("refused" in word for word in pair.watchers["d0"].told))
        assert not pair.watchers["d0"].up
        assert pair.watchers["p0"].up, "the others go on"


async def test_an_instance_out_of_reach_does_not_keep_others_out():
    async with Pair(1, 2) as pair:
        await pair.fakes["d1"].refuse()
        await pair.add("p1")
        await until(lambda: pair.watchers["p1"].up)
        assert pair.fakes["p1"].name in pair.d.links
        await until(lambda: not pair.watchers["d1"].up)


async def test_a_decode_that_is_not_there_waits_alone():
    async with Pair(1, 1) as pair:
        gone = pair.fakes["d7"] = await FakeXllm().listen()
        await gone.refuse()
        pair.attach("d7", xllm("d7", gone))
        await until(lambda: any("cannot be reached" in word for word in pair.watchers["d7"].told))
        await pair.add("p1")
        await until(lambda: pair.watchers["p1"].up)
        await pair.engine.detach(pair.instances["d7"])


async def test_decode_closes_its_link_to_a_prefill_that_leaves():
    async with Pair(2, 1) as pair:
        await pair.engine.detach(pair.instances["p1"])
        assert pair.d.links == [pair.p.name]
        await pair.engine.detach(pair.instances["d0"])
        assert await pair.p.channel.names("GetStaticDecodeList") == []


async def test_an_instance_that_was_away_is_linked_anew():
    async with Pair() as pair:
        port = pair.d.address.port
        await pair.engine.probe(pair.instances["d0"])
        await pair.d.refuse()
        with pytest.raises(EngineFailed):
            await pair.engine.probe(pair.instances["d0"])
        pair.d.links.clear()
        await pair.d.listen(port)
        await pair.engine.probe(pair.instances["d0"])
        await until(lambda: pair.d.links == [pair.p.name])
        await until(lambda: pair.watchers["d0"].up)


async def probed(pair, name):
    with pytest.raises(EngineFailed) as caught:
        await pair.engine.probe(pair.instances[name])
    return caught.value


async def test_what_runs_on_a_decode_that_refuses_connections_is_lost():
    """Its process is gone: nothing of it will ever be pushed, and deadlines are long."""
    async with Pair(1, 2) as pair:
        served, other = pair.serve(), pair.serve(decode="d1")
        for each in (served, other):
            await each.body()
            await pair.p.push(each.told({"index": 0, "text": "A", "token_ids": [65]}, first=True))
        await pair.engine.probe(pair.instances["d0"])
        await pair.d.refuse()
        assert (await probed(pair, "d0")).reason == "connect_refused"
        error = await served.result()
        assert (error.side, error.instance_id, error.reason) == (Side.DECODE, "d0", "instance_lost")
        assert not other.task.done()
        await pair.p.push(other.told(finished=True))
        assert not isinstance(await other.result(), Exception)


async def test_what_waits_for_a_prefill_that_refuses_connections_is_lost():
    async with Pair() as pair:
        running, waiting = pair.serve(), pair.serve()
        await running.body()
        await waiting.body()
        await pair.p.push(running.told({"index": 0, "text": "A", "token_ids": [65]}, first=True))
        await pair.engine.probe(pair.instances["p0"])
        await pair.p.refuse()
        assert (await probed(pair, "p0")).reason == "connect_refused"
        error = await waiting.result()
        assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "instance_lost")
        assert not running.task.done(), "prefill is over for it"
        running.task.cancel()
        assert await running.result() == "cancelled"


async def test_decode_is_told_to_forget_a_prefill_that_is_gone():
    """It keeps the KV of requests whose first token never came until then (protocol page §9)."""
    async with Pair() as pair:
        await pair.engine.probe(pair.instances["p0"])
        await pair.p.refuse()
        pair.d.unlinked.clear()
        await probed(pair, "p0")
        await until(lambda: pair.d.unlinked == [pair.p.name])
        await probed(pair, "p0")
        await turns(20)
        assert pair.d.unlinked == [pair.p.name], "once is enough"


async def test_a_health_check_that_is_answered_badly_or_not_at_all_loses_nothing():
    async with Pair() as pair:
        served = pair.serve()
        await served.body()
        await pair.engine.probe(pair.instances["d0"])
        pair.d.sick = True
        assert (await probed(pair, "d0")).reason == "http_5xx"
        assert not served.task.done()
        served.task.cancel()
        assert await served.result() == "cancelled"


# --- instances without what links need


@pytest.mark.parametrize(("name", "mix"), [("d9", False), ("p9", True)])
async def test_an_instance_that_cannot_make_links_is_not_used_and_spares_the_others(name, mix, caplog):
    async with Pair(1, 1) as pair:
        fake = await FakeXllm().listen()
        pair.fakes[name] = fake
        lame = instance(name, fake.address, engine="xllm", options={"cluster_ids": (9,), "mix": mix})
        watcher = Watcher()
        pair.engine.attach(lame, watcher)
        assert not watcher.up
        assert "rpc_address" in watcher.told[-1]
        assert "rpc_address" in caplog.text
        late = await pair.add("p1")
        await pair.up()
        assert pair.d.links == [pair.p.name, late.name]
        await pair.engine.detach(lame)


# --- what instances ask and tell


async def test_heartbeats_of_known_instances_are_taken():
    async with Pair() as pair:
        assert await pair.p.channel.beat(pair.p.name, "one")
        assert not await pair.p.channel.beat("10.9.9.9:1", "one")


async def test_a_new_incarnation_loses_its_requests_and_is_linked_anew():
    async with Pair() as pair:
        assert await pair.p.channel.beat(pair.p.name, "one")
        assert await pair.d.channel.beat(pair.d.name, "one")
        served = pair.serve()
        await served.body()
        pair.d.links.clear()
        assert await pair.d.channel.beat(pair.d.name, "two")
        error = await served.result()
        assert isinstance(error, EngineFailed)
        assert (error.instance_id, error.reason) == ("d0", "instance_lost")
        await until(lambda: pair.d.links == [pair.p.name])
        await until(lambda: pair.watchers["d0"].up)


async def test_prefill_that_starts_anew_loses_what_it_has_not_finished():
    async with Pair() as pair:
        await pair.p.channel.beat(pair.p.name, "one")
        running, waiting = pair.serve(), pair.serve()
        await running.body()
        await waiting.body()
        first = running.told({"index": 0, "text": "A", "token_ids": [65]}, first=True)
        await pair.p.push(first)
        await pair.p.channel.beat(pair.p.name, "two")
        assert (await waiting.result()).instance_id == "p0"
        await pair.d.push(running.told(finished=True))
        assert not isinstance(await running.result(), Exception)
        await until(lambda: pair.d.links == [pair.p.name])


async def test_prefill_finds_its_decode():
    async with Pair() as pair:
        info = await pair.p.channel.info(pair.d.name)
        assert (info.name, info.rpc_address, info.type) == (pair.d.name, pair.d.name, 2)
        assert (list(info.cluster_ids), list(info.addrs), list(info.ports)) == ([1], ["127.0.0.1"], [7])
        assert (info.dp_size, info.kv_split_size) == (1, 0)
        assert (await pair.p.channel.info("nobody:1")).name == ""


async def test_static_lists():
    async with Pair(2, 1) as pair:
        assert await pair.p.channel.names("GetStaticDecodeList") == [pair.d.name]
        assert sorted(await pair.p.channel.names("GetStaticPrefillList")) == sorted(
            [pair.fakes["p0"].name, pair.fakes["p1"].name]
        )


async def test_hello_and_nonsense():
    async with Pair() as pair:
        frame = await pair.p.channel.call("Hello", xllm_message())
        assert frame.payload == b"\x08\x01"
        frame = await pair.p.channel.call("Generations", Broken())
        assert frame.meta.response.error_code == 1003
        frame = await pair.p.channel.call("RegisterInstance", xllm_message())
        assert frame.meta.response.error_code == 1002


def xllm_message():
    from coordinator.wire.protobuf.xllm_pb2 import Status

    return Status()


class Broken:
    def SerializeToString(self):  # noqa: N802
        return b"\xff\xff\xff"


async def test_a_port_that_is_taken_is_told_and_tried_again(caplog):
    with HeldPorts() as ports:
        port = ports.take()
        await _listens_once_it_can(port, caplog)


async def _listens_once_it_can(port, caplog):
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with Pair(0, 0, rpc_port=port) as pair:
        await pair.add("p0")
        await until(lambda: "cannot listen for xLLM instances" in caplog.text)
        assert not pair.watchers["p0"].up
        taken.close()
        await taken.wait_closed()
        await until(lambda: pair.watchers["p0"].up)
