"""The three calls: what each gets, and what the client gets."""

import pytest
from engine_world import Watcher, context, instance
from microserving_pair import GENERATE, PREPARE, SEND, WordTokenizer, World, metadata

from coordinator.core.errors import BadRequest, EngineFailed, Side
from coordinator.core.ports import COMPLETED
from coordinator.engines.microserving import MicroservingEngine
from coordinator.engines.microserving.settings import checked_settings

both = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
CHAT = "/v1/chat/completions"


@both
async def test_three_calls_with_negative_windows(stream):
    async with World() as world:
        run = await world.run(stream=stream)
        assert run.result == COMPLETED
        assert run.text == "A B C D"
        assert run.finish == "stop"
        [prepared], [sent], [generated] = (
            world.decode.bodies(PREPARE), world.prefill.bodies(SEND), world.decode.bodies(GENERATE)
        )  # fmt: skip
        assert prepared["end"] == -1
        assert (sent["begin"], sent["end"], sent["recv_rank"]) == (0, -1, 4)
        assert sent["kv_addr_info"] == metadata([(0, 2)])
        assert generated["begin"] == -1
        assert len({body["user"] for body in (prepared, sent, generated)}) == 1
        assert all(body["debug_config"] == {} for body in (prepared, sent, generated))
        await world.leaves_nothing()


@both
async def test_parameters_go_where_they_mean_something(stream):
    given = {
        "n": 2, "temperature": 0.25, "seed": 9007199254740993, "stop": ["x"], "logprobs": 2, "max_tokens": 4,
        "user": "a client's", "suffix": " end", "echo": True, "unknown": {"a": [1.0]},
        "response_format": {"type": "json_object", "schema": '{"a": 1}'},
        "stream_options": {"include_usage": True},
        "debug_config": {"ignore_eos": True, "special_request": "query_engine_metrics", "disagg_config": {"kind": "x"}},
    }  # fmt: skip
    async with World() as world:
        run = await world.run(stream=stream, **given)
        assert run.error is None
        [prepared], [sent], [generated] = (
            world.decode.bodies(PREPARE), world.prefill.bodies(SEND), world.decode.bodies(GENERATE)
        )  # fmt: skip
        for body in (prepared, sent, generated):
            assert body["user"] != "a client's"
            assert body["debug_config"] == {"ignore_eos": True}
            assert body["response_format"] == given["response_format"]
            assert (body["seed"], body["stop"], body["unknown"]) == (9007199254740993, ["x"], {"a": [1.0]})
        assert not {"suffix", "echo", "stream", "stream_options"} & {*prepared, *sent}
        assert prepared["n"] == 2
        assert "n" not in sent
        assert (generated["suffix"], generated["echo"], generated["stream"]) == (" end", True, stream)
        await world.leaves_nothing()


async def test_an_explicit_null_counts_as_absent():
    """Several of the engine's own fields refuse null, and clients send it for all that they leave open."""
    async with World() as world:
        run = await world.run(stream=False, n=None, echo=None, stop=None, stream_options=None, unknown=None)
        assert run.error is None
        for body in (*world.decode.bodies(PREPARE), *world.prefill.bodies(SEND), *world.decode.bodies(GENERATE)):
            assert None not in body.values()
        await world.leaves_nothing()


@both
async def test_the_client_sees_one_id_and_no_extra(stream):
    async with World() as world:
        run = await world.run(stream=stream, stream_options={"include_usage": True})
        ids = {chunk["id"] for chunk in run.chunks}
        assert len(ids) == 1
        assert ids.pop().startswith("cmpl-")
        assert world.decode.bodies(PREPARE)[0]["user"].encode() not in run.out.body
        assert run.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert run.lease.wire_ids == [world.decode.bodies(PREPARE)[0]["user"]]


async def test_a_stream_is_passed_on_as_it_came_but_for_its_id():
    async with World() as world:
        run = await world.run(logprobs=1)
        wire, client = world.decode.bodies(PREPARE)[0]["user"], run.chunks[0]["id"]
        body = {"user": wire}
        came = [world.decode.event(body, [world.decode.choice(word, None, 0, {"logprobs": 1}, [word])]) for word in "A"]
        assert run.out.body.startswith(came[0].replace(wire.encode(), client.encode()))
        assert run.out.body.count(b"token_logprobs") == 4


async def test_a_prompt_of_one_token_and_one_that_is_cached_need_no_prefill():
    async with World() as world:
        assert (await world.run(prompt="one")).text == "A B C D"
        world.decode.prefix = 5
        run = await world.run(prompt="one two three")
        assert run.text == "A B C D"
        assert world.prefill.calls == []
        assert run.lease.prefilled_s is None
        assert len(run.lease.wire_ids) == 1
        await world.leaves_nothing()


async def test_only_what_is_not_cached_is_sent():
    async with World() as world:
        world.decode.prefix = 1
        assert (await world.run(prompt="one two three four")).text == "A B C D"
        [sent] = world.prefill.bodies(SEND)
        assert (sent["begin"], sent["end"]) == (1, -1)


async def test_token_ids_need_no_tokenizer():
    async with World() as world:
        run = await world.run(prompt=[1, 2, 3])
        assert run.text == "A B C D"
        assert world.prefill.bodies(SEND)[0]["prompt"] == [1, 2, 3]


async def test_metadata_of_several_models():
    async with World() as world:
        world.decode.multi = 2
        assert (await world.run()).text == "A B C D"
        world.decode.meta = metadata([(0, 1), (9, 1)], [(3, 2)])
        assert (await world.run()).text == "A B C D"


