"""Requests through prefill and decode, as the service sees them (xLLM protocol page §1, §5, §6)."""

import asyncio

import pytest
from xllm_service import API, GUARD_S, Cluster, rpc, until

from instances import answers, tokens
from instances.answers import Wish
from instances.timing import Timing
from instances.xllm import vocabulary
from instances.xllm.ask import lost
from instances.xllm.proto.engine_pb2 import ChatRequest

PROMPT = "the quiet river [[length:9]]"


def expected(prompt, limit=5120):
    ids = tuple(vocabulary.from_wire(token) for token in vocabulary.encode(prompt))
    return answers.plan(Wish(ids, limit, natural_length=answers.marked_length(prompt)), 0, (8, 48))


@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
async def test_a_stream(mode):
    async with Cluster(settings={"kv_cache_transfer_mode": mode}) as cluster:
        ident, gens = await cluster.run(PROMPT, stream=True)
        plan = expected(PROMPT)
        first, *steps, last = gens
        assert (len(first.outputs), first.finished, first.finished_on_prefill_instance) == (1, False, True)
        assert first.outputs[0].text == plan.texts[0]
        assert not first.HasField("gen_status")
        assert not first.HasField("usage")
        assert all(not gen.HasField("gen_status") and not gen.finished for gen in steps)
        assert not any(gen.finished_on_prefill_instance for gen in (*steps, last))
        assert (last.finished, last.gen_status.status_code, last.HasField("gen_status")) == (True, 0, True)
        assert [(out.finish_reason, out.text) for out in last.outputs] == [("stop", "")]
        assert (last.usage.num_generated_tokens, last.usage.num_prompt_tokens) == (10, len(vocabulary.encode(PROMPT)))
        assert last.usage.num_total_tokens == last.usage.num_prompt_tokens + 10
        assert cluster.service.text(ident) == plan.text
        ids = [token for gen in gens for out in gen.outputs for token in out.token_ids]
        assert vocabulary.decode(ids) == plan.text
        assert {gen.req_id for gen in gens} == {first.req_id} != {ident}
        assert await cluster.kv_empty()
        assert cluster.prefill.ledger.released[-1]["why"] == "decode has the first token"
        assert cluster.decode.ledger.released[-1]["why"] == "end of decode"
        assert cluster.service.asked == {cluster.decode.engine.name: 1}
        state = cluster.decode.engine.state()
        assert (state["lost_kv"], state["links"]["implicit"], state["aborts"]) == (0, 0, [])
        assert cluster.prefill.engine.state()["other_ids"] == 0


async def test_a_whole_answer():
    async with Cluster() as cluster:
        _, (first, last) = await cluster.run(PROMPT)
        plan = expected(PROMPT)
        assert (first.finished, first.finished_on_prefill_instance, first.outputs[0].text) == (
            False,
            True,
            plan.texts[0],
        )
        assert first.usage.num_generated_tokens == 1
        assert (last.finished, last.finished_on_prefill_instance) == (True, False)
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == (plan.text, "stop")
        assert last.usage.num_generated_tokens == len(plan)
        assert await cluster.kv_empty()


async def test_chat():
    async with Cluster() as cluster:
        ident, gens = await cluster.run(PROMPT, kind=ChatRequest, stream=True, max_tokens=4)
        assert cluster.service.text(ident) == expected(f"user: {PROMPT}\nassistant:", 4).text
        assert gens[-1].outputs[0].finish_reason == "length"
        assert cluster.prefill.engine.state()["other_ids"] == 0
        ident, message = cluster.message("other", kind=ChatRequest, max_tokens=2)
        message.token_ids.append(3)
        await rpc(cluster.prefill.engine.name, API, "ChatCompletions", message)
        await cluster.service.over(ident)
        assert cluster.prefill.engine.state()["other_ids"] == 1


async def test_one_token_is_finished_by_both():
    async with Cluster() as cluster:
        for stream in (True, False):
            ident, gens = await cluster.run(PROMPT, stream=stream, max_tokens=1)
            await until(lambda ident=ident: len(cluster.service.gens[ident]) == 2)
            by_prefill, by_decode = sorted(
                gens, key=lambda gen: not (gen.outputs and gen.outputs[0].token_ids and stream)
            )
            assert by_prefill.finished
            assert by_prefill.finished_on_prefill_instance
            assert by_decode.finished
            assert by_prefill.outputs[0].text == expected(PROMPT).texts[0]
            assert by_prefill.usage.num_generated_tokens == by_decode.usage.num_generated_tokens == 1
        assert await cluster.kv_empty()


