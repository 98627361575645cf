"""Everything that can be made to go wrong (simulated xLLM instances)."""

import asyncio

import pytest
from xllm_service import API, GUARD_S, PD, Cluster, Service, cluster_info, info_of, pd_address, rpc, until

from instances import answers
from instances.answers import Wish
from instances.faults import Chosen
from instances.options import Options
from instances.run import run_instance
from instances.timing import Timing
from instances.xllm import frames, vocabulary
from instances.xllm.channel import Channel
from instances.xllm.errors import RpcError, RpcLost
from instances.xllm.proto.engine_pb2 import (
    DisaggGenerationsRequests,
    DisaggRequests,
    DisaggResponses,
    InstanceClusterInfo,
    Status,
)

PROMPT = "hello there [[length:5]]"


def expected(prompt):
    ids = tuple(vocabulary.from_wire(token) for token in vocabulary.encode(prompt))
    return answers.plan(Wish(ids, 5120, natural_length=answers.marked_length(prompt)), 0, (8, 48)).text


def marked(fault):
    return f"{PROMPT} [[fault:{fault}]]"


async def test_decode_overtakes_prefill():
    async with Cluster() as cluster:
        prompt = marked("overtaken=1")
        ident = await cluster.send(prompt, stream=True)
        await until(lambda: any(gen.finished_on_prefill_instance for gen in cluster.service.gens[ident]))
        gens = cluster.service.gens[ident]
        assert gens[-1].finished_on_prefill_instance
        assert any(gen.finished for gen in gens[:-1])
        late = gens[-1].outputs[0].text
        assert late + "".join(out.text for gen in gens[:-1] for out in gen.outputs) == expected(prompt)


async def test_a_lost_first_token_holds_decodes_blocks_until_unlink():
    async with Cluster() as cluster:
        ident = await cluster.send(marked("first_lost"), stream=True)
        await until(lambda: cluster.service.gens[ident] and not cluster.prefill.ledger.used_blocks)
        assert cluster.prefill.ledger.released[-1]["why"] == "FirstGeneration lost"
        assert cluster.decode.ledger.count("pinned") > 0
        answer = await rpc(pd_address(cluster.decode), PD, "UnlinkInstance", cluster_info(cluster.prefill), Status)
        assert answer.ok
        assert cluster.decode.ledger.released[-1]["why"] == "UnlinkInstance"
        assert await cluster.kv_empty()
        assert len(cluster.service.gens[ident]) == 1


async def test_unlink_that_keeps_the_blocks():
    async with Cluster(settings={"unlink_frees": 0}) as cluster:
        await cluster.send(marked("first_lost"), stream=True)
        await until(lambda: cluster.decode.engine.decode.waiting)
        await rpc(pd_address(cluster.decode), PD, "UnlinkInstance", cluster_info(cluster.prefill), Status)
        assert not cluster.decode.engine.decode.waiting
        assert cluster.decode.ledger.count("pinned") > 0


async def test_decode_refuses_the_first_token():
    async with Cluster() as cluster:
        ident = await cluster.send(marked("first_refused"), stream=True)
        await until(lambda: any("first generation" in note for note in cluster.prefill.engine.notes))
        assert await cluster.kv_empty()
        assert len(cluster.service.gens[ident]) == 1


async def test_decode_refuses_for_ever():
    async with Cluster(decode={"faults": ("decode_refuses",)}) as cluster:
        await cluster.send(PROMPT)
        await until(lambda: cluster.decode.engine.decode.refused > 3)


@pytest.mark.parametrize("where", ["@0", "@1", "@3"])
async def test_an_error_in_mid_answer(where):
    async with Cluster() as cluster:
        ident, gens = await cluster.run(marked(f"generation_error{where}=6"), stream=True)
        assert (gens[-1].gen_status.status_code, gens[-1].finished) == (6, False)
        tokens = [token for gen in gens for out in gen.outputs for token in out.token_ids]
        assert len(tokens) == int(where[1:])
        if where == "@0":  # decode still waits for the first token: only this ends it
            assert cluster.decode.ledger.count("pinned") > 0
            await rpc(pd_address(cluster.decode), PD, "UnlinkInstance", cluster_info(cluster.prefill), Status)
        assert await cluster.kv_empty()
        assert cluster.service.gens[ident] == gens


