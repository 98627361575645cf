"""The KV that moves is the one that counts, and none stays behind on prefill when its request is over."""

import json
from contextlib import contextmanager

import pytest
from pair import CHAT, COMPLETIONS, JSON_TYPE, RELEASED_S, question
from raw_client import Client, ask, eventually
from vllm_server import CONTEXT_TOKENS, MODEL

HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@contextmanager
def frozen(server):
    """The instance takes connections and does nothing meanwhile."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


async def test_decode_reads_what_prefill_has_written(pair):
    """Without a coordinator: decode, asked one prompt with the KV of another, goes on with the other.

    If this did not hold, equal answers would prove nothing: decode could have computed the prompt itself.
    """
    one, other = ([(5 + step * number) % 250 + 3 for number in range(199)] + [70] for step in (7, 11))
    body = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    answers = [(await pair.alone(COMPLETIONS, body | {"prompt": ids})).texts for ids in (one, other)]
    assert answers[0] != answers[1]
    headers = JSON_TYPE | {"X-Request-Id": "kv-of-another"}
    held = await ask(
        pair.prefill.port, COMPLETIONS, body | {"prompt": one, "max_tokens": 1, "kv_transfer_params": HOLD}, headers
    )
    handed = body | {"prompt": other, "kv_transfer_params": json.loads(held.body)["kv_transfer_params"]}
    mixed = await ask(pair.decode.port, COMPLETIONS, handed, headers)
    text = json.loads(mixed.body)["choices"][0]["text"]
    assert text == answers[0][0][0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("way", ["fin", "reset"])
async def test_a_client_that_leaves_a_stream_frees_both(pair, path, way):
    async with pair.moving() as moved, await Client.connect(pair.port) as client:
        await client.ask(path, question(path, **LONG))
        assert await client.head() == 200
        while client.body.count(b"data: ") < 5:
            assert await client.piece()
        assert pair.decode.books().live == 1
        if way == "reset":
            await client.reset()
    assert moved[0].decode.generated_tokens < 1000
    assert moved[0].decode.transfers == 1
    assert moved[0].prefill.expired == 0


async def test_a_client_that_leaves_while_prefill_works(pair):
    async with pair.moving() as moved:
        with frozen(pair.prefill):
            async with await Client.connect(pair.port) as client:
                await client.ask(COMPLETIONS, question(COMPLETIONS, **LONG))
                await eventually(lambda: pair.coordinator.loads()["instance_in_flight"], "the request is placed")
            await eventually(lambda: not pair.coordinator.loads()["requests_in_flight"], "the request is over")
    assert moved[0].decode.transfers == 0
    assert moved[0].prefill.expired == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_between_prefill_and_decode(pair, stream):
    """Prefill has pinned the KV, decode has not asked for it yet."""
    async with pair.moving() as moved:
        with frozen(pair.decode):
            async with await Client.connect(pair.port) as client:
                await client.ask(COMPLETIONS, question(COMPLETIONS, **LONG | {"stream": stream}))
                await eventually(
                    lambda: not pair.prefill.books().live and pair.prefill.books().kv_usage, "KV is pinned"
                )
                assert pair.coordinator.loads()["kv_pinned_requests"] == 1
            await eventually(lambda: not pair.coordinator.loads()["requests_in_flight"], "the request is over")
        await eventually(lambda: pair.prefill.books().idle, "prefill's KV is free", RELEASED_S)
    assert moved[0].prefill.expired == 0
    assert moved[0].decode.generated_tokens <= 1500


async def test_a_request_that_is_too_long_is_refused_by_prefill(pair):
    async with pair.moving() as moved:
        client = await ask(pair.port, COMPLETIONS, question(COMPLETIONS, 3000))
    assert client.status == 400
    error = json.loads(client.body)["error"]
    assert str(CONTEXT_TOKENS) in error["message"]
    assert moved[0].prefill.generated_tokens == moved[0].decode.generated_tokens == 0


@pytest.mark.parametrize(
    ("more", "word"),
    [({"stream_options": {"include_usage": True}}, "stream"), ({"min_tokens": 50, "max_tokens": 5}, "min_tokens")],
    ids=["stream_options without stream", "min_tokens above max_tokens"],
)
async def test_a_request_that_only_decode_refuses_frees_prefill(pair, more, word):
    """Prefill is asked for one token, whole, and has nothing against it."""
    async with pair.moving() as moved:
        client = await ask(pair.port, COMPLETIONS, question(COMPLETIONS, **more))
        assert client.status == 400
        await eventually(lambda: pair.prefill.books().idle, "prefill's KV is free", RELEASED_S)
    assert word in json.loads(client.body)["error"]["message"].lower()
    assert moved[0].prefill.generated_tokens == 1
    assert moved[0].prefill.expired == 0


async def test_a_value_that_the_engine_refuses(pair):
    client = await ask(pair.port, CHAT, question(CHAT, temperature=-3))
    assert client.status == 400
    assert "temperature" in json.loads(client.body)["error"]["message"]
