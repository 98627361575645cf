"""Traces at the front door: the context that comes in and goes on, and what is traced."""

import re

import pytest
from door_world import World

from coordinator.core.errors import NoInstance
from coordinator.observability.trace_context import parent_of
from coordinator.observability.tracing import Tracer

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01"


class Taker:
    def __init__(self):
        self.taken = []

    def put(self, trace, record):
        self.taken.append((trace, record))

    async def aclose(self):
        pass


@pytest.fixture
def taker():
    return Taker()


@pytest.fixture
def traced(taker):
    world = World()
    world.door.tracer = Tracer(1.0, taker)
    return world


def passed(world):
    """Trace headers that the engine gets."""
    return [header for header in world.dispatcher.requests[-1].headers if header[0].startswith(b"trace")]


async def test_without_tracing_a_client_s_context_travels_on_as_it_came():
    world = World()
    await world.ask(CHAT, BODY, headers=["traceparent: rubbish", "tracestate: a=1"])
    assert passed(world) == [(b"traceparent", b"rubbish"), (b"tracestate", b"a=1")]
    assert world.lines.records[0].trace is None


async def test_engines_get_our_span_in_the_client_s_trace(traced, taker):
    await traced.ask(CHAT, BODY, headers=[PARENT, "tracestate: a=1"])
    ((trace, record),) = taker.taken
    assert (trace.id, trace.parent_id) == (TRACE, int(SPAN, 16))
    assert parent_of(passed(traced)) == (int(TRACE, 16), trace.span_id, True, b"a=1")
    assert record is traced.lines.records[0]
    assert record.trace is trace


@pytest.mark.parametrize("headers", [(), ("traceparent: rubbish", "tracestate: a=1"), (PARENT, PARENT)])
async def test_without_a_good_one_a_trace_begins(traced, taker, headers):
    await traced.ask(CHAT, BODY, headers=headers)
    ((trace, _),) = taker.taken
    assert trace.parent_id == 0
    assert trace.id != TRACE
    assert passed(traced) == [(b"traceparent", f"00-{trace.id}-{trace.span_id:016x}-01".encode())]


async def test_what_is_not_sampled_is_not_recorded_and_engines_are_told(traced, taker):
    await traced.ask(CHAT, BODY, headers=[PARENT[:-1] + "0"])
    assert taker.taken == []
    assert passed(traced)[0][1].endswith(b"-00")
    assert traced.lines.records[0].trace.id == TRACE


async def test_failures_are_traced_too(traced, taker):
    traced.dispatcher.error = NoInstance("nobody")
    await traced.ask(CHAT, BODY)
    await traced.ask(CHAT, b"{")
    assert [record.status for _, record in taker.taken] == [503, 400]


async def test_answers_of_our_own_are_not(traced, taker):
    await traced.ask("/v1/models")
    await traced.ask("/nowhere")
    assert taker.taken == []


async def test_every_request_is_a_trace_of_its_own(traced, taker):
    for _ in range(3):
        await traced.ask(CHAT, BODY)
    assert len({trace.id for trace, _ in taker.taken}) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", trace.id) for trace, _ in taker.taken)
