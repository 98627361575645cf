"""The engine protocol `sglang` when all goes well: what both legs get, and what the client gets."""

import asyncio
import json

import pytest
from engine_world import Out, Placed, Watcher, chat, instance, request, turns, until
from long_request import indexed
from sglang_world import DONE, World, event, token, whole

from coordinator.config.errors import OptionError
from coordinator.core.errors import BadRequest, EngineFailed, Side
from coordinator.core.ports import SplitEngine
from coordinator.engines.sglang import SglangEngine, drains, engine, pair
from coordinator.wire.sglang import MAX_SEQUENCES

TRIPLE = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@pytest.fixture
async def world():
    world = await World().listen()
    yield world
    await world.aclose()


def native(body, *, stream=False):
    body = {**body, "stream": stream}
    return request(api="sglang", path="/generate", stream=stream, body=json.dumps(body).encode())


def completion(**body):
    return request(path="/v1/completions", stream=False, body=json.dumps(body).encode())


# --- the two calls


async def test_both_get_the_same_and_the_client_gets_decodes(world):
    placement = world.placed()
    out = await world.serve(request(headers=((b"authorization", b"Bearer t"),)), placement=placement)
    assert out.body == token("a") + token("b") + token("c", "stop") + DONE
    assert out.tokens == [token("a"), token("b"), token("c", "stop")]
    first, second = world.prefill.calls[0], world.decode.calls[0]
    assert first.body == second.body
    assert first.target == second.target == "/v1/chat/completions"
    sent = json.loads(first.body)
    room = sent["bootstrap_room"]
    assert [sent.pop(name) for name in TRIPLE] == ["127.0.0.1", 8998, room]
    assert sent == json.loads(chat())
    assert placement.moments[0] == ("sent", str(room))
    assert placement.names[0] == "sent"
    assert {"prefilled", "decoding"} <= set(placement.names)
    for call in (first, second):
        assert call.header("authorization") == "Bearer t"
        assert call.header("x-request-id") == str(room)
        assert call.header("content-type") == "application/json"


async def test_connections_are_used_again(world):
    for _ in range(5):
        await world.serve(request(stream=False))
        await until(lambda: not world.in_use)
    assert (world.prefill.accepted, world.decode.accepted) == (1, 1)
    rooms = [body["bootstrap_room"] for body in world.prefill.bodies]
    assert len(set(rooms)) == 5


async def test_a_whole_answer_is_decodes_own(world):
    out = await world.serve(request(stream=False))
    assert out.events == [("whole", whole("abc"), True)]


async def test_an_odd_content_type_of_the_client_does_not_reach_the_engine(world):
    await world.serve(request(stream=False, headers=((b"content-type", b"text/plain"),)))
    assert world.prefill.calls[0].header("content-type") == "application/json"


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (request(stream=False, body=b'{"messages":[],"n":3}'), 3),
        (completion(prompt=["a", "b"], n=2), 4),
        (completion(prompt=[[1, 2], [3]]), 2),
        (completion(prompt=["a"]), 1),
        (native({"text": ["a", "b"]}), 2),
        (native({"input_ids": [[1], [2], [3]], "sampling_params": {"n": 2}}), 6),
    ],
)
async def test_a_batch_has_one_room_per_sequence(world, asked, count):
    await world.serve(asked)
    (first,), (second,) = world.prefill.bodies, world.decode.bodies
    assert first == second
    assert len(set(first["bootstrap_room"])) == count
    assert first["bootstrap_host"] == ["127.0.0.1"] * count
    assert first["bootstrap_port"] == [8998] * count


LONG = "a" * 70000
VECTORS = [[0.5] * 9000] * 3


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (completion(prompt=[LONG, "b", LONG], n=2), 6),
        (completion(prompt=[[1] * 40000, [2]]), 2),
        (native({"text": [LONG, LONG]}), 2),
        (native({"input_embeds": [VECTORS, VECTORS]}), 2),
    ],
)
async def test_a_batch_in_a_long_body(world, asked, count):
    await world.serve(indexed(asked))
    (first,), (second,) = world.prefill.bodies, world.decode.bodies
    assert first == second
    assert len(set(first.pop("bootstrap_room"))) == count
    assert first.items() >= json.loads(asked.body).items()


@pytest.mark.parametrize("asked", [completion(prompt=[1] * 40000), native({"input_embeds": VECTORS})])
async def test_one_prompt_in_a_long_body(world, asked):
    await world.serve(indexed(asked))
    assert isinstance(world.prefill.bodies[0]["bootstrap_room"], int)


