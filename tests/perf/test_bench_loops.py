"""What the benchmarks time is what production does: the loops reach the hot paths."""

import asyncio
import contextlib

import pytest

from bench import loops, whole
from bench.loops import EVENT, LOOPS, STREAMS, build
from coordinator.core.request import Ask
from coordinator.wire.mindie import Kind


@pytest.fixture
def built():
    """Builds loops."""
    with contextlib.closing(asyncio.new_event_loop()) as event_loop:
        yield lambda name: build(name, event_loop)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_can_run_again_and_again(name, built):
    loop = built(name)
    assert loop.operations > 0
    for _ in range(3):
        loop.run()


def test_the_parser_finds_every_message(built):
    frames = built("mindie_parser").run()
    assert len(frames) == STREAMS
    assert {(kind, body) for _, kind, body in frames} == {(Kind.DATA, EVENT)}
    assert len({request_id for request_id, _, _ in frames}) == STREAMS


@pytest.mark.parametrize("name", ["mindie_relay", "http_relay"])
def test_a_token_is_one_write_of_one_chunk(name, monkeypatch, built):
    written = []
    monkeypatch.setattr(loops._Silent, "write", lambda self, data: written.append(data))
    loop = built(name)
    written.clear()
    loop.run()
    assert written == [b"%x\r\n%b\r\n" % (len(EVENT), EVENT)] * STREAMS


@pytest.mark.parametrize("name", [name for name in LOOPS if name.startswith("parse_")])
def test_bodies_are_read(name, built):
    ask = built(name).run()
    assert isinstance(ask, Ask)
    assert ask.prompt_bytes > len(loops.PROMPT)


@pytest.mark.parametrize(("name", "calls"), [("whole_vllm", 2), ("whole_sglang", 2)])
def test_a_whole_request_is_one_write_to_each_side(name, calls, built, monkeypatch):
    written = []
    monkeypatch.setattr(whole.Site, "_wrote", lambda self, data: written.append(bytes(data)), raising=True)
    loop = built(name)
    loop.run()
    to_clients = [data for data in written if data.startswith(b"HTTP/1.1 200")]
    to_engines = [data for data in written if data.startswith(b"POST /v1/chat/completions")]
    assert len(to_clients) == loop.operations
    assert len(to_engines) == calls * loop.operations
    assert all(b"one two three four" in data for data in to_clients)