async def test_a_first_token_without_text():
    async with Cluster() as cluster:
        for stream in (True, False):
            ident, gens = await cluster.run(f"{PROMPT} [[fault:partial_first]]", stream=stream)
            if stream:
                assert (len(gens[0].outputs), gens[0].finished_on_prefill_instance) == (0, False)
                assert gens[1].outputs[0].text == answers.SPLIT_CHARACTERS[0]
                assert len(gens[1].outputs[0].token_ids) == 2
            else:
                assert gens[0].finished_on_prefill_instance
            whole = cluster.service.text(ident) if stream else gens[-1].outputs[0].text
            assert whole == answers.SPLIT_CHARACTERS[0] + expected(f"{PROMPT} [[fault:partial_first]]").text


async def test_many_requests_share_calls():
    async with Cluster(timing=Timing(decode_ms=5)) as cluster:
        idents = [await cluster.send(f"{PROMPT} {number}", stream=True) for number in range(6)]
        for ident in idents:
            await cluster.service.over(ident)
        assert max(len(call.gens) for call in cluster.service.calls) > 1
        # one generation of a request in a call, as the real engine has it
        assert all(len({gen.req_id for gen in call.gens}) == len(call.gens) for call in cluster.service.calls)
        for number, ident in enumerate(idents):
            assert cluster.service.text(ident) == expected(f"{PROMPT} {number}").text
        assert await cluster.kv_empty()


async def test_cancelled_by_a_status():
    async with Cluster(timing=Timing(decode_ms=2)) as cluster:
        ident, other = [await cluster.send(f"{n} [[length:3000]]", stream=True) for n in ("a", "b")]
        await until(lambda: len(cluster.service.gens[ident]) > 3)
        assert cluster.decode.ledger.count("allocated") > 0
        cluster.service.unwanted.add(ident)
        await until(lambda: cluster.decode.engine.decode.cancelled == 1)
        assert [entry["why"] for entry in cluster.decode.ledger.released] == ["cancelled by the service"]
        seen = len(cluster.service.gens[other])
        await until(lambda: len(cluster.service.gens[other]) > seen + 5)
        cluster.service.unwanted.add(other)
        assert await cluster.kv_empty()


async def test_a_missing_status_kills_the_process():
    async with Cluster() as cluster:
        cluster.service.short = True
        await cluster.send(PROMPT, stream=True)
        await until(lambda: cluster.prefill.engine.aborts)
        assert "0 status for 1 generations" in cluster.prefill.engine.aborts[0]
        with pytest.raises(OSError, match="Connect call failed"):
            await _connect(cluster.prefill)


async def _connect(instance):
    async with asyncio.timeout(GUARD_S):
        while True:
            _, writer = await asyncio.open_connection(instance.host, instance.port)
            writer.close()
            await asyncio.sleep(0.01)


async def test_decode_without_room_is_asked_again_and_again():
    async with Cluster(decode={"faults": ("decode_full",)}) as cluster:
        ident = await cluster.send(PROMPT, stream=True)
        await until(lambda: cluster.prefill.engine.prefill.requeues > 3)
        assert cluster.service.asked[cluster.decode.engine.name] > 3
        assert cluster.service.gens[ident] == []
        cluster.decode.faults.replace([])
        await cluster.service.over(ident)
        assert cluster.service.text(ident) == expected(PROMPT).text
        assert cluster.decode.engine.state()["full"] > 3
        assert await cluster.kv_empty()


async def test_real_blocks_run_out():
    async with Cluster(decode={"blocks": 3, "block_tokens": 16}) as cluster:
        one = await cluster.send("x [[length:3]] [[fault:stall@1=1]]", stream=True)
        await until(lambda: cluster.decode.ledger.count("allocated"))
        two = await cluster.send("y [[length:3]]", stream=True)
        await until(lambda: cluster.decode.engine.decode.full > 0)
        for ident in (one, two):
            await cluster.service.over(ident)
        assert await cluster.kv_empty()


async def test_preempted_for_want_of_blocks():
    async with Cluster(blocks=8, block_tokens=16, timing=Timing(decode_ms=1)) as cluster:
        idents = [await cluster.send(f"{name} [[length:60]]", stream=True) for name in "abc"]
        for name, ident in zip("abc", idents, strict=True):
            await cluster.service.over(ident)
            assert cluster.service.text(ident) == expected(f"{name} [[length:60]]").text
        assert cluster.decode.engine.decode.preempted > 0
        _, gens = await cluster.run("a [[length:400]]", stream=True)
        assert gens[-1].gen_status.status_code == 5
        assert await cluster.kv_empty()