async def test_extra_messages():
    async with Cluster() as cluster:
        ident, gens = await cluster.run(
            marked("empty_step@3]] [[fault:empty_gens@4]] [[fault:unknown_id@3"), stream=True
        )
        assert sum(not gen.outputs for gen in gens) == 2  # the one asked for, and that of the last token without text
        assert any(len(call.gens) == 0 for call in cluster.service.calls)
        assert cluster.service.gens[f"nobody-{ident}"]
        assert cluster.decode.engine.decode.unknown_refused == 1
        assert cluster.decode.engine.decode.unknown_accepted == 0
        assert not cluster.decode.engine.aborts
        batch = next(call for call in cluster.service.calls if len(call.gens) == 2)
        assert [gen.service_req_id for gen in batch.gens] == [f"nobody-{ident}", ident]


async def test_twice():
    async with Cluster() as cluster:
        ident = await cluster.send(marked("duplicate@3]] [[fault:finish_twice]] [[fault:late=2"), stream=True)
        gens = cluster.service.gens[ident]
        await until(lambda: sum(gen.finished for gen in gens) == 2 and gens[-1].outputs[0].text == " too late")
        await until(lambda: cluster.decode.engine.decode.late_accepted == 2)
        steps = [gen for gen in gens if gen.outputs and gen.outputs[0].token_ids]
        assert any(steps.count(gen) == 2 for gen in steps)
        assert await cluster.kv_empty()


async def test_prefill_tells_twice():
    async with Cluster() as cluster:
        ident = await cluster.send(marked("duplicate@1"), stream=True)
        await until(lambda: sum(gen.finished_on_prefill_instance for gen in cluster.service.gens[ident]) == 2)


async def test_stall_and_slow():
    async with Cluster() as cluster:
        ident = await cluster.send(marked("stall@2"), stream=True)
        await until(lambda: len(cluster.service.gens[ident]) == 2)
        going, gens = await cluster.run(marked("slow=0.01"), stream=True)
        assert cluster.service.text(going) == expected(marked("slow=0.01"))
        assert gens[-1].finished
        assert len(cluster.service.gens[ident]) == 2
        assert cluster.decode.ledger.count("allocated") > 0
        ident, gens = await cluster.run(marked("stall@2=0.01"), stream=True)
        assert gens[-1].finished
        cluster.decode.reset()
        assert await cluster.kv_empty()


@pytest.mark.parametrize("where", ["@0", "@2"])
async def test_a_crash_in_mid_answer(where):
    async with Cluster() as cluster:
        struck = cluster.prefill if where == "@0" else cluster.decode
        before = struck.engine.presence.incarnation_id
        ident = await cluster.send(marked(f"answer_crash{where}=0.01"), stream=True)
        await until(lambda: struck.engine.presence.incarnation_id != before and struck.engine.presence.ready)
        assert not cluster.service.is_over(ident)
        struck.faults.replace([])
        if struck is cluster.decode:
            assert struck.engine.links.names() == []
        else:
            cluster.decode.reset()  # it still waits for the first token
        assert await cluster.kv_empty()
        again, _ = await cluster.run(PROMPT, stream=True)
        assert cluster.service.text(again) == expected(PROMPT)


