"""From a MindIE result stream to the clients' sockets: what one read brings for a client is one write."""

import asyncio
import contextlib
import logging

import pytest
from engine_world import Stages, instance, observed
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import Case

from coordinator.core.errors import EngineFailed, InternalError
from coordinator.core.ports import COMPLETED
from coordinator.engines.mindie.boxes import Boxes
from coordinator.engines.mindie.envelope import FirstToken
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.wire.mindie import ResultParser

DONE = b"data: [DONE]\n\n"
A, B = b"0000000000000001", b"0000000000000002"
LOG = logging.getLogger("test_relay_gather_mindie")


def event(text):
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text


EVENTS = [event(b"%d" % number) for number in range(6)]


def message(wire_id, body, keyword=b"data"):
    said = b"reqId:%b\0%b:%b\0" % (wire_id, keyword, body)
    return b"%x\r\n%b\r\n" % (len(said), said)


def last(wire_id):
    return message(wire_id, DONE, b"lastData")


class Side:
    """One client and its mailbox."""

    def __init__(self, wire_id, *, prefilled=True, **case):
        self.case = Case(**case)
        self.box = Mailbox(wire_id.decode(), "d0", self.case.relay, Stages(), stream=True)
        if prefilled:
            self.prefilled()

    def prefilled(self):
        self.box.prefilled(FirstToken(EVENTS[0], last=False), 101.0)

    @property
    def body(self):
        return self.case.client.body

    @property
    def account(self):
        record, relay = self.case.record, self.case.relay
        return relay.events, relay.pieces, relay.bytes_out, record.ttft_s, observed(self.case.cells.itl)


class Stream:
    """A result stream whose instance is the test."""

    def __init__(self, **sides):
        self.late = []
        self.boxes = Boxes(instance("d0"), LOG, on_late=lambda: self.late.append(1))
        self.parser = ResultParser(1 << 20)
        self.now_s = 102.0
        self.scope = contextlib.ExitStack()
        self.sides = {A: Side(A, **sides), B: Side(B)}
        for wire_id, side in self.sides.items():
            self.scope.enter_context(self.boxes.registered(wire_id, side.box))

    def read(self, *data):
        """One read; returns how many writes it made for each client."""
        before = [len(side.case.client.writes) for side in self.sides.values()]
        self.left = self.boxes.deliver(self.parser.feed(b"".join(data)), self.now_s)
        return [len(side.case.client.writes) - was for side, was in zip(self.sides.values(), before, strict=True)]


async def test_one_message_for_each():
    stream = Stream()
    assert stream.read(message(A, EVENTS[1]), message(B, EVENTS[2])) == [1, 1]
    assert stream.read(message(B, EVENTS[3])) == [0, 1]


async def test_several_messages_for_one_are_one_write():
    stream = Stream()
    assert stream.read(message(A, EVENTS[1]), message(B, EVENTS[1]), message(A, EVENTS[2]), message(A, EVENTS[3])) == [
        1,
        1,
    ]
    assert stream.sides[A].body == b"".join(EVENTS[:4])
    assert stream.sides[B].body == b"".join(EVENTS[:2])
    assert stream.read(message(A, EVENTS[4]), message(A, EVENTS[5], b"lastData"), last(A)) == [1, 0]
    assert stream.sides[A].case.client.whole
    assert stream.sides[A].body == b"".join(EVENTS) + DONE
    assert stream.sides[A].box.done.result() is COMPLETED


async def test_what_came_before_prefills_reply_goes_with_it():
    stream = Stream(prefilled=False)
    assert stream.read(message(A, EVENTS[1]), message(A, EVENTS[2])) == [0, 0]
    stream.read(message(A, EVENTS[3]))
    stream.sides[A].prefilled()
    assert len(stream.sides[A].case.client.writes) == 1
    assert stream.sides[A].body == b"".join(EVENTS[:4])
    assert stream.sides[A].case.relay.events == 4


async def test_each_message_is_accounted_for_by_itself():
    together, apart = Stream(), Stream()
    together.read(*(message(A, body) for body in EVENTS[1:]))
    for body in EVENTS[1:]:
        apart.read(message(A, body))
    assert together.sides[A].account == apart.sides[A].account
    assert together.sides[A].account[:2] == (6, 6)


async def test_messages_of_nobody_are_returned_however_many():
    stream = Stream()
    assert stream.read(message(b"9", EVENTS[1]), message(A, EVENTS[1]), message(b"9", EVENTS[2])) == [1, 0]
    assert [(rid, body) for rid, _, body in stream.left] == [(b"9", EVENTS[1]), (b"9", EVENTS[2])]


async def test_an_error_behind_good_events():
    stream = Stream()
    assert stream.read(message(A, EVENTS[1]), message(A, b"no", b"error"), message(B, EVENTS[1])) == [1, 1]
    assert stream.sides[A].body == EVENTS[0] + EVENTS[1]
    failure = stream.sides[A].box.done.exception()
    assert isinstance(failure, EngineFailed)
    stream.sides[A].case.relay.fail(failure)
    assert stream.sides[A].case.client.ends == ["torn"]


async def test_a_client_that_leaves_in_mid_read():
    stream = Stream()
    exchange = stream.sides[A].case.client.exchange
    exchange.left()
    assert stream.read(message(A, EVENTS[1]), message(A, EVENTS[2]), message(B, EVENTS[1])) == [0, 1]


async def test_a_slow_client_is_seen_by_what_is_written():
    stream = Stream(limit_bytes=1000)
    stream.sides[A].case.congest(1000 - len(EVENTS[1]))
    stream.read(message(A, EVENTS[1]), message(A, EVENTS[2]))
    assert stream.sides[A].case.cuts


@pytest.mark.uncompiled  # puts a fault in the place of the relay's method
async def test_a_fault_in_a_write_ends_that_request_alone(caplog):
    stream = Stream()

    class Faulty:
        started = True

        def hold(self):
            pass

        def piece(self, data, now_s, *, token=True):
            pass

        def flush(self):
            raise ZeroDivisionError

    stream.sides[A].box._out = Faulty()
    assert stream.read(message(A, EVENTS[1]), message(A, EVENTS[2]), message(B, EVENTS[1]), message(B, EVENTS[2])) == [
        0,
        1,
    ]
    assert isinstance(stream.sides[A].box.done.exception(), InternalError)
    assert stream.sides[B].body == b"".join(EVENTS[:3])
    assert "failed inside the coordinator" in caplog.text


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_clients_see_the_same_whatever_the_reads(data):
    said = data.draw(st.lists(st.tuples(st.sampled_from([A, B, b"9"]), st.sampled_from(EVENTS)), max_size=8))
    sent = b"".join(message(*one) for one in said) + last(B) + last(A)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))

    async def run():
        stream = Stream()
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            assert max(stream.read(sent[start:end])) <= 1
        return stream.sides

    for wire_id, side in asyncio.run(run()).items():
        assert side.body == EVENTS[0] + b"".join(body for rid, body in said if rid == wire_id) + DONE
        assert side.case.client.whole