@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
@pytest.mark.parametrize("fault", ["wrong_kv", "kv_lost"])
async def test_missing_kv_shows(mode, fault):
    async with Cluster(settings={"kv_cache_transfer_mode": mode}) as cluster:
        ident, gens = await cluster.run(f"{PROMPT} [[fault:{fault}]]", stream=True)
        plan = lost(expected(f"{PROMPT} [[fault:{fault}]]"), 1)
        assert cluster.service.text(ident) == plan.text
        assert "<KV-LOST>" in plan.text
        ids = [token for gen in gens for out in gen.outputs for token in out.token_ids]
        assert vocabulary.decode(ids) == plan.text
        assert cluster.decode.engine.decode.lost_kv == 1
        assert await cluster.kv_empty()


async def test_unlinked_instances_link_by_themselves():
    async with Cluster(link=False) as cluster:
        ident, _ = await cluster.run(PROMPT, stream=True)
        assert cluster.service.text(ident) == expected(PROMPT).text
        assert cluster.decode.engine.links.implicit == 1
        assert cluster.prefill.engine.name in cluster.decode.engine.links


async def test_several_sequences_and_logprobs():
    async with Cluster(prefix_blocks=64, block_tokens=16) as cluster:
        ident, gens = await cluster.run(PROMPT, stream=True, n=2, logprobs=2)
        first, second = cluster.service.text(ident, 0), cluster.service.text(ident, 1)
        assert first == expected(PROMPT).text
        assert second
        assert second != first
        outputs = [out for gen in gens for out in gen.outputs]
        assert sorted((out.index, out.finish_reason) for out in outputs if out.finish_reason) == [
            (0, "stop"),
            (1, "stop"),
        ]
        told = [out for out in outputs if out.text]
        assert all(len(out.logprobs) == len(out.token_ids) for out in told)
        assert all(len(one.top_logprobs) == 2 for out in told for one in out.logprobs)
        entry = told[0].logprobs[0]
        assert entry.top_logprobs[0] == entry.log_prob_data
        assert gens[-1].usage.num_generated_tokens == 20
        assert await cluster.kv_empty()


async def test_several_sequences_want_the_prefix_cache():
    async with Cluster() as cluster:
        ident = await cluster.send(PROMPT, n=2)
        await until(lambda: cluster.prefill.engine.prefill.requeues > 2)
        assert cluster.decode.engine.decode.refused > 2
        assert cluster.service.gens[ident] == []


async def test_stop_texts_are_looked_for_as_tokens():
    async with Cluster() as cluster:
        plan = expected(PROMPT)
        stop = plan.texts[2] + plan.texts[3]
        ident, gens = await cluster.run(PROMPT, stream=True, stop=[stop])
        assert cluster.service.text(ident) == "".join(plan.texts[:4])
        assert gens[-1].outputs[0].finish_reason == "stop"
        word = vocabulary.to_wire(plan.tokens[1])
        ident, gens = await cluster.run(PROMPT, stop_token_ids=[word])
        assert gens[-1].outputs[0].text == "".join(plan.texts[:2])
        ident, gens = await cluster.run(PROMPT, ignore_eos=True, max_tokens=20)
        assert (gens[-1].usage.num_generated_tokens, gens[-1].outputs[0].finish_reason) == (20, "length")


async def test_echo():
    async with Cluster() as cluster:
        for stream in (True, False):
            ident, gens = await cluster.run(PROMPT, stream=stream, echo=True)
            shown = cluster.service.text(ident) if stream else gens[-1].outputs[0].text
            assert shown == PROMPT + expected(PROMPT).text


async def test_mix_does_both():
    async with Cluster(settings={"type": "MIX"}) as cluster:
        here, there = cluster.prefill, cluster.decode
        for prefill, decode in ((here, there), (there, here)):
            ident, _ = await cluster.run(PROMPT, stream=True, prefill=prefill, decode=decode)
            assert cluster.service.text(ident) == expected(PROMPT).text
        assert await cluster.kv_empty()


def test_the_ids_of_an_answer_are_small():
    assert all(vocabulary.to_wire(token) < vocabulary.SIZE for token in expected(PROMPT).tokens)
    assert vocabulary.EOS == tokens.EOS
