"""From a client's HTTP request to a request for the dispatcher, and from any error to its answer."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
from door_world import SETTINGS, World
from engine_world import observed, turns

from coordinator.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineRefused,
    NoInstance,
    Outcome,
    Side,
    SlowClient,
    TooManyRequests,
)

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":5}'


@pytest.fixture
def world():
    return World()


class TestIds:
    async def test_the_clients_is_echoed_and_logged(self, world):
        answer = await world.ask(CHAT, BODY, headers=["X-Request-Id: client-7"])
        assert answer.headers["x-request-id"] == "client-7"
        assert world.dispatcher.requests[0].id == world.lines.records[0].id == "client-7"

    @pytest.mark.parametrize(
        "headers",
        [[], ["X-Request-Id: "], ["X-Request-Id: a b"], ['X-Request-Id: a"b'], [f"X-Request-Id: {'x' * 129}"],
         ["X-Request-Id: \xe9"], ["X-Request-Id: a", "X-Request-Id: b"], ["X-Request-Id: a\tb"]],
    )  # fmt: skip
    async def test_else_one_is_made(self, world, headers):
        shown = [(await world.ask(CHAT, BODY, headers=headers)).headers["x-request-id"] for _ in range(2)]
        assert len(set(shown)) == 2
        assert all(ident.isalnum() and 8 <= len(ident) <= 128 for ident in shown)
        assert [request.id for request in world.dispatcher.requests] == shown

    @pytest.mark.parametrize(
        ("target", "body", "status"),
        [
            (CHAT, b"[]", 400),
            ("/nope", b"{}", 404),
            (CHAT, b'{"model":"nope","prompt":"x"}', 404),
            ("/v1/models", b"", 200),
        ],
    )
    async def test_on_every_answer(self, world, target, body, status):
        answer = await world.ask(target, body, headers=["X-Request-Id: client-7"])
        assert (answer.status, answer.headers["x-request-id"]) == (status, "client-7")

    async def test_the_same_id_many_times(self, world):
        """It is the client's business; nothing in here is keyed by it."""
        world.dispatcher.wait = asyncio.Event()
        started = [world.start(CHAT, BODY, headers=["X-Request-Id: same"]) for _ in range(5)]
        await turns()
        world.dispatcher.wait.set()
        await asyncio.gather(*(task for _, task in started))
        assert [client.headers["x-request-id"] for client, _ in started] == ["same"] * 5
        assert len(world.lines.records) == 5

    async def test_it_does_not_travel_to_engines(self, world):
        await world.ask(CHAT, BODY, headers=["X-Request-Id: client-7"])
        assert world.dispatcher.requests[0].headers == ()


class TestRequest:
    async def test_what_the_dispatcher_gets(self, world):
        await world.ask(CHAT + "?a=1", BODY, arrived_s=50.0)
        request = world.dispatcher.requests[0]
        assert (request.api, request.path, request.query, request.target) == ("openai", CHAT, "a=1", CHAT + "?a=1")
        assert request.body == BODY
        assert (request.ask.stream, request.ask.model, request.ask.max_tokens) == (False, "m", 5)
        assert request.arrived_s == 50.0
        assert request.wire_id == ""

    async def test_deadlines_count_from_arrival(self, world):
        await world.ask(CHAT, BODY, arrived_s=50.0)
        deadlines = world.dispatcher.requests[0].deadlines
        assert (deadlines.scheduled_s, deadlines.first_token_s) == (110.0, 650.0)
        assert (deadlines.finished_s, deadlines.inter_token_s) == (math.inf, 120.0)

    async def test_headers_that_steer_engines_are_taken_out(self, world):
        hostile = [
            "D-Target: 203.0.113.9:80", "req-id: 1", "REQ-ID: 2", "req-type: decode", "is-recompute: true",
            "x-prefiller-host-port: h:1", "X-Data-Parallel-Host-Port: h:1", "X-PD-Prefill: p9", "x-kv-y: 1",
            "Connection: close, X-Foo", "X-Foo: 1", "Keep-Alive: 5", "TE: trailers",
            "Proxy-Authorization: Basic x", "Accept-Encoding: gzip",
        ]  # fmt: skip
        kept = ["traceparent: 00-1", "Authorization: Bearer t", "Accept: text/event-stream", "b3: 1"]
        await world.ask(CHAT, BODY, headers=hostile + kept)
        assert world.dispatcher.requests[0].headers == (
            (b"traceparent", b"00-1"), (b"authorization", b"Bearer t"), (b"accept", b"text/event-stream"),
            (b"b3", b"1"),
        )  # fmt: skip


class TestModels:
    async def test_an_alias_is_replaced_for_the_engine(self, world):
        body = b'{"model":"dummy","prompt":"x","seed":9007199254740993}'
        await world.ask("/v1/completions", body)
        request = world.dispatcher.requests[0]
        assert request.ask.model == "m"
        assert json.loads(request.body) == {**json.loads(body), "model": "m"}
        assert b"9007199254740993" in request.body
        assert world.lines.records[0].model == "dummy"

    async def test_in_a_path_too(self, world):
        await world.ask("/v2/models/dummy/versions/1/generate?x=1", b'{"text_input":"x"}')
        request = world.dispatcher.requests[0]
        assert (request.target, request.ask.model) == ("/v2/models/m/generate?x=1", "m")

    @pytest.mark.parametrize(
        ("target", "body"),
        [(CHAT, b'{"model":"nope","messages":[1]}'), ("/v2/models/nope/generate", b'{"text_input":"x"}'),
         ("/generate", b'{"model":"nope","prompt":"x"}')],
    )  # fmt: skip
    async def test_an_unknown_one_is_the_clients_mistake(self, world, target, body):
        answer = await world.ask(target, body)
        assert answer.status == 404
        assert "retry-after" not in answer.headers
        assert world.dispatcher.requests == []
        if target == CHAT:
            assert json.loads(answer.body)["error"]["code"] == "model_not_found"

    async def test_any_name_passes_where_none_is_configured(self):
        world = World(model=None, aliases=(), served=())
        body = b'{"model":"whatever","prompt":"x"}'
        assert (await world.ask("/v1/completions", body)).status == 200
        assert world.dispatcher.requests[0].body == body

    async def test_no_name_is_no_mistake(self, world):
        assert (await world.ask("/v1/completions", b'{"prompt":"x"}')).status == 200
        assert world.dispatcher.requests[0].ask.model is None