async def test_too_large_a_batch_in_a_long_body_reaches_no_engine(world):
    with pytest.raises(BadRequest, match="sequences"):
        await world.serve(indexed(completion(prompt=["a b c"] * (MAX_SEQUENCES + 1))))
    assert not world.prefill.calls


async def test_too_large_a_batch_reaches_no_engine(world):
    with pytest.raises(BadRequest, match="sequences"):
        await world.serve(request(stream=False, body=b'{"messages":[],"n":1000000000}'))
    assert not world.prefill.calls


async def test_the_key_gives_the_port(world):
    world.port = 9009
    world.p0 = instance("p0", world.prefill.address, engine="sglang", options={"bootstrap_port": 9009})
    await world.serve(request())


async def test_a_clients_own_control_fields_are_dropped(world):
    body = {"messages": [], "bootstrap_room": 7, "bootstrap_host": "evil", "rid": "same", "routed_dp_rank": 3, "id": 1}
    await world.serve(request(stream=False, body=json.dumps(body).encode()))
    sent = world.prefill.bodies[0]
    assert set(sent) == {"messages", "id", *TRIPLE}
    assert sent["bootstrap_room"] != 7


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        ("tgi", "/generate", b'{"inputs":"a"}'),
        ("vllm", "/generate", b'{"prompt":"a"}'),
        ("triton", "/v2/models/m/generate", b'{"text_input":"a"}'),
        ("mindie", "/infer", b'{"inputs":"a"}'),
    ],
)
async def test_other_families_are_refused_before_any_call(world, api, path, body):
    asked = request(api=api, path=path, body=body)
    for placement in (world.placed(), Placed(instance("h0", world.prefill.address, engine="sglang"))):
        with pytest.raises(BadRequest, match="not served by SGLang"):
            await world.serve(asked, placement=placement)
    with pytest.raises(BadRequest, match="not served by SGLang"):
        await world.engine.call(asked, world.p0)
    assert not world.prefill.calls
    assert not world.decode.calls


async def test_what_is_no_object_is_refused(world):
    with pytest.raises(BadRequest):
        await world.serve(request(body=b"[]"))


# --- one instance for both


async def test_a_hybrid_instance_gets_the_clients_own_body(world):
    async def answer(call):
        call.reply(whole("x"))

    world.prefill.script = answer
    h0 = instance("h0", world.prefill.address, engine="sglang")
    body = b'{"messages": [] , "seed":9007199254740993,"stream":false}'
    out = await world.serve(request(stream=False, body=body), placement=Placed(h0))
    assert out.body == whole("x")
    assert world.prefill.calls[0].body == body
    await world.serve(native({"text": "a", "rid": "same", "bootstrap_host": "evil"}), placement=Placed(h0))
    assert world.prefill.bodies[1] == {"text": "a", "stream": False}


# --- prefill's answer is drained


async def test_a_late_end_of_prefill_holds_nobody_up_and_is_awaited(world):
    go_on = asyncio.Event()

    async def slow(call):
        call.open_stream()
        await go_on.wait()
        call.chunk(token("a", "length") + DONE)
        call.end()

    world.prefill.answer = slow
    out = await world.serve(request())
    assert out.over
    assert world.in_use == 1
    assert not world.prefill.calls[0].peer.gone.is_set()
    go_on.set()
    await until(lambda: world.client.idle_connections == 2)
    assert world.in_use == 0


async def test_prefill_that_fails_after_the_answer_is_nobodys_business(world):
    go_on = asyncio.Event()

    async def fail(call):
        await go_on.wait()
        call.rst()

    world.prefill.answer = fail
    out = await world.serve(request())
    assert out.over
    go_on.set()
    await until(lambda: not world.in_use)


async def test_drains_end_with_the_engine_and_by_time(world, monkeypatch):
    async def never(call):
        await asyncio.Event().wait()

    world.prefill.answer = never
    await world.serve(request())
    assert world.in_use == 1
    await world.engine.aclose()
    await world.prefill.calls[0].left()
    monkeypatch.setattr(drains, "DRAIN_S", 0.01)
    await world.serve(request())
    await world.prefill.calls[1].left()
    monkeypatch.setattr(drains, "DRAIN_S", 10)
    monkeypatch.setattr(drains, "MAX_DRAINS", 1)
    await world.serve(request())
    await world.serve(request())
    await world.prefill.calls[2].left()
    assert world.in_use == 1


# --- what prefill adds


PROMPT = [[-0.5, 1, None], [-0.25, 2, None]]


def generated(text, index=None, **meta):
    value = {"text": text, "meta_info": {"id": "r", "finish_reason": {"type": "stop"}, **meta}}
    return value if index is None else {**value, "index": index}


