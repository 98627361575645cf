"""Answers through prefill and decode are those of a single instance, and the KV cache has moved for each."""

import asyncio
import json

import pytest
from openai import AsyncOpenAI
from pair import CHAT, COMPLETIONS, JSON_TYPE, Answer, Pair, prompt, question, read
from raw_client import ask
from vllm_server import BLOCK_TOKENS, MODEL

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def same_both_ways(pair: Pair, path: str, body: dict, transfers: int = 1) -> Answer:
    """Ask both ways; the KV must have moved this often. Returns the coordinator's answer."""
    reference = await pair.alone(path, body)
    async with pair.moving() as moved:
        answer = await pair.through(path, body)
    assert answer.texts == reference.texts
    assert [len(choice.logprobs) for choice in answer.choices.values()] == [
        len(choice.logprobs) for choice in reference.choices.values()
    ]
    decode = moved[0].decode
    assert (decode.transfers, decode.failed, moved[0].prefill.expired) == (transfers, 0, 0)
    if transfers:
        assert moved[0].prefill.generated_tokens == transfers
        assert decode.transferred_bytes > 0
        assert decode.computed_tokens == 0
    return answer


@PATHS
@STREAMS
@pytest.mark.parametrize("words", [150, 151, 152, 700])
async def test_greedy_answers_are_those_of_one_instance(pair, path, stream, words):
    more = WITH_USAGE if stream else {}
    body = question(path, words, **more)
    reference = await pair.alone(path, body)
    async with pair.moving() as moved:
        answer = await pair.through(path, body)
    assert answer.texts == reference.texts
    prompt_tokens = answer.usage["prompt_tokens"]
    assert prompt_tokens >= words
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[name] == reference.usage[name]
    decode = moved[0].decode
    assert (decode.transfers, decode.transferred_tokens, decode.computed_tokens) == (1, prompt_tokens, 0)
    assert moved[0].prefill.generated_tokens == 1


async def test_short_prompt(pair):
    await same_both_ways(pair, COMPLETIONS, question(COMPLETIONS, 2))


@PATHS
@STREAMS
async def test_one_token(pair, path, stream):
    """Prefill has made the whole answer already; decode makes it again."""
    await same_both_ways(pair, path, question(path, max_tokens=1, stream=stream))


async def test_token_ids_as_prompt(pair):
    body = question(COMPLETIONS) | {"prompt": [3 + number * 7 % 250 for number in range(200)]}
    answer = await same_both_ways(pair, COMPLETIONS, body)
    assert answer.usage["prompt_tokens"] == 200


@PATHS
@STREAMS
async def test_logprobs(pair, path, stream):
    more = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    body = question(path, stream=stream, max_tokens=12, ignore_eos=True, **more)
    reference = await pair.alone(path, body)
    answer = await same_both_ways(pair, path, body)
    got, wanted = answer.choices[0].logprobs, reference.choices[0].logprobs
    assert [token for token, _ in got] == [token for token, _ in wanted]
    assert [value for _, value in got] == pytest.approx([value for _, value in wanted], abs=1e-3)
    assert len(got) == 12


@PATHS
async def test_sampling_with_a_seed(pair, path):
    await same_both_ways(pair, path, question(path, temperature=0.9, top_p=0.9, seed=11))


@STREAMS
async def test_max_completion_tokens_limits_the_answer_and_prefill_makes_one(pair, stream):
    more = WITH_USAGE if stream else {}
    body = question(CHAT, max_completion_tokens=7, min_tokens=5, ignore_eos=True, **more)
    answer = await same_both_ways(pair, CHAT, body)
    assert answer.usage["completion_tokens"] == 7


async def test_stop_text(pair):
    body = question(COMPLETIONS, max_tokens=40, ignore_eos=True)
    text = (await pair.alone(COMPLETIONS, body)).choices[0].text
    answer = await same_both_ways(pair, COMPLETIONS, body | {"stop": [text[10:13]]})
    assert answer.choices[0].finish == "stop"
    assert text.startswith(answer.choices[0].text)


