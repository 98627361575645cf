import asyncio
import json

import pytest
from long_request import indexed
from vllm_pair import COMPLETIONS, reply

from coordinator.core.errors import BadRequest, EngineFailed, EngineRefused, Side
from coordinator.engines.vllm.batch import MAX_AT_ONCE
from coordinator.wire.vllm import MAX_PROMPTS


async def test_each_prompt_goes_its_own_way_and_the_answers_become_one(world):
    prompts = [f"p{i}" for i in range(MAX_AT_ONCE * 2 + 1)]
    sink, placement = await world.serve(world.request(COMPLETIONS, prompt=prompts, max_tokens=4))
    answer = json.loads(sink.answer)
    assert [c["index"] for c in answer["choices"]] == list(range(len(prompts)))
    assert [c["text"] for c in answer["choices"]] == [f"A{p}" for p in prompts]
    assert answer["usage"]["completion_tokens"] == 2 * len(prompts)
    assert sorted(b["prompt"] for b in world.p.bodies) == sorted(prompts)
    assert sorted(world.fetched) == sorted(placement.wire_ids)
    assert len(set(placement.wire_ids)) == len(prompts)
    assert placement.moments == ["sent"] * len(prompts) + ["prefilled", "decoding"]
    assert not world.pinned


async def test_token_lists(world):
    await world.serve(world.request(COMPLETIONS, prompt=[[1, 2], [3]]))
    assert sorted(b["prompt"] for b in world.p.bodies) == [[1, 2], [3]]
    assert sorted(b["prompt"] for b in world.d.bodies) == [[1, 2], [3]]


@pytest.mark.parametrize("long", ["p" * 70000, "few"])
async def test_a_list_in_a_long_body(world, long):
    prompts = [long + "1", [7, 8], long + "2"]
    await world.serve(indexed(world.request(COMPLETIONS, prompt=prompts)))
    for instance in (world.p, world.d):
        assert sorted((b["prompt"] for b in instance.bodies), key=str) == sorted(prompts, key=str)


@pytest.mark.parametrize("wrapped", [indexed, lambda request: request])
async def test_too_many_are_refused_before_anything_is_sent(world, wrapped):
    prompts = ["a b c"] * (MAX_PROMPTS + 1)
    with pytest.raises(BadRequest, match=f"{MAX_PROMPTS} prompts at most"):
        await world.serve(wrapped(world.request(COMPLETIONS, prompt=prompts)))
    assert not world.p.seen


async def test_no_more_than_some_at_once(world):
    world.p.gate.clear()
    request = world.request(COMPLETIONS, prompt=[f"p{i}" for i in range(MAX_AT_ONCE + 5)])
    task = asyncio.create_task(world.serve(request))
    await world.until(lambda: len(world.p.seen) == MAX_AT_ONCE)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(world.p.seen) == MAX_AT_ONCE
    world.p.gate.set()
    sink, _ = await task
    assert len(json.loads(sink.answer)["choices"]) == MAX_AT_ONCE + 5


async def test_the_first_failure_ends_all_and_leaves_no_kv_behind(world):
    normal = world.d.answer

    async def picky(headers, body, writer):
        if body["prompt"] == "bad" and body["max_tokens"] != 1:
            await reply(writer, {"error": {"message": "not this one"}}, 422)
        else:
            await normal(headers, body, writer)

    world.d.answer = picky
    with pytest.raises(EngineRefused, match="not this one"):
        await world.serve(world.request(COMPLETIONS, prompt=["a", "b", "bad", "c"], max_tokens=5))
    assert asyncio.current_task().cancelling() == 0, "deadlines would not hold in this task any more"
    await world.settled()
    assert not world.orphans


async def test_an_odd_answer_is_decodes_failure(world):
    world.d.extra = {"choices": []}
    with pytest.raises(EngineFailed) as caught:
        await world.serve(world.request(COMPLETIONS, prompt=["a", "b"]))
    assert (caught.value.side, caught.value.reason) == (Side.DECODE, "bad_reply")