def answers(*values, stream=False, after=None):
    async def answer(call):
        if after is not None:
            await after.wait()
        if not stream:
            call.reply(json.dumps(values[0]).encode())
            return
        call.open_stream()
        for value in values:
            call.chunk(event(value))
        call.chunk(DONE)
        call.end()

    return answer


@pytest.mark.parametrize("late", [False, True])
async def test_prompt_logprobs_come_from_prefill(world, late):
    gate = asyncio.Event()
    world.prefill.answer = answers(generated("", input_token_logprobs=PROMPT), after=gate if late else None)
    world.decode.answer = answers(generated("abc", output_token_logprobs=[[-1, 5, None]]), after=None if late else gate)
    out = Out("sglang")
    work = asyncio.create_task(world.serve(native({"text": "a", "return_logprob": True}), out))
    await until(lambda: world.decode.calls)
    await turns(50)
    assert not out.events
    gate.set()
    await work
    meta = json.loads(out.body)["meta_info"]
    assert meta["input_token_logprobs"] == PROMPT
    assert meta["output_token_logprobs"] == [[-1, 5, None]]


@pytest.mark.parametrize("late", [False, True])
async def test_prompt_logprobs_go_into_streams(world, late):
    gate = asyncio.Event()
    prompts = [generated("", at, input_token_logprobs=[[-at, at, None]]) for at in (1, 0)]
    world.prefill.answer = answers(*prompts, stream=True, after=gate if late else None)
    pieces = [generated("a", 0), generated("b", 1), generated("ab", 0)]
    world.decode.answer = answers(*pieces, stream=True, after=None if late else gate)
    body = {"text": ["x", "y"], "return_logprob": [True, False]}
    work = asyncio.create_task(world.serve(native(body, stream=True)))
    await until(lambda: world.decode.calls)
    await turns(50)
    gate.set()
    out = await work
    *events, last = [line.removeprefix(b"data: ") for line in out.body.split(b"\n\n") if line]
    assert last == b"[DONE]"
    values = [json.loads(line) for line in events]
    assert [value["text"] for value in values] == ["a", "b", "ab"]
    at = [value["meta_info"]["input_token_logprobs"][0][1] for value in values]
    assert at == [0, 1, 0]


async def test_a_prefill_that_never_ends_does_not_hold_the_answer_for_ever(world, monkeypatch):
    monkeypatch.setattr(pair, "PREFILL_WAIT_S", 0.01)
    world.prefill.answer = answers({}, after=asyncio.Event())
    world.decode.answer = answers(generated("abc"))
    out = await world.serve(native({"text": "a", "return_logprob": True}))
    assert json.loads(out.body) == generated("abc")


async def test_an_answer_that_is_held_back_is_not_sent_when_prefill_fails(world):
    gate = asyncio.Event()

    async def fail(call):
        await gate.wait()
        call.rst()

    world.prefill.answer = fail
    world.decode.answer = answers(generated("abc"))
    out = Out("sglang")
    work = asyncio.create_task(world.serve(native({"text": "a", "return_logprob": True}), out))
    await until(lambda: world.client.idle_connections == 1)
    gate.set()
    with pytest.raises(EngineFailed) as caught:
        await work
    assert caught.value.side is Side.PREFILL
    assert not out.started


async def test_without_logprobs_nothing_is_read(world):
    world.prefill.answer = answers(generated("", input_token_logprobs=PROMPT))
    odd = json.dumps(generated("abc"), indent=2).encode()

    async def loosely(call):
        call.reply(odd)

    world.decode.answer = loosely
    out = await world.serve(native({"text": "a"}))
    assert out.body == odd


USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def with_usage(cached):
    return {"choices": [], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": cached}}}


async def test_cached_tokens_are_prefills_in_a_whole_answer(world):
    told = asyncio.Event()
    world.prefill.answer = answers(with_usage(7))
    world.decode.answer = answers({**with_usage(9), "x": 1}, after=told)
    placement = world.placed()
    work = asyncio.create_task(world.serve(request(stream=False), placement=placement))
    await until(lambda: "prefilled" in placement.names)
    told.set()
    out = await work
    assert json.loads(out.body) == {**with_usage(7), "x": 1}
    assert placement.names == ["sent", "prefilled", "prefilled", "decoding"]


@pytest.mark.parametrize("asked", [True, False])
async def test_cached_tokens_are_prefills_at_a_streams_end(world, asked):
    told = asyncio.Event()
    one = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    world.prefill.answer = answers(one, with_usage(7), stream=True)

    async def decode(call):
        call.open_stream()
        call.chunk(event(one))
        await told.wait()
        call.chunk(event(with_usage(9)))
        call.chunk(DONE)
        call.end()

    world.decode.answer = decode
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": asked}}
    placement = world.placed()
    work = asyncio.create_task(world.serve(request(body=json.dumps(body).encode()), placement=placement))
    await until(lambda: placement.names.count("prefilled") == 2)
    told.set()
    out = await work
    assert out.body == event(one) + event(with_usage(7 if asked else 9)) + DONE


# --- instances


async def test_health_and_the_models_name(world, monkeypatch):
    world.d0 = instance("d0", world.decode.address, engine="sglang", model=None)
    assert await world.engine.probe(world.d0) == "m"
    assert await world.engine.probe(world.d0) == "m"
    assert world.decode.asked == ["/health", "/v1/models", "/health"]
    world.decode.health = 503
    with pytest.raises(EngineFailed, match="http 5xx"):
        await world.engine.probe(world.d0)
    world.decode.health = 404
    assert await world.engine.probe(world.d0) == "m"
    assert world.decode.asked[-2:] == ["/health", "/v1/models"]
    monkeypatch.setattr(engine, "MODELS_EVERY_S", 0.0)
    await world.engine.detach(world.d0)
    await world.engine.probe(world.d0)
    await world.engine.probe(world.d0)
    assert world.decode.asked[-4:] == ["/health", "/v1/models"] * 2


async def test_a_named_model_is_not_asked_for(world):
    assert await world.engine.probe(world.d0) is None
    assert world.decode.asked == ["/health"]


async def test_a_dead_instance_fails_its_check(world):
    await world.decode.refuse()
    with pytest.raises(EngineFailed) as caught:
        await world.engine.probe(world.d0)
    assert caught.value.connecting


async def test_prefill_tells_its_bootstrap_port_and_tells_a_new_one(world):
    for world.port in (9001, 9002):
        world.prefill.info = b'{"disaggregation_bootstrap_port":%d}' % world.port
        await world.engine.probe(world.p0)
        await world.serve(request())
    world.prefill.info = b"broken"
    await world.engine.probe(world.p0)
    await world.serve(request())
    await world.engine.detach(world.p0)
    world.port = 8998
    await world.serve(request())


async def test_the_newer_path_and_none_at_all(world):
    await world.engine.probe(world.p0)
    assert world.prefill.asked == ["/health", "/get_server_info", "/server_info"]
    await world.serve(request())
    world.prefill.info, world.prefill.info_path = b'{"disaggregation_bootstrap_port":9003}', "/server_info"
    await world.engine.probe(world.p0)
    world.port = 9003
    await world.serve(request())


async def test_a_port_that_is_given_is_not_asked_for(world):
    p0 = instance("p0", world.prefill.address, engine="sglang", options={"bootstrap_port": 9})
    await world.engine.probe(p0)
    await world.engine.probe(world.d0)
    assert world.prefill.asked == ["/health"]
    assert world.decode.asked == ["/health"]


async def test_serving_processes_learn_the_ports_of_the_one_that_checks(world):
    told = []
    world.port, world.prefill.info = 9001, b'{"disaggregation_bootstrap_port":9001}'
    checking, serving, late = SglangEngine(world.context), world.engine, SglangEngine(world.context)
    assert all(isinstance(half, SplitEngine) for half in (checking, serving))
    checking.own(lambda worker, data: told.append((worker, data)))
    serving.follow()
    await checking.probe(world.p0)
    await checking.probe(world.p0)
    ((worker, data),) = told
    assert worker is None
    serving.told(data)
    await world.serve(request())
    checking.introduce(3)
    worker, data = told.pop()
    assert worker == 3
    late.told(data)
    world.engine = late
    await world.serve(request())
    await checking.detach(world.p0)
    late.told(told.pop()[1])
    world.port = 8998
    await world.serve(request())
    await serving.aclose()


def test_options():
    assert SglangEngine.options({"bootstrap_port": 8998}) == {"bootstrap_port": 8998}
    assert SglangEngine.options({}) == {}
    for bad in (0, 65536, "8998", True, None, 8998.0):
        with pytest.raises(OptionError, match="port number"):
            SglangEngine.options({"bootstrap_port": bad})
    with pytest.raises(OptionError, match="unknown key"):
        SglangEngine.options({"bootstrap_prt": 1})


async def test_nothing_stands_open(world):
    watcher = Watcher()
    world.engine.attach(world.p0, watcher)
    assert watcher.told == ["linked"]
    await world.engine.probe(world.p0)
    assert world.client.open_connections == 1
    await world.engine.detach(world.p0)
    await until(lambda: not world.client.open_connections)