@pytest.mark.parametrize(
    "meta", ["no base64!", "", metadata([(0, 2)])[:-4], metadata([(0, -2)]), metadata([(0, 2)], [(0, 1)]), "e30="]
)
async def test_metadata_that_makes_no_sense_is_decodes_fault_and_frees_what_it_holds(meta):
    async with World() as world:
        world.decode.meta = meta or "WzFd"
        run = await world.run()
        assert isinstance(run.error, EngineFailed)
        assert (run.error.side, run.error.instance_id, run.error.reason) == (Side.DECODE, "d0", "bad_reply")
        await world.leaves_nothing()
        assert world.prefill.calls == []


@pytest.mark.parametrize(
    "prompt", ["", [], ["a", "b"], [[1], [2]], 7, None, {"a": 1}, [1, -1], [2**31], [[10**30]], [1.5], [1, "a"], [[]]]
)
async def test_prompts_that_are_refused_before_any_call(prompt):
    async with World() as world:
        run = await world.run(prompt=prompt)
        assert isinstance(run.error, BadRequest)
        assert world.decode.calls == world.prefill.calls == []


@pytest.mark.parametrize("prompt", [["one two"], [[1, 2]]])
async def test_a_list_of_one_prompt_is_that_prompt(prompt):
    async with World() as world:
        assert (await world.run(prompt=prompt)).text == "A B C D"
        assert world.decode.bodies(PREPARE)[0]["prompt"] == prompt[0]


async def test_token_ids_that_the_model_does_not_have_are_refused_before_any_call():
    async with World(tokenizer=(tokenizer := WordTokenizer())) as world:
        await tokenizer.encode("one two three", special=False)
        assert (await world.run(prompt=[0, 1, 2])).text == "A B C D"
        run = await world.run(prompt=[0, 3])
        assert isinstance(run.error, BadRequest)
        assert "2, the model's highest" in run.error.message


@pytest.mark.parametrize(
    "given",
    [{"n": 0}, {"n": -1}, {"n": 129}, {"temperature": -0.1}, {"top_p": 1.01}, {"top_p": -1}, {"seed": 2**63}],
    ids=str,
)
@pytest.mark.parametrize("alone", [False, True])
async def test_numbers_that_an_engine_asserts_are_refused_before_any_call(given, alone):
    """Its 500 would look like a failure of its own, and put one decode instance after the other out of use."""
    async with World(**{"mode": "round-robin", "hybrid": True} if alone else {}) as world:
        run = await world.run(**given)
        assert isinstance(run.error, BadRequest)
        assert f"`{next(iter(given))}`" in run.error.message
        assert not any(fake.calls for fake in world.fakes)


async def test_numbers_at_their_limits_are_passed_on():
    async with World() as world:
        given = {"n": 1, "temperature": 0, "top_p": 1, "seed": 2**63 - 1, "max_tokens": 4}
        assert (await world.run(**given)).text == "A B C D"
        sent = world.decode.bodies(PREPARE)[0]
        assert {name: sent[name] for name in given} == given


@pytest.mark.parametrize("given", [{"suffix": 7}, {"echo": "yes"}, {"stream_options": []}])
async def test_what_decode_would_refuse_too_late_is_refused_at_once(given):
    async with World() as world:
        run = await world.run(**given)
        assert isinstance(run.error, BadRequest)
        assert world.decode.calls == []


@pytest.mark.parametrize("api", ["tgi", "vllm", "triton", "mindie"])
async def test_other_apis_are_told_which_paths_to_use(api):
    async with World() as world:
        run = world.start()
        run.task.cancel()
        from engine_world import request

        with pytest.raises(BadRequest, match="/v1/completions"):
            await world.engine.serve(request(api=api), run.lease, run.out)


# --- the balance


@pytest.mark.parametrize(("factor", "end"), [(0.0, -1), (0.3, 7), (0.5, 5), (0.999, 0), (1e-7, -1), (0.05, 9)])
async def test_decode_prefills_its_share(factor, end):
    prompt = " ".join(f"w{number}" for number in range(10))
    async with World(pd_balance_factor=factor, tokenizer=WordTokenizer()) as world:
        assert (await world.run(prompt=prompt)).text == "A B C D"
        [prepared], [generated] = world.decode.bodies(PREPARE), world.decode.bodies(GENERATE)
        assert prepared["end"] == generated["begin"] == end
        sent = world.prefill.bodies(SEND)
        assert [(body["begin"], body["end"]) for body in sent] == ([(0, end)] if end else [])
        if end != -1:
            assert prepared["prompt"] == list(range(10)), "token ids, so that all count alike"


async def test_a_balance_without_a_tokenizer_leaves_decode_out():
    engine = MicroservingEngine(context(settings=checked_settings({"pd_balance_factor": 0.5})))
    watcher = Watcher()
    engine.attach(instance("d0", engine="microserving", options={"recv_rank": 1}), watcher)
    assert "set cluster.tokenizer" in watcher.told[0]
    engine.attach(instance("d1", engine="microserving", options={"recv_rank": 1, "tokenizer": "/x"}), watcher)
    engine.attach(instance("p0", engine="microserving"), watcher)
    assert watcher.told[1:] == ["linked", "linked"]


async def test_a_decode_without_its_rank_is_left_out():
    watcher = Watcher()
    MicroservingEngine(context()).attach(instance("d0", engine="microserving"), watcher)
    assert "recv_rank" in watcher.told[0]
    MicroservingEngine(context(settings={"mode": "round-robin"})).attach(instance("d0"), watcher)
    assert watcher.up
