"""From an engine's socket to the client's: what one read brings is one write, and each piece counts for itself."""

import asyncio

import pytest
from engine_world import Stages, instance, observed
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import Case

from coordinator.core.errors import EngineFailed, SlowClient
from coordinator.core.instance import Address
from coordinator.engines.http_leg import StreamLeg
from coordinator.transport.connection import Connection
from coordinator.transport.request import Call
from coordinator.transport.sink import ReplySink
from coordinator.transport.stream import Stream, UntilHead

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ADDRESS = Address("127.0.0.1", 1)


def event(text):
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text


def chunk(*pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


EVENTS = [event(b"%d" % number) for number in range(6)]


class Home:
    def put(self, connection, now_s):
        return True

    def left(self, connection):
        pass

    def gone(self, connection):
        pass


class Socket:
    def __init__(self):
        self.closing = False

    def write(self, data):
        pass

    def abort(self):
        self.closing = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return 0


class Between(ReplySink):
    """In front of a leg, which may be compiled: what a test does before and after its calls."""

    def __init__(self, leg):
        self.leg = leg
        self.before_data = self.after_data = lambda data: None
        self.at_end = lambda: None

    def head(self, status, headers):
        self.leg.head(status, headers)

    def data(self, data, now_s):
        self.before_data(data)
        self.leg.data(data, now_s)
        self.after_data(data)

    def end(self, now_s):
        self.at_end()
        self.leg.end(now_s)

    def lost(self, error):
        self.leg.lost(error)


def fail():
    raise ZeroDivisionError


class Chain:
    """A stream whose engine is the test; `now_s` is the connection's clock."""

    def __init__(self, **case):
        self.case = Case(**case)
        self.now_s = 101.0
        self.connection = Connection(ADDRESS, Home(), lambda: self.now_s)
        self.connection.connection_made(Socket())
        self.stream = Stream()
        self.leg = StreamLeg(instance("d0"), Stages(), self.case.relay)
        self.sink = Between(self.leg)
        self.stream.run(self.connection, Call(b"x", b"", bodiless=False), UntilHead(self.stream, self.sink, ADDRESS))
        self.leg.started_by(self.stream)

    def read(self, data):
        """One read from the engine; returns how many writes it made."""
        before = len(self.case.client.writes)
        self.connection.data_received(data)
        return len(self.case.client.writes) - before

    @property
    def account(self):
        """All that is counted by the piece."""
        record, relay = self.case.record, self.case.relay
        return relay.events, relay.pieces, relay.bytes_out, record.ttft_s, observed(self.case.cells.itl)


async def test_one_event_in_a_read_is_one_write():
    chain = Chain()
    assert [chain.read(data) for data in (HEAD, *map(chunk, EVENTS), chunk(DONE), END)] == [0, *[1] * 8]
    assert chain.case.client.whole


async def test_several_in_a_read_are_one_write():
    chain = Chain()
    assert chain.read(HEAD + chunk(*EVENTS[:3])) == 1
    assert chain.read(chunk(*EVENTS[3:])) == 1
    assert chain.read(chunk(b"a", b"b")) == 1
    assert chain.read(chunk(event(b"z"), DONE) + END) == 1
    assert chain.case.client.body == b"".join([*EVENTS, b"ab", event(b"z"), DONE])
    assert chain.case.client.whole
    assert chain.leg.done.result() is None


async def test_a_whole_stream_in_a_read_is_one_write():
    chain = Chain()
    assert chain.read(HEAD + chunk(*EVENTS, DONE) + END) == 1
    assert chain.case.client.whole


async def test_each_piece_is_accounted_for_by_itself():
    together, apart = Chain(), Chain()
    for chain in (together, apart):
        chain.read(HEAD + chunk(EVENTS[0]))
        chain.now_s += 0.5
    together.read(chunk(*EVENTS[1:], DONE))
    for piece in (*EVENTS[1:], DONE):
        apart.read(chunk(piece))
    assert together.account == apart.account
    assert together.account[:2] == (6, 7)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_client_sees_the_same_whatever_the_reads(data):
    pieces = data.draw(st.lists(st.sampled_from([*EVENTS, b": ping\n\n"]), min_size=1, max_size=6))
    stream = HEAD + chunk(EVENTS[0], *pieces, DONE) + END
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    client = data.draw(st.sampled_from([{}, {"version": "1.0"}]))

    async def run():
        chain = Chain(**client)
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            assert chain.read(stream[start:end]) <= 2  # two: of the second piece, only a byte or two came
        return chain.case.client

    seen = asyncio.run(run())
    assert seen.body == b"".join([EVENTS[0], *pieces, DONE])
    assert seen.ends == ["answered"]


async def test_a_head_request_gets_the_head_alone():
    chain = Chain(method="HEAD")
    assert chain.read(HEAD + chunk(*EVENTS, DONE) + END) == 1
    assert chain.case.client.writes[0].endswith(b"\r\n\r\n")


class TestSlowClient:
    def slow(self, chain, unsent):
        """The client's socket is full with the next write."""
        wire, exchange = chain.case.client.transport, chain.case.client.exchange
        write = wire.write

        def full(data):
            write(data)
            wire.unsent += unsent
            exchange.congested = True

        wire.write = full

    async def test_its_source_is_paused_by_the_write_that_fills_it(self):
        chain = Chain()
        self.slow(chain, 500)
        chain.read(HEAD + chunk(*EVENTS))
        assert chain.connection._paused
        chain.case.relieve()
        assert not chain.connection._paused
        assert chain.case.cuts == []

    async def test_it_is_cut_off_by_the_write_that_is_too_much(self):
        chain = Chain(limit_bytes=1000)
        self.slow(chain, 1001)
        chain.read(HEAD + chunk(*EVENTS))
        assert [type(error) for error in chain.case.cuts] == [SlowClient]

    async def test_what_is_held_back_counts(self):
        chain = Chain(limit_bytes=1000)
        chain.read(HEAD + chunk(EVENTS[0]))
        chain.case.congest(1000 - len(EVENTS[1]))
        chain.read(chunk(*EVENTS[1:3]))
        assert chain.case.cuts

    async def test_one_that_is_cut_off_in_mid_read_gets_nothing_of_it(self):
        chain = Chain(limit_bytes=10)
        chain.read(HEAD + chunk(EVENTS[0]))
        chain.case.relay.on_cut = chain.case.relay.fail
        chain.case.congest(11)
        assert chain.read(chunk(*EVENTS[1:])) == 0
        assert chain.case.client.ends == ["reset"]

    async def test_an_answer_that_is_complete_pauses_nobody(self):
        chain = Chain(limit_bytes=10)
        self.slow(chain, 5000)
        chain.read(HEAD + chunk(*EVENTS, DONE) + END)
        assert chain.case.cuts == []
        assert chain.case.client.exchange.on_writable is None


class TestFailures:
    async def test_bytes_that_are_not_http_behind_good_events(self):
        chain = Chain()
        assert chain.read(HEAD + chunk(*EVENTS[:2]) + b"zz\r\n") == 1
        assert chain.case.client.body == EVENTS[0] + EVENTS[1]
        assert isinstance(chain.leg.done.exception(), EngineFailed)

    async def test_an_error_event_behind_good_ones(self):
        chain = Chain()
        error = b'data: {"error":{"message":"no","code":500}}\n\n'
        chain.read(HEAD + chunk(*EVENTS[:2], error))
        failure = chain.leg.done.exception()
        chain.case.relay.fail(failure)
        assert chain.case.client.body.startswith(EVENTS[0] + EVENTS[1] + b"data: ")
        assert error not in chain.case.client.body
        assert chain.case.client.ends == ["torn"]

    async def test_a_fault_of_the_sink(self):
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        chain = Chain()
        chain.sink.before_data = lambda data: fail() if data == EVENTS[2] else None
        assert chain.read(HEAD + chunk(*EVENTS)) == 1
        assert chain.case.client.body == EVENTS[0] + EVENTS[1]
        assert isinstance(chain.leg.done.exception(), EngineFailed)
        assert isinstance(told[0], ZeroDivisionError)

    async def test_a_fault_at_the_end_of_the_reply(self):
        chain = Chain()
        chain.sink.at_end = fail
        with pytest.raises(ZeroDivisionError):
            chain.read(HEAD + chunk(*EVENTS) + END)
        assert chain.case.client.body == b"".join(EVENTS)

    async def test_a_stream_that_is_closed_by_one_of_its_pieces(self):
        chain = Chain()
        chain.sink.after_data = lambda data: chain.stream.close() if data == EVENTS[1] else None
        assert chain.read(HEAD + chunk(*EVENTS)) == 1
        assert chain.case.client.body == EVENTS[0] + EVENTS[1]

    async def test_a_client_that_leaves_in_mid_read(self):
        chain = Chain()
        chain.sink.after_data = lambda data: chain.case.client.exchange.left() if data == EVENTS[1] else None
        assert chain.read(HEAD + chunk(*EVENTS)) == 0


async def test_a_stream_holds_nobody_once_it_is_closed():
    chain = Chain()
    chain.stream.close()
    assert chain.stream._gatherer is None
