"""What an instance refuses, and how its service hears of it (xLLM protocol page §5.4, §6, §9)."""

import pytest
from xllm_service import API, Cluster, info_of, rpc, until

from instances.xllm import vocabulary
from instances.xllm.errors import EINTERNAL, RpcError, RpcLost
from instances.xllm.proto.engine_pb2 import ChatRequest, CompletionRequest, Status

PROMPT = "hello there [[length:4]]"
STOP = vocabulary.encode("river")[0]

WRONG = {
    "n": {"n": 0},
    "n above best_of": {"n": 3, "best_of": 2},
    "stop": {"stop": list("abcde")},
    "temperature": {"temperature": 2.1},
    "top_p": {"top_p": 1.5},
    "presence": {"presence_penalty": -2.5},
    "frequency": {"frequency_penalty": -0.5},
    "logprobs with echo": {"logprobs": 1, "echo": True},
    "top_logprobs": {"logprobs": 2001},
}


async def failure(cluster, prompt=PROMPT, **fields):
    """(code, text) of a request that fails, the only thing that is said of it."""
    _, gens = await cluster.run(prompt, **fields)
    (gen,) = gens
    assert not gen.outputs
    assert not gen.finished
    return gen.gen_status.status_code, gen.gen_status.status_msg


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
async def test_parameters(fields):
    async with Cluster() as cluster:
        code, text = await failure(cluster, stream=True, **fields)
        assert code == 3
        assert text
        assert await cluster.kv_empty()


async def test_chat_parameters():
    async with Cluster() as cluster:
        assert (await failure(cluster, kind=ChatRequest, logprobs=True, top_logprobs=-1))[0] == 3
        ident, message = cluster.message("x", kind=ChatRequest)
        del message.messages[:]
        await rpc(cluster.prefill.engine.name, API, "ChatCompletions", message)
        (gen,) = await cluster.service.over(ident)
        assert gen.gen_status.status_msg == "Prompt is empty"


async def test_model_prompt_and_length():
    async with Cluster(settings={"max_context_len": 100}) as cluster:
        ident, message = cluster.message(PROMPT)
        message.model = "other"
        await rpc(cluster.prefill.engine.name, API, "Completions", message)
        (gen,) = await cluster.service.over(ident)
        assert (gen.gen_status.status_code, gen.gen_status.status_msg) == (2, "Model not supported")
        ident, message = cluster.message(PROMPT)
        message.prompt = ""
        await rpc(cluster.prefill.engine.name, API, "Completions", message)
        (gen,) = await cluster.service.over(ident)
        assert gen.gen_status.status_msg == "Prompt is empty"
        assert await failure(cluster, "the river " * 50) == (3, "Prompt is too long")
        _, gens = await cluster.run("the" + " river" * 48, ignore_eos=True)
        assert gens[-1].usage.num_total_tokens == 100


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [STOP]}, {"stop": [" river"]}, {"stop": ["the river", " "]}],
    ids=["id", "text", "longer"],
)
async def test_a_prompt_that_ends_with_an_end(fields):
    async with Cluster() as cluster:
        prompt = "the river" if "stop" in fields else "river"
        assert await failure(cluster, prompt, **fields) == (3, "Invalid Prompt")


async def test_the_end_of_text_at_the_end_of_a_prompt():
    async with Cluster() as cluster:
        ident, message = cluster.message(PROMPT)
        message.token_ids.append(vocabulary.EOS)
        await rpc(cluster.prefill.engine.name, API, "Completions", message)
        (gen,) = await cluster.service.over(ident)
        assert gen.gen_status.status_msg == "Invalid Prompt"


async def test_empty_ids_with_a_routing_kill_the_process():
    async with Cluster() as cluster:
        _, message = cluster.message(PROMPT)
        del message.token_ids[:]
        with pytest.raises((RpcError, RpcLost)):
            await rpc(cluster.prefill.engine.name, API, "Completions", message)
        assert len(cluster.prefill.engine.aborts) == 1