async def test_links_that_fail():
    async with Cluster(link=False) as cluster:
        info, address = cluster_info(cluster.prefill), pd_address(cluster.decode)
        cluster.decode.faults.replace(["link_fails=2"])
        said = [(await rpc(address, PD, "LinkInstance", info, Status)).ok for _ in range(4)]
        assert said == [False, False, True, True]
        cluster.decode.faults.replace(["link_fails"])
        assert not (await rpc(address, PD, "LinkInstance", info, Status)).ok
        cluster.decode.faults.replace(["link_hang"])
        with pytest.raises(RpcLost):
            await rpc(address, PD, "LinkInstance", info, Status, deadline_s=0.1)
        cluster.decode.faults.replace([])
        for wrong in ({"cluster_ids": []}, {"dp_size": 0}, {"dp_size": 2}, {"cluster_ids": [1, 2]}):
            given = InstanceClusterInfo(instance_name="x", cluster_ids=wrong.get("cluster_ids", [1]))
            given.dp_size = wrong.get("dp_size", 1)
            assert not (await rpc(address, PD, "LinkInstance", given, Status)).ok
        assert cluster.decode.engine.links.failed == 7


async def test_heartbeats():
    async with Cluster(timing=Timing(prefill_ms=20, decode_ms=5), block_tokens=16, blocks=100) as cluster:
        name, beats = cluster.decode.engine.name, cluster.service.beats
        await until(lambda: len(beats[name]) > 1)
        assert {beat.incarnation_id for beat in beats[name]} == {cluster.decode.engine.presence.incarnation_id}
        ident = await cluster.send(marked("stall@4=1"), stream=True)
        await until(lambda: any(beat.load_metrics.gpu_cache_usage_perc > 0 for beat in beats[name]))
        await cluster.service.over(ident)
        await until(lambda: any(beat.latency_metrics.recent_max_tbt for beat in beats[name]))
        await until(lambda: any(b.latency_metrics.recent_max_ttft for b in beats[cluster.prefill.engine.name]))
        cluster.decode.faults.replace(["wrong_incarnation"])
        await until(lambda: beats[name][-1].incarnation_id == "another")
        cluster.decode.faults.replace(["silence"])
        seen = len(beats[name])
        await asyncio.sleep(0.3)
        assert len(beats[name]) <= seen + 1  # one may have been on its way


async def test_waiting_requests_are_told():
    async with Cluster(decode={"faults": ("decode_full",)}) as cluster:
        await cluster.send(PROMPT)
        beats = cluster.service.beats[cluster.prefill.engine.name]
        await until(lambda: any(beat.load_metrics.waiting_requests_num for beat in beats))


async def test_cache_events():
    settings = {"cache_events": 1}
    async with Cluster(settings=settings, prefix_blocks=3, block_tokens=4) as cluster:
        beats = cluster.service.beats[cluster.prefill.engine.name]
        await cluster.run("the river and the sea [[length:1]]"[:21])
        await until(lambda: any(beat.cache_event.stored_cache for beat in beats))
        stored = [key for beat in beats for key in beat.cache_event.stored_cache]
        assert all(len(key) == 16 for key in stored)
        await cluster.run("other words " * 3)
        await until(lambda: any(beat.cache_event.removed_cache for beat in beats))
        removed = [key for beat in beats for key in beat.cache_event.removed_cache]
        assert set(removed) <= set(stored)


async def test_old_proto():
    async with Cluster(settings={"proto": "old", "kv_cache_transfer_mode": "PULL"}) as cluster:
        ident, gens = await cluster.run(PROMPT, stream=True)
        assert cluster.service.text(ident) == expected(PROMPT)
        assert gens[-1].usage.num_cached_tokens == 0
        # what an old decode leaves out reads as slot 0
        assert cluster.prefill.engine.prefill.linear_states == 1
        record = cluster.decode.records.of(f"/{PD}/AddNewRequests")[0]
        assert '"device_ips"' in record.body
        first = cluster.decode.records.of(f"/{PD}/FirstGeneration")[0]
        assert '"k_cache_ids"' in first.body


async def test_decode_says_there_is_no_linear_state():
    async with Cluster() as cluster:
        await cluster.run(PROMPT)
        assert cluster.prefill.engine.prefill.linear_states == 0