async def test_structured_output(pair):
    body = question(CHAT, structured_outputs={"choice": ["one answer", "no answer at all"]})
    answer = await same_both_ways(pair, CHAT, body)
    assert answer.choices[0].text in {"one answer", "no answer at all"}


@PATHS
@STREAMS
async def test_cached_tokens_are_those_of_prefill(pair, path, stream):
    """Decode calls every token cached that it has pulled; the client wants to know what prefill had in its cache."""
    more = WITH_USAGE if stream else {}
    body = question(path, **more)
    first = await pair.through(path, body)
    again = await pair.through(path, body)
    assert first.cached_tokens < BLOCK_TOKENS
    assert again.cached_tokens >= 150 // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.texts == first.texts


async def test_prompt_logprobs(pair):
    """Only prefill has run the whole prompt."""
    body = question(COMPLETIONS, prompt_logprobs=1, max_tokens=4)
    reference = await ask(pair.prefill.port, COMPLETIONS, body, JSON_TYPE)
    client = await ask(pair.port, COMPLETIONS, body)
    assert read(client).texts == read(reference).texts
    got, wanted = (_prompt_logprobs(answer) for answer in (client, reference))
    assert [sorted(row) for row in got] == [sorted(row) for row in wanted]
    assert len(got) >= 149


def _prompt_logprobs(client) -> list[dict]:
    return [row for row in json.loads(client.body)["choices"][0]["prompt_logprobs"] if row]


@PATHS
@STREAMS
async def test_several_choices_are_served_by_decode_alone(pair, path, stream):
    body = question(path, n=2, stream=stream, temperature=0.8, seed=5)
    answer = await same_both_ways(pair, path, body, transfers=0)
    assert sorted(answer.choices) == [0, 1]


async def test_a_list_of_prompts_is_handed_over_one_by_one(pair):
    body = question(COMPLETIONS, ignore_eos=True) | {"prompt": [prompt(), prompt(200), prompt(160)]}
    answer = await same_both_ways(pair, COMPLETIONS, body, transfers=3)
    assert sorted(answer.choices) == [0, 1, 2]
    assert answer.usage["completion_tokens"] == 3 * 32
    assert len({choice.text for choice in answer.choices.values()}) == 3


async def test_a_list_of_prompts_as_a_stream_is_served_by_decode_alone(pair):
    body = question(COMPLETIONS, stream=True) | {"prompt": [prompt(), prompt()]}
    answer = await same_both_ways(pair, COMPLETIONS, body, transfers=0)
    assert sorted(answer.choices) == [0, 1]


async def test_requests_side_by_side(pair):
    bodies = [
        question(path, 150 + 10 * number, stream=bool(number % 3))
        for number in range(6)
        for path in (COMPLETIONS, CHAT)
    ]
    paths = [CHAT if "messages" in body else COMPLETIONS for body in bodies]
    references = [await pair.alone(path, body) for path, body in zip(paths, bodies, strict=True)]
    async with pair.moving() as moved:
        answers = await asyncio.gather(*(pair.through(path, body) for path, body in zip(paths, bodies, strict=True)))
    assert [answer.texts for answer in answers] == [reference.texts for reference in references]
    assert moved[0].decode.transfers == len(bodies)
    assert moved[0].prefill.expired == 0


async def test_the_openai_client(pair):
    body = question(CHAT, ignore_eos=True)
    reference = await pair.alone(CHAT, body)
    extra = {"ignore_eos": body.pop("ignore_eos")}
    async with pair.moving() as moved, AsyncOpenAI(base_url=f"{pair.coordinator.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(**body, stream=True, extra_body=extra)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == reference.choices[0].text
    assert len(pieces) > 2  # a busy engine puts several tokens into one event
    assert moved[0].decode.transfers == 1


async def test_model_names(pair):
    client = await ask(pair.port, "/v1/models")
    assert f'"{MODEL}"'.encode() in client.body
    other = await ask(pair.port, COMPLETIONS, question(COMPLETIONS) | {"model": "other"})
    assert other.status == 404