async def test_a_process_that_died_may_come_back():
    async with Cluster(settings={"restart_s": 0.01}) as cluster:
        before = cluster.prefill.engine.presence.incarnation_id
        cluster.prefill.engine.abort("for a test")
        await until(lambda: cluster.prefill.engine.presence.incarnation_id != before)
        await until(lambda: cluster.prefill.engine.presence.ready)
        _, gens = await cluster.run(PROMPT, stream=True)
        assert gens[-1].finished


async def test_too_many_at_a_time():
    async with Cluster(settings={"max_concurrent": 2}, decode={"faults": ("decode_full",)}) as cluster:
        for _ in range(2):
            await cluster.send(PROMPT)
        code, text = await failure(cluster)
        assert (code, "limit" in text) == (5, True)


async def test_a_sleeping_model():
    async with Cluster() as cluster:
        cluster.prefill.engine.act("sleep", "")
        assert await failure(cluster) == (6, "Model is sleeping")
        cluster.prefill.engine.act("wake", "")
        assert (await cluster.run(PROMPT))[1][-1].finished


async def test_decode_that_nobody_knows():
    async with Cluster() as cluster:
        ident, message = cluster.message(PROMPT)
        message.routing.decode_name = ""
        await rpc(cluster.prefill.engine.name, API, "Completions", message)
        (gen,) = await cluster.service.over(ident)
        assert gen.gen_status.status_code == 3
        assert gen.gen_status.status_msg == "No decode address provided to the prefill instance"
        cluster.service.known.clear()
        assert await failure(cluster) == (2, "failed to fetch remote decode instance info")


@pytest.mark.parametrize(
    "change",
    [
        {"dp_size": 2},
        {"dp_size": 0},
        {"cluster_ids": [1, 2]},
        {"cluster_ids": []},
        {"cluster_ids": [1, 2, 3], "dp_size": 2},
    ],
)
async def test_a_topology_that_does_not_fit(change):
    async with Cluster() as cluster:
        known = cluster.service.known[cluster.decode.engine.name]
        if "cluster_ids" in change:
            known.cluster_ids[:] = change["cluster_ids"]
        known.dp_size = change.get("dp_size", known.dp_size)
        code, text = await failure(cluster)
        assert code == 3
        assert text.startswith(f"decode instance {cluster.decode.engine.name} is incompatible")


async def test_equal_topologies_fit():
    async with Cluster(settings={"dp_size": 2, "tp_size": 2}) as cluster:
        _, gens = await cluster.run(PROMPT, stream=True)
        assert gens[-1].finished
        assert cluster.decode.engine.decode.lost_kv == 0


async def test_decode_that_cannot_be_reached():
    async with Cluster() as cluster:
        cluster.service.known[cluster.decode.engine.name].rpc_address = "127.0.0.1:1"
        assert await failure(cluster) == (2, "Failed to add new requests to decode instance")
        cluster.service.known[cluster.decode.engine.name].rpc_address = "nonsense"
        assert (await failure(cluster))[0] == 2
        assert await cluster.kv_empty()


async def test_roles_that_do_not_match():
    async with Cluster() as cluster:
        assert (await failure(cluster, prefill=cluster.decode))[0] == 3
        assert cluster.decode.engine.decode.wrong_role == 1
        cluster.service.known[cluster.prefill.engine.name] = info_of(cluster.prefill)
        await cluster.send(PROMPT, decode=cluster.prefill)
        await until(lambda: cluster.prefill.engine.decode.wrong_role > 1)
        await until(lambda: cluster.prefill.engine.prefill.requeues > 1)


async def test_best_of_is_not_streamed():
    async with Cluster(prefix_blocks=8) as cluster:
        _, gens = await cluster.run(PROMPT, stream=True, n=1, best_of=2)
        assert len(gens) == 2
        assert gens[-1].outputs[0].token_ids


@pytest.mark.parametrize("method", ["MultiGenerations", "SendPullSignal"])
async def test_calls_that_kill(method):
    async with Cluster() as cluster:
        engine = cluster.decode.engine
        address = f"{cluster.decode.host}:{engine.pd_port}"
        with pytest.raises((RpcError, RpcLost)) as error:
            await rpc(address, "xllm.proto.DisaggPDService", method, CompletionRequest(), Status)
        assert getattr(error.value, "code", EINTERNAL) == EINTERNAL
        assert len(engine.aborts) == 1