@pytest.mark.parametrize("fault", ["gzip_frames", "split_frames", "joined_frames", "joined_frames=5", "single_frames"])
async def test_shapes_of_frames(fault):
    async with Cluster(faults=(fault,)) as cluster:
        idents = [await cluster.send(f"{PROMPT} {number}", stream=True) for number in range(3)]
        for number, ident in enumerate(idents):
            await cluster.service.over(ident)
            assert cluster.service.text(ident) == expected(f"{PROMPT} {number}")
        if fault == "single_frames":
            assert all(len(call.gens) == 1 for call in cluster.service.calls)
        if fault == "gzip_frames":
            assert b"\x1f\x8b" in cluster.service.raw
        assert await cluster.kv_empty()


async def test_the_common_menu_over_rpc():
    async with Cluster() as cluster:
        for fault, code in (("status=503", 2004), ("status=404", 1002), ("status", 2001), ("max_payload=10", 1003)):
            with pytest.raises(RpcError) as error:
                await cluster.send(marked(fault))
            assert error.value.code == code
        with pytest.raises(RpcError, match="no fault 'stal', did you mean 'stall'"):
            await cluster.send(marked("stal"))
        for fault in ("close", "reset"):
            with pytest.raises(RpcLost):
                await cluster.send(marked(fault))
        _, message = cluster.message(marked("hang"))
        with pytest.raises(RpcLost, match="did not answer"):
            await rpc(cluster.prefill.engine.name, API, "Completions", message, deadline_s=0.1)
        for fault in ("gzip", "split_bytes", "delay=0.01"):
            assert (await cluster.run(marked(fault)))[1][-1].finished
        with pytest.raises(RpcLost):
            await cluster.send(marked("cut_after=10"))
        cluster.prefill.faults.replace(["empty"])
        assert (await cluster.run(PROMPT))[1][-1].finished
        cluster.prefill.faults.replace([])
        cluster.decode.faults.replace(["status=500"])
        _, gens = await cluster.run(PROMPT)
        assert gens[-1].gen_status.status_msg == "Failed to add new requests to decode instance"


async def test_prefill_dies_of_an_answer_that_lacks_its_request():
    async with Cluster(decode={"faults": ("empty",)}) as cluster:
        await cluster.send(PROMPT)
        await until(lambda: cluster.prefill.engine.aborts)
        assert "0 answers to 1 request" in cluster.prefill.engine.aborts[0]


async def test_crash_over_rpc():
    async with Cluster() as cluster:
        before = cluster.prefill.engine.presence.incarnation_id
        with pytest.raises(RpcLost):
            await cluster.send(marked("crash=0.05"))
        await until(lambda: cluster.prefill.engine.presence.incarnation_id != before)


async def test_a_service_that_goes_costs_the_requests():
    async with Cluster(timing=Timing(decode_ms=5), settings={"rpc_timeout_s": 2}) as cluster:
        ident = await cluster.send("x [[length:3000]]", stream=True)
        await until(lambda: len(cluster.service.gens[ident]) > 2)
        cluster.service.mute = True
        await until(lambda: cluster.decode.engine.outbox.lost_calls == 1)
        await until(lambda: cluster.decode.engine.decode.cancelled == 1)
        assert await cluster.kv_empty()


async def test_one_slow_answer_holds_up_all():
    async with Cluster(timing=Timing(decode_ms=1)) as cluster:
        cluster.service.delay_s = 0.1
        idents = [await cluster.send(f"{PROMPT} {number}", stream=True) for number in range(2)]
        for ident in idents:
            await cluster.service.over(ident)
        # decode went on meanwhile: many steps wait for one answer after the other
        assert await cluster.kv_empty()


async def test_two_services_get_their_own():
    async with Cluster() as cluster, Service() as other:
        ident, message = cluster.message(PROMPT, stream=True)
        theirs, second = cluster.message(PROMPT, stream=True)
        other.ids = frozenset({theirs})
        second.source_xservice_addr = other.address
        for one in (message, second):
            await rpc(cluster.prefill.engine.name, API, "Completions", one)
        await cluster.service.over(ident)
        await other.over(theirs)
        assert theirs not in cluster.service.gens
        assert other.text(theirs) == cluster.service.text(ident) == expected(PROMPT)


