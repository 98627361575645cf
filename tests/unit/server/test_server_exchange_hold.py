"""What is held back goes out in one write, whole and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import FakeTransport, get

from coordinator.server.exchange import Exchange
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader


class Link:
    """A connection that writes down what was sent when it was told of the end."""

    peer = ""
    draining = False
    date = bytes

    def __init__(self):
        self.transport = FakeTransport()
        self.ends = []

    def answered(self, *, reusable):
        self.ends.append(("answered", self.transport.sent))

    def torn(self):
        self.ends.append(("torn", self.transport.sent))

    def reset(self):
        self.ends.append(("reset", self.transport.sent))


def exchange_for(data):
    reader = RequestReader(ServerLimits())
    reader.feed(data)
    link = Link()
    return Exchange(link, reader, reader.body, reader.refusal), link


REQUESTS = {"1.1": get(), "1.0": get(version="1.0"), "HEAD": get(method="HEAD")}
CALLS = st.lists(st.one_of(st.sampled_from(["hold", "flush"]), st.binary(max_size=20)), max_size=12)
LAST = st.sampled_from(["", "end", "break_off", "left"])


def play(request, calls, last, *, holds):
    exchange, link = exchange_for(request)
    started = False
    for call in calls:
        if isinstance(call, str):
            if holds:
                getattr(exchange, call)()
        elif started:
            exchange.write(call)
        else:
            exchange.start(200, (), call)
            started = True
    if last == "left":
        exchange.flush()
    if last == "left" or (last and started):
        getattr(exchange, last)()
    exchange.flush()
    return link


@given(st.sampled_from(sorted(REQUESTS)), CALLS, LAST)
def test_the_client_gets_the_same_bytes(request, calls, last):
    held, plain = (play(REQUESTS[request], calls, last, holds=holds) for holds in (True, False))
    assert held.transport.sent == plain.transport.sent
    assert held.ends == plain.ends
    assert len(held.transport.writes) <= len(plain.transport.writes)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_head_pieces_and_end_are_one_write(version):
    exchange, link = exchange_for(get(version=version))
    exchange.hold()
    exchange.start(200, (), b"a")
    exchange.write(b"b")
    assert link.transport.writes == []
    exchange.end(b"c")
    assert len(link.transport.writes) == 1
    assert link.ends == [("answered", link.transport.sent)]
    exchange.flush()
    assert len(link.transport.writes) == 1


def test_in_vain():
    exchange, link = exchange_for(get())
    exchange.flush()
    exchange.hold()
    exchange.hold()
    exchange.flush()
    assert link.transport.writes == []
    exchange.start(200, (), b"a")
    assert len(link.transport.writes) == 1


def test_what_is_broken_off_is_sent_before_the_close():
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    exchange.hold()
    exchange.write(b"piece")
    exchange.break_off(b"error")
    assert link.ends == [("torn", link.transport.sent)]
    assert link.transport.writes[1:] == [b"5\r\npiece\r\n5\r\nerror\r\n"]


@pytest.mark.parametrize("how", ["cut", "left"])
def test_who_is_cut_off_or_gone_gets_nothing_of_it(how):
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    sent = link.transport.sent
    exchange.hold()
    exchange.write(b"piece")
    getattr(exchange, how)()
    exchange.write(b"late")
    exchange.flush()
    exchange.hold()
    exchange.write(b"late")
    exchange.flush()
    assert link.transport.sent == sent
    assert exchange.buffered_bytes() == 0


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_complete_answer_does_not_wait(size):
    exchange, link = exchange_for(get())
    exchange.hold()
    exchange.respond(200, (), b"x" * size)
    assert link.ends == [("answered", link.transport.sent)]
    assert link.transport.sent.endswith(b"\r\n\r\n" + b"x" * size)


def test_what_is_kept_back_counts_as_buffered():
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    link.transport.unsent = 100
    exchange.hold()
    exchange.write(b"0123456789")
    assert exchange.buffered_bytes() == 100 + len(b"a\r\n0123456789\r\n")
    exchange.flush()
    assert exchange.buffered_bytes() == 100