class TestTokenizer:
    async def test_it_is_passed_on_and_its_answer_back(self, world):
        answer = await world.ask("/v1/tokenizer", b'{"inputs":"x"}', headers=["X-Request-Id: t1"])
        assert (answer.status, answer.body) == (200, b'{"token_number":1}')
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        assert answer.headers["x-request-id"] == "t1"
        assert world.dispatcher.calls[0].path == "/v1/tokenizer"
        assert world.dispatcher.requests == []

    async def test_its_errors_have_the_familys_shape(self, world):
        world.dispatcher.error = NoInstance("no instance is ready")
        answer = await world.ask("/v1/tokenizer", b'{"inputs":"x"}')
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.body) == {"error": "no instance is ready", "error_type": "overloaded"}

    async def test_a_body_without_inputs(self, world):
        assert (await world.ask("/v1/tokenizer", b"{}")).status == 400
        assert world.dispatcher.calls == []


class TestAccount:
    @pytest.mark.parametrize(
        ("error", "outcome"),
        [
            (None, Outcome.OK),
            (EngineRefused(422, "n must be 1"), Outcome.CLIENT_ERROR),
            (TooManyRequests("x"), Outcome.REJECTED),
            (NoInstance("x"), Outcome.UNAVAILABLE),
            (EngineFailed(Side.DECODE, "d0", "reset"), Outcome.ENGINE_ERROR),
            (DeadlineExceeded("first_token"), Outcome.DEADLINE),
            (SlowClient("x"), Outcome.SLOW_CLIENT),
            (ZeroDivisionError("secret 10.0.0.1"), Outcome.INTERNAL_ERROR),
        ],
    )
    async def test_each_request_once(self, world, error, outcome, caplog):
        world.dispatcher.error = error
        await world.ask(CHAT, BODY)
        assert world.counted() == {("openai", outcome): 1}
        assert [record.outcome for record in world.lines.records] == [outcome]
        assert observed(world.metrics.for_api("openai").duration)[0] == 1
        assert world.lines.records[0].prompt_bytes > 0

    async def test_what_failed_is_in_the_line(self, world):
        world.dispatcher.error = EngineFailed(Side.DECODE, "d0", "reset", detail="10.0.0.1:99 went away")
        answer = await world.ask(CHAT, BODY)
        line = world.lines.records[0]
        assert (line.error_side, line.error_instance, line.error_reason, line.status) == ("decode", "d0", "reset", 502)
        assert line.error_detail == "10.0.0.1:99 went away"
        assert b"10.0.0.1" not in answer.body

    async def test_traffic_is_noted_for_the_controller(self, world):
        await world.ask(CHAT, BODY)
        assert world.traffic == [(len(b'[{"role":"user","content":"x"}]'), 1)]

    async def test_a_client_that_leaves(self, world):
        world.dispatcher.wait = asyncio.Event()
        client, task = world.start(CHAT, BODY)
        await turns()
        client.exchange.left()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert world.counted() == {("openai", "client_gone"): 1}
        assert client.writes == []


class TestFaults:
    """An exception that nobody expected."""

    async def test_it_is_a_500_and_one_entry_in_the_log(self, world, caplog):
        world.dispatcher.error = ZeroDivisionError("secret 10.0.0.1")
        answer = await world.ask(CHAT, BODY, headers=["X-Request-Id: client-7"])
        assert answer.status == 500
        assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
        for word in (b"secret", b"10.0.0.1", b"Zero", b"Traceback"):
            assert word not in answer.body
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "client-7" in caplog.records[0].getMessage()
        assert caplog.records[0].exc_info[0] is ZeroDivisionError

    async def test_it_hurts_no_other_request(self, world, caplog):
        world.dispatcher.wait = asyncio.Event()
        good, task = world.start(CHAT, BODY)
        await turns()
        world.dispatcher.wait, gate = None, world.dispatcher.wait
        world.dispatcher.error = ZeroDivisionError()
        assert (await world.ask(CHAT, BODY)).status == 500
        world.dispatcher.error = None
        gate.set()
        await task
        assert good.status == 200
        assert (await world.ask(CHAT, BODY)).status == 200

    async def test_in_the_middle_of_a_stream(self, world, caplog):
        async def run(request, relay, record):
            relay.piece(b"data: 1\n\n", request.arrived_s)
            raise ZeroDivisionError

        world.dispatcher.run = run
        answer = await world.ask(CHAT, BODY)
        assert answer.ends == ["torn"]
        assert not answer.whole
        assert b"internal_error" in answer.body
        assert len(caplog.records) == 1


async def test_settings_of_the_stream(world):
    world = World(settings=replace(SETTINGS, tell_route=True))

    async def run(request, relay, record):
        record.prefill, record.decode, record.attempts = "p0", "d0", 1
        relay.whole(b"{}", request.arrived_s)

    world.dispatcher.run = run
    assert (await world.ask(CHAT, BODY)).headers["x-pd-decode"] == "d0"
