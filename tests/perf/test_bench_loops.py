"""What the benchmarks time is what production does: the loops reach the hot paths."""

import pytest

from bench import loops
from bench.loops import EVENT, LOOPS, STREAMS
from coordinator.core.request import Ask
from coordinator.wire.mindie import Kind


@pytest.mark.parametrize("name", LOOPS)
async def test_every_loop_can_run_again_and_again(name):
    loop = LOOPS[name]()
    assert loop.operations > 0
    for _ in range(3):
        loop.run()


async def test_the_parser_finds_every_message():
    frames = LOOPS["mindie_parser"]().run()
    assert len(frames) == STREAMS
    assert {(kind, body) for _, kind, body in frames} == {(Kind.DATA, EVENT)}
    assert len({request_id for request_id, _, _ in frames}) == STREAMS


@pytest.mark.parametrize("name", ["mindie_relay", "http_relay"])
async def test_a_token_is_one_write_of_one_chunk(name, monkeypatch):
    written = []
    monkeypatch.setattr(loops._Silent, "write", lambda self, data: written.append(data))
    loop = LOOPS[name]()
    written.clear()
    loop.run()
    assert written == [b"%x\r\n%b\r\n" % (len(EVENT), EVENT)] * STREAMS


@pytest.mark.parametrize("name", [name for name in LOOPS if name.startswith("parse_")])
async def test_bodies_are_read(name):
    ask = LOOPS[name]().run()
    assert isinstance(ask, Ask)
    assert ask.prompt_bytes > len(loops.PROMPT)