async def test_without_a_source_the_master_gets_it():
    async with Cluster() as cluster:
        ident, message = cluster.message(PROMPT, stream=True)
        message.ClearField("source_xservice_addr")
        await rpc(cluster.prefill.engine.name, API, "Completions", message)
        await cluster.service.over(ident)


async def test_ids_that_are_known_already_and_first_tokens_of_nobody():
    async with Cluster() as cluster:
        decode = cluster.decode
        await cluster.send(marked("first_lost"))
        await until(lambda: decode.engine.decode.waiting)
        (req_id,) = decode.engine.decode.waiting
        message = DisaggRequests(prefill_name=cluster.prefill.engine.name)
        message.reqs.add(req_id=req_id, tokens_num=3, prompt_tokens=[1, 2, 3])
        answer = await rpc(pd_address(decode), PD, "AddNewRequests", message, DisaggResponses)
        assert answer.resps[0].status_code == 500
        for gens in (DisaggGenerationsRequests(), DisaggGenerationsRequests()):
            if gens is not None:
                gens.multi_gens.add(req_id="nobody").tokens.add(token_id=1)
            assert not (await rpc(pd_address(decode), PD, "FirstGeneration", gens, Status)).ok
        empty = DisaggGenerationsRequests()
        empty.multi_gens.add(req_id=req_id)
        assert not (await rpc(pd_address(decode), PD, "FirstGeneration", empty, Status)).ok


async def test_a_peer_that_cannot_be_linked_gets_no_answers():
    async with Cluster(link=False) as cluster:
        message = DisaggRequests(prefill_name="127.0.0.1:9")
        message.reqs.add(req_id="a", tokens_num=3, prompt_tokens=[1, 2, 3])
        answer = await rpc(pd_address(cluster.decode), PD, "AddNewRequests", message, DisaggResponses)
        assert len(answer.resps) == 0


async def test_the_service_may_be_told_later():
    async with (
        Service() as service,
        run_instance(Options(engine="xllm", role="decode", settings={"heartbeat_s": 0.02})) as one,
    ):
        assert one.engine.presence.master == ""
        one.engine.act("service", service.address)
        await until(lambda: service.beats[one.engine.name])
        with pytest.raises(ValueError, match="cannot do"):
            one.engine.act("lose_key", "")


async def test_reset_forgets():
    async with Cluster() as cluster:
        await cluster.send(marked("stall@2"), stream=True)
        await until(lambda: cluster.decode.engine.decode.running)
        for instance in cluster.fleet.instances:
            instance.reset()
        assert await cluster.kv_empty()
        assert not cluster.decode.engine.decode.running
        _, gens = await cluster.run(PROMPT, stream=True)
        assert gens[-1].finished


async def test_a_channel_minds_its_own_calls_only():
    """Answers find their calls whatever their order; garbage ends the connection."""
    answered = []

    async def serve(reader, writer):
        cut, read = frames.Reader(), []
        while len(read) < 2:
            read += cut.feed(await reader.read(1000))
        for frame in reversed(read):
            answered.append(frame.meta.correlation_id)
            writer.write(frames.reply(frame.meta.correlation_id, Status(ok=True).SerializeToString()).encode())
        writer.write(b"garbage")
        assert await reader.read() == b""
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        channel = Channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", Chosen, GUARD_S)
        both = await asyncio.gather(*(channel.call(("a", "b"), Status(), Status) for _ in range(2)))
        assert all(one.ok for one in both)
        assert answered == sorted(answered, reverse=True)
        channel.close()


async def test_info_of_an_instance_is_complete():
    async with Cluster(settings={"dp_size": 2, "tp_size": 2}) as cluster:
        info = info_of(cluster.decode)
        assert len(info.cluster_ids) == len(info.addrs) == len(info.ports) == 4
        assert info.rpc_address == pd_address(cluster.decode) != info.name
