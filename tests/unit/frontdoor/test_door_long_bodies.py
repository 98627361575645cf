"""Long bodies are walked once, in small steps, one at a time."""

import asyncio
import gc
import json
from dataclasses import replace

import msgspec
import pytest
from door_world import SETTINGS, World
from engine_world import turns

from coordinator.api import bodies
from coordinator.api.bodies import LONG_BYTES
from coordinator.api.families import FAMILIES
from coordinator.core.errors import BadRequest, DeadlineExceeded, Outcome
from coordinator.frontdoor.reading import BodyReader
from coordinator.wire.json_edit import IndexedRequest, request_fields

CHAT = "/v1/chat/completions"
PROMPT = b'[{"role":"user","content":"' + b"a b c d \\n" * (LONG_BYTES // 8) + b'"}]'
LONG = b'{"model" : "m","messages":' + PROMPT + b',"stream":true,"max_tokens":5}'


class Clock:
    """A millisecond passes with each look."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def world():
    return World()


def plain(request):
    return {name: bytes(value) for name, value in request_fields(request).items()}


async def test_a_long_body_goes_to_the_engine_as_it_came_and_with_its_index(world):
    answer = await world.ask(CHAT, LONG)
    (request,) = world.dispatcher.requests
    assert answer.status == 200
    assert request.body == LONG
    ask = request.ask
    assert (ask.model, ask.stream, ask.max_tokens, ask.prompt_bytes) == ("m", True, 5, len(PROMPT))
    assert isinstance(request, IndexedRequest)
    assert plain(request) == {"model": b'"m"', "messages": PROMPT, "stream": b"true", "max_tokens": b"5"}


async def test_token_ids_are_counted(world):
    await world.ask("/v1/completions", b'{"model":"m","prompt":[' + b"12345," * 100000 + b"7]}")
    assert world.dispatcher.requests[0].ask.prompt_tokens == 100001


async def test_an_alias_is_replaced_and_nothing_else(world):
    await world.ask(CHAT, LONG.replace(b'"m"', b'"dummy"'))
    (request,) = world.dispatcher.requests
    assert bytes(request.body) == LONG
    assert plain(request) == {"model": b'"m"', "messages": PROMPT, "stream": b"true", "max_tokens": b"5"}


@pytest.mark.parametrize(
    ("path", "field", "api"),
    [("/generate", b"inputs", "tgi"), ("/generate", b"prompt", "vllm"), ("/generate", b"text", "sglang")],
)
async def test_families_that_share_a_path_are_told_apart(world, path, field, api):
    await world.ask(path, b'{"x":1,"' + field + b'":"' + b"a" * LONG_BYTES + b'"}')
    assert world.dispatcher.requests[0].api == api


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, LONG[:-1], "the body is not valid JSON"),
        (CHAT, b"[" + LONG + b"]", "the body must be a JSON object"),
        (CHAT, LONG.replace(b"true", b"1"), "`stream` must be true or false"),
        ("/infer", LONG, "the body needs either `inputs` or `input_id`: both are missing"),
        ("/generate", LONG[:-9], "the body is not valid JSON"),
    ],
)
async def test_refusals_have_the_familys_shape_and_are_counted(world, path, body, message):
    answer = await world.ask(path, body)
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert (error["message"] if isinstance(error, dict) else error).startswith(message)
    (record,) = world.lines.records
    assert (record.outcome, record.status) == (Outcome.CLIENT_ERROR, 400)
    assert not world.dispatcher.requests


async def test_a_client_that_leaves_meanwhile_is_counted(world):
    _, task = world.start(CHAT, LONG)
    await turns(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.outcome for record in world.lines.records] == [Outcome.CLIENT_GONE]
    assert world.counted() == {("openai", "client_gone"): 1}
    assert (await world.ask(CHAT, LONG)).status == 200  # its turn was given back


async def test_the_wait_for_others_has_the_deadline_of_scheduling():
    world = World(settings=replace(SETTINGS, schedule_s=0.0))
    async with world.door._bodies._turn:
        answer = await world.ask(CHAT, LONG)
    assert answer.status == 504
    assert world.lines.records[0].error_reason == "schedule"


async def test_what_came_is_not_kept_while_the_engine_works(world):
    """A coded body is two objects while it is renamed, and one from then on."""
    world.dispatcher.wait = asyncio.Event()
    client, task = world.start(CHAT, LONG.replace(b'"m"', b'"dummy"'))
    async with asyncio.timeout(10):
        while not world.dispatcher.requests:
            await turns(1)
    body = world.dispatcher.requests[0].body
    assert client.exchange.body == b""
    frames = [task.get_coro()]
    while (inner := frames[-1].cr_await) is not None and hasattr(inner, "cr_frame"):
        frames.append(inner)
    for frame in frames:
        for name, value in (frame.cr_frame.f_locals if frame.cr_frame else {}).items():
            assert not isinstance(value, bodies.Walked), name
            assert not isinstance(value, bytes) or value is body or len(value) < LONG_BYTES, name
    world.dispatcher.wait.set()
    await task


async def test_a_short_body_of_a_shared_path_is_walked_once(world, monkeypatch):
    walks = []

    class Counting:
        def __init__(self, decoder):
            self.type, self._decode = decoder.type, decoder.decode

        def decode(self, text):
            walks.append(text)
            return self._decode(text)

    monkeypatch.setattr(bodies, "_FIELDS", Counting(bodies._FIELDS))
    monkeypatch.setattr(bodies.msgspec.json, "decode", lambda *a, **k: pytest.fail("another walk"))
    body = b'{"input_ids":[1,2],"sampling_params":{"max_new_tokens":3}}'
    await world.ask("/generate", body)
    assert world.dispatcher.requests[0].api == "sglang"
    assert walks == [body]


async def walked_beside_others(text):
    """The walked body, and how many turns of the loop others had meanwhile."""
    seen = 0

    async def others():
        nonlocal seen
        while True:
            seen += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others(), name="others")
    walked = await BodyReader(Clock()).walk(text, float("inf"))
    task.cancel()
    return walked, seen


class TestBodyReader:
    TEXT = b'{"a":"' + b"x" * 400_000 + b'"}'

    async def test_the_loop_turns_between_two_steps(self):
        _, seen = await walked_beside_others(self.TEXT)
        assert seen >= len(self.TEXT) // 32768  # the clock lets one piece into each step

    async def test_long_arrays_are_counted_in_steps_too_and_once(self, monkeypatch):
        ids = b"[" + b"123456," * (LONG_BYTES // 7) + b"0]"
        text = b'{"model":"m","prompt":' + ids + b',"words":["' + b"x" * LONG_BYTES + b'"],"few":[1,2]}'
        walked, seen = await walked_beside_others(text)
        assert seen >= len(text) // 32768 + len(ids) // 65536
        assert [number for _, number in walked.counted] == [LONG_BYTES // 7 + 1, None]
        counted_again = []
        monkeypatch.setattr(bodies, "token_steps", lambda value: counted_again.append(len(value)) or iter(()))
        ask = next(one for one in FAMILIES if one.name == "openai").parse("/v1/completions", walked)
        assert (ask.prompt_tokens, counted_again) == (LONG_BYTES // 7 + 1, [])

    async def test_one_body_at_a_time(self):
        reader = BodyReader(Clock())
        ended = []

        async def walk(name, text):
            await reader.walk(text, float("inf"))
            ended.append(name)

        await asyncio.gather(walk("long", self.TEXT), walk("short", b"{}"))
        assert ended == ["long", "short"]

    async def test_the_wait_has_its_deadline(self):
        reader = BodyReader()
        await reader._turn.acquire()
        with pytest.raises(DeadlineExceeded):
            await reader.walk(b"{}", 0.0)
        reader._turn.release()
        assert (await reader.walk(b"{}", float("inf"))).spans == {}

    async def test_a_refused_body_lets_the_next_one_in(self):
        reader = BodyReader()
        with pytest.raises(BadRequest):
            await reader.walk(b"{", float("inf"))
        assert (await reader.walk(b'{"a":1}', float("inf"))).fields == {"a": msgspec.Raw(b"1")}

    async def test_nothing_is_left_to_the_garbage_collector(self):
        gc.collect()
        gc.disable()
        try:
            walked = await BodyReader().walk(b'{"a":"' + b"x" * 100_000 + b'"}', float("inf"))
            assert walked.spans is not None
            del walked
            assert not any(isinstance(one, bodies.Walked) for one in gc.get_objects())
        finally:
            gc.enable()
