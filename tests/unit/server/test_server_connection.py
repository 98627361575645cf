import asyncio
import gzip
import logging
import math
import socket
import zlib

import pytest
from server_fakes import Wire, get, post, settle

from coordinator.core.errors import BadRequest, BodyTooLarge, InternalError, UnknownExpectation

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
KIB = 1024


async def ok(exchange):
    exchange.respond(200, (), b"ok")


@pytest.fixture
async def wire():
    made = []

    def make(handler=None, **limits):
        made.append(Wire(handler, **limits))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.fixture
def errors():
    """What the server logs."""
    log, records = logging.getLogger("test.server"), []
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


# --- requests in order


@pytest.mark.parametrize("step", [None, 1])
async def test_requests_one_after_the_other(wire, step):
    w = wire(ok)
    for n in range(3):
        await w.feed(post(b"%d" % n), step)
    assert w.sent == OK * 3
    assert [x.body for x in w.exchanges] == [b"0", b"1", b"2"]
    assert not w.transport.is_closing()


@pytest.mark.parametrize("step", [None, 1, 50])
async def test_pipelined_requests_are_answered_in_order_and_one_at_a_time(wire, step):
    w = wire()
    await w.feed(b"".join(post(b"%d" % n) for n in range(3)) + b"\r\n", step)
    for n in range(3):
        assert [x.body for x in w.exchanges] == [b"%d" % i for i in range(n + 1)]
        w.exchange.respond(200, (), b"%d" % n)
        await settle()
    assert [line[-1:] for line in w.transport.writes] == [b"0", b"1", b"2"]
    assert not w.transport.is_closing()


async def test_the_next_request_starts_while_the_last_handler_tidies_up(wire):
    async def tidy(exchange):
        await ok(exchange)
        await asyncio.Event().wait()

    w = wire(tidy)
    await w.feed(get() * 2)
    assert w.sent == OK * 2
    assert len(w.shared.tasks) == 2
    w.connection.connection_lost(None)
    await settle()
    assert not w.cancelled


async def test_requests_ahead_are_bounded(wire):
    w = wire()
    await w.feed(get())
    await w.feed(post(b"x" * 60 * KIB))
    assert not w.transport.paused
    await w.feed(b"y" * 10 * KIB)
    assert w.transport.paused
    w.exchange.respond(200, (), b"")
    assert not w.transport.paused
    await settle()
    assert len(w.exchange.body) == 60 * KIB


async def test_a_client_that_takes_no_answer_gets_no_further_one(wire):
    async def large(exchange):
        w.connection.pause_writing()
        exchange.respond(200, (), b"ok")

    w = wire(large)
    await w.feed(get() * 3)
    await w.feed(get())
    assert len(w.exchanges) == 1
    w.connection.resume_writing()
    await settle()
    assert len(w.exchanges) == 2


async def test_empty_lines_between_requests_are_nothing(wire):
    w = wire(ok)
    await w.feed(b"\r\n\r\n")
    await w.feed(get() + b"\r\n" + get() + b"\r\n\r\n")
    assert w.sent == OK * 2


@pytest.mark.parametrize("answer", ["respond", "stream"])
async def test_connection_close_is_obeyed(wire, answer):
    w = wire()
    await w.feed(get("Connection: close"))
    if answer == "respond":
        w.exchange.respond(200, (), b"")
    else:
        w.exchange.start(200, ())
        w.exchange.end()
    assert w.transport.closed
    assert not w.transport.aborted


async def test_a_1_0_stream_ends_with_the_connection(wire):
    w = wire()
    await w.feed(get(version="1.0"))
    w.exchange.start(200, (), b"a")
    w.exchange.end(b"b")
    assert w.sent.endswith(b"\r\n\r\nab")
    assert w.transport.closed


async def test_an_upgrade_offer_is_ignored(wire):
    w = wire(ok)
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    await w.feed(post(b"one", *offer) + get(*offer) + post(b"two", *offer))
    assert [x.body for x in w.exchanges] == [b"one", b"", b"two"]
    assert w.sent == OK * 3


async def test_what_the_connection_adds(wire):
    w = wire(ok)
    data = post(b"hello")
    await w.feed(data[:-1])
    w.clock.now_s += 5
    await w.feed(data[-1:])
    assert w.exchange.peer == "10.1.2.3"
    assert w.exchange.arrived_s == 1000.0
    assert ("marks", 64 * KIB, 16 * KIB) in w.transport.options


# --- Expect


async def test_continue_is_said_once_and_at_once(wire):
    w = wire(ok)
    data = post(b"hello", "Expect: 100-continue")
    await w.feed(data[:-5], 1)
    assert w.sent == CONTINUE
    await w.feed(data[-5:], 1)
    assert w.sent == CONTINUE + OK


async def test_continue_is_not_said_when_the_body_is_there_or_the_client_too_old(wire):
    w = wire(ok)
    await w.feed(post(b"hello", "Expect: 100-continue"))
    assert w.sent == OK
    w = wire(ok)
    await w.feed(post(b"hello", "Expect: 100-continue", version="1.0")[:-5])
    assert w.sent == b""


@pytest.mark.parametrize(
    ("headers", "length", "refusal"),
    [(["Expect: 100-continue"], 500, BodyTooLarge), (["Expect: bogus"], 5, UnknownExpectation)],
)
async def test_what_is_refused_gets_no_continue(wire, headers, length, refusal):
    w = wire(max_body_bytes=100)
    await w.feed(post(b"x" * length, *headers).removesuffix(b"x" * length))
    assert w.sent == b""
    assert isinstance(w.exchange.refusal, refusal)


# --- refusals


async def test_after_a_refusal_the_rest_is_dropped_and_the_answer_survives(wire):
    w = wire(max_body_bytes=100)
    await w.feed(post(b"x" * 500))
    assert isinstance(w.exchange.refusal, BodyTooLarge)
    assert (w.exchange.path, w.exchange.body) == ("/v1/x", b"")
    w.exchange.respond(413, (), b"")
    assert b"Connection: close" in w.sent
    assert w.transport.eof
    assert not w.transport.is_closing()
    await w.feed(b"x" * 100 + get())
    assert len(w.exchanges) == 1
    w.connection.eof_received()
    assert w.connection.deadline_s < math.inf


async def test_what_is_dropped_is_bounded(wire):
    w = wire(max_body_bytes=100)
    await w.feed(post(b"x" * 500))
    await w.feed(b"x" * 100)
    assert not w.transport.paused
    await w.feed(b"x")
    await w.feed(b"x")
    assert w.transport.paused
    w.exchange.respond(413, (), b"")
    assert w.transport.paused
    w.clock.now_s = w.connection.deadline_s
    w.connection.expire(w.clock.now_s)
    assert w.transport.aborted


async def test_lingering_ends_after_two_seconds(wire):
    w = wire()
    await w.feed(b"garbage\r\n\r\n")
    assert isinstance(w.exchange.refusal, BadRequest)
    w.exchange.respond(400, (), b"")
    assert w.connection.deadline_s == w.clock.now_s + 2
    w.connection.expire(w.connection.deadline_s)
    assert w.transport.aborted


async def test_pipelined_requests_behind_a_last_answer_are_not_turned_into_a_reset(wire):
    w = wire()
    await w.feed(get("Connection: close") + get())
    w.exchange.respond(200, (), b"")
    assert w.transport.eof
    assert not w.transport.is_closing()
    assert len(w.exchanges) == 1


# --- compressed bodies


async def test_a_compressed_body_arrives_expanded(wire):
    w = wire(ok)
    await w.feed(post(gzip.compress(b"hello"), "Content-Encoding: gzip") + get())
    assert [x.body for x in w.exchanges] == [b"hello", b""]
    assert w.sent == OK * 2


async def test_a_broken_compressed_body_is_refused_and_the_connection_lives(wire):
    w = wire()
    await w.feed(post(b"junk", "Content-Encoding: gzip"))
    assert isinstance(w.exchange.refusal, BadRequest)
    w.exchange.respond(400, (), b"")
    assert not w.transport.is_closing()
    assert not w.transport.eof


def incompressible():
    return gzip.compress(bytes(range(256)) * 400, 0)


async def test_a_large_compressed_body_waits_for_its_thread(wire):
    w = wire(ok)
    await w.feed(post(incompressible(), "Content-Encoding: gzip") + get())
    assert not w.exchanges
    w.executor.run()
    await settle()
    assert [len(x.body) for x in w.exchanges] == [256 * 400, 0]


async def test_a_client_may_leave_while_its_body_is_expanded(wire, errors):
    w = wire()
    await w.feed(post(incompressible(), "Content-Encoding: gzip"))
    w.connection.eof_received()
    w.connection.connection_lost(None)
    w.executor.run()
    await settle()
    assert not w.exchanges
    assert w.transport.aborted
    assert not errors


async def test_a_fault_while_expanding_is_an_internal_error(wire):
    w = wire()
    await w.feed(post(incompressible(), "Content-Encoding: gzip"))
    w.executor.jobs[0][0].set_exception(MemoryError())
    await settle()
    assert isinstance(w.exchange.refusal, InternalError)


async def test_a_bomb_is_refused(wire):
    packer = zlib.compressobj(9)
    data = packer.compress(b" " * 5_000_000) + packer.flush()
    w = wire(max_body_bytes=1_000_000)
    await w.feed(post(data, "Content-Encoding: deflate"))
    assert isinstance(w.exchange.refusal, BodyTooLarge)


# --- clients that leave


@pytest.mark.parametrize("how", ["fin", "lost", "rst"])
@pytest.mark.parametrize("started", [False, True])
async def test_leaving_cancels_the_handler(wire, errors, how, started):
    w = wire()
    await w.feed(get())
    if started:
        w.exchange.start(200, (), b"x")
    sent = w.sent
    if how == "fin":
        assert not w.connection.eof_received()
        assert w.transport.aborted
    w.connection.connection_lost(ConnectionResetError() if how == "rst" else None)
    assert w.exchange.gone
    w.exchange.write(b"late")
    await settle()
    assert w.cancelled == w.exchanges
    assert w.sent == sent
    assert not errors
    assert not w.shared.tasks
    assert not w.shared.connections
    assert w.freed == 1


async def test_leaving_before_the_handler_took_its_first_step(wire, errors):
    w = wire(ok)
    w.connection.data_received(get())
    w.connection.eof_received()
    w.connection.connection_lost(None)
    await settle()
    assert w.sent == b""
    assert not w.shared.tasks
    assert not errors


async def test_leaving_behind_a_complete_answer_only_closes(wire):
    w = wire(ok)
    await w.feed(get())
    w.transport.unsent = 10
    assert not w.connection.eof_received()
    assert not w.transport.aborted  # the transport flushes and closes by itself
    assert w.connection.deadline_s < math.inf


@pytest.mark.parametrize("data", [b"GET / HT", post(b"hello")[:-2]])
async def test_leaving_in_the_middle_of_a_request(wire, data):
    w = wire()
    await w.feed(data)
    w.connection.eof_received()
    w.connection.connection_lost(None)
    assert not w.exchanges
    assert not w.shared.connections


# --- slow clients


async def test_congestion_is_told_to_the_exchange(wire):
    w = wire()
    await w.feed(get())
    w.exchange.start(200, ())
    calls = []
    w.exchange.on_writable = lambda: calls.append(w.exchange.congested)
    w.connection.pause_writing()
    assert w.exchange.congested
    w.connection.resume_writing()
    assert calls == [False]


async def test_a_new_exchange_knows_of_congestion(wire):
    w = wire()
    w.connection.pause_writing()
    await w.feed(get())
    assert w.exchange.congested


async def test_cut_resets(wire, errors):
    w = wire()
    await w.feed(get())
    w.exchange.start(200, ())
    w.exchange.cut()
    assert w.transport.aborted
    assert any(option[:2] == (socket.SOL_SOCKET, socket.SO_LINGER) for option in w.transport.options)
    w.connection.connection_lost(None)
    await settle()
    assert not w.cancelled  # it was the handler's own wish
    w.gate.set()
    await settle()
    assert not errors


async def test_a_torn_answer_ends_by_fin(wire, errors):
    w = wire()
    await w.feed(get())
    w.exchange.start(200, ())
    w.exchange.break_off(b"error")
    w.gate.set()
    await settle()
    assert w.sent.endswith(b"5\r\nerror\r\n")
    assert w.transport.eof
    assert not w.transport.is_closing()
    assert not errors
    w.connection.eof_received()
    w.connection.connection_lost(None)


async def test_a_torn_answer_on_a_closing_connection_is_left_alone(wire):
    w = wire()
    await w.feed(get())
    w.exchange.start(200, ())
    w.connection.close()
    w.exchange.break_off()
    assert not w.transport.eof


# --- handlers that fail


async def test_a_handler_that_raises_is_a_500_and_one_log_entry(wire, errors):
    async def bad(exchange):
        raise KeyError("secret")

    w = wire(bad)
    await w.feed(get())
    assert w.sent.startswith(b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n")
    assert (
        b'{"error":{"message":"internal error","type":"internal_error","param":null,"code":"internal_error"}}' in w.sent
    )
    assert b"secret" not in w.sent
    assert len(errors) == 1
    assert errors[0].exc_info[0] is KeyError
    assert not w.transport.is_closing()


async def test_a_handler_that_raises_in_mid_stream_tears_the_answer(wire, errors):
    async def bad(exchange):
        exchange.start(200, (), b"x")
        raise KeyError

    w = wire(bad)
    await w.feed(get())
    assert w.sent.endswith(b"1\r\nx\r\n")
    assert w.transport.eof
    assert len(errors) == 1


@pytest.mark.parametrize("started", [False, True])
async def test_a_handler_that_returns_too_early(wire, errors, started):
    async def lazy(exchange):
        if started:
            exchange.start(200, ())

    w = wire(lazy)
    await w.feed(get())
    assert (b" 500 " in w.sent) is not started
    assert w.transport.eof is started
    assert "returned" in errors[0].getMessage()
    assert len(errors) == 1


async def test_a_handler_that_fails_behind_its_answer_is_logged_alone(wire, errors):
    async def bad(exchange):
        await ok(exchange)
        raise KeyError

    w = wire(bad)
    await w.feed(get() + get())
    assert w.sent == OK * 2
    assert len(errors) == 2


async def test_a_handler_that_fails_while_its_client_leaves_is_logged(wire, errors):
    async def bad(exchange):
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    w = wire(bad)
    await w.feed(get())
    w.connection.connection_lost(None)
    await settle()
    assert len(errors) == 1
    assert w.sent == b""


async def test_a_handler_that_is_cancelled_by_somebody_else(wire, errors):
    w = wire()
    await w.feed(get())
    next(iter(w.shared.tasks)).cancel()
    await settle()
    assert b" 500 " in w.sent
    assert "cancelled" in errors[0].getMessage()


async def test_a_server_that_stops_does_not_call_it_a_fault(wire, errors):
    w = wire()
    await w.feed(get())
    w.shared.stopping = True
    next(iter(w.shared.tasks)).cancel()
    await settle()
    assert b" 500 " in w.sent
    assert not errors


# --- time


async def test_an_idle_connection_is_closed(wire):
    w = wire(ok, idle_s=75.0)
    assert w.connection.deadline_s == 1075.0
    w.clock.now_s = 1050.0
    await w.feed(get())
    assert w.connection.deadline_s == 1125.0
    w.connection.expire(1125.0)
    assert w.transport.closed


async def test_a_head_has_a_time_limit_from_its_first_byte_on(wire):
    w = wire(head_s=20.0)
    await w.feed(b"GET")
    w.clock.now_s = 1015.0
    await w.feed(b" / HTTP")
    assert w.connection.deadline_s == 1020.0
    w.connection.expire(1020.0)
    assert w.transport.closed
    assert w.sent == b""


async def test_a_body_has_a_time_limit_from_read_to_read(wire):
    w = wire(body_s=120.0, body_bytes_per_s=0.01)
    data = post(b"hello")
    await w.feed(data[:-5])
    assert w.connection.deadline_s == 1120.0
    w.clock.now_s = 1100.0
    await w.feed(data[-5:-4])
    assert w.connection.deadline_s == 1220.0


async def test_a_body_that_trickles_in_is_not_waited_for_for_ever(wire):
    w = wire(body_s=120.0, body_bytes_per_s=10.0)
    data = post(b"h" * 5000)
    head = len(data) - 5000
    await w.feed(data[:head])
    for now_s in range(1001, 1200, 10):  # far below the pace, and never silent
        w.clock.now_s = float(now_s)
        await w.feed(b"h")
    assert w.connection.deadline_s == 1000.0 + (head + 20) / 10.0 + 120.0
    w.connection.expire(w.connection.deadline_s)
    assert w.transport.closed


async def test_a_body_at_the_least_pace_goes_on(wire):
    w = wire(body_s=120.0, body_bytes_per_s=10.0)
    data = post(b"h" * 5000)
    await w.feed(data[: len(data) - 5000])
    for now_s in range(1010, 1400, 10):
        w.clock.now_s = float(now_s)
        await w.feed(b"h" * 101)
        assert w.connection.deadline_s == now_s + 120.0


async def test_a_running_request_has_none(wire):
    w = wire()
    await w.feed(post(b"hello"))
    assert w.connection.deadline_s == math.inf
    w.exchange.start(200, ())
    assert w.connection.deadline_s == math.inf


async def test_a_client_that_takes_its_answer_slowly_is_waited_for(wire):
    w = wire()
    await w.feed(get("Connection: close"))
    w.transport.unsent = 1000
    w.exchange.respond(200, (), b"")
    for left in (900, 500):
        w.transport.unsent = left
        w.clock.now_s = w.connection.deadline_s
        w.connection.expire(w.clock.now_s)
        assert not w.transport.aborted
    w.connection.expire(w.connection.deadline_s)
    assert w.transport.aborted


async def test_a_client_that_takes_nothing_of_a_finished_answer_is_given_up(wire):
    w = wire(ok)
    await w.feed(get())
    w.connection.pause_writing()
    w.transport.unsent = 1000
    w.connection.expire(w.connection.deadline_s)
    assert w.transport.closed
    w.connection.expire(w.connection.deadline_s)
    assert w.transport.aborted


# --- draining


async def test_draining(wire):
    idle, busy, reading = wire(ok), wire(), wire(ok)
    await idle.feed(get())
    await busy.feed(get())
    data = get()
    await reading.feed(data[:5])
    for w in (idle, busy, reading):
        w.shared.draining = True
        w.connection.close_if_idle()
    assert idle.transport.closed
    assert not busy.transport.closed
    assert not reading.transport.closed
    await reading.feed(data[5:])
    busy.exchange.respond(200, (), b"")
    for w in (busy, reading):
        assert b"Connection: close\r\n" in w.sent
        assert w.transport.closed


# --- long bodies


class TestLongBodies:
    BODY = bytes(range(256)) * 8 * KIB  # 2 MiB

    async def test_a_turn_of_the_loop_takes_one_read(self, wire):
        w = wire(ok)
        data = post(self.BODY)
        for at in range(0, len(data), 256 * KIB):
            assert not w.transport.paused
            w.connection.data_received(data[at : at + 256 * KIB])
            assert w.transport.paused is (at + 256 * KIB < len(data))
            await settle()
        w.executor.run()
        await settle()
        assert (w.exchange.body, w.sent) == (self.BODY, OK)
        assert not w.transport.paused

    async def test_small_reads_are_not_slowed_down(self, wire):
        w = wire(ok)
        for at in range(0, len(data := post(self.BODY)), 16 * KIB):
            w.connection.data_received(data[at : at + 16 * KIB])
            assert not w.transport.paused
        w.executor.run()
        await settle()
        assert w.exchange.body == self.BODY

    @pytest.mark.parametrize("step", [None, 20000, 5000])
    async def test_many_small_chunks_and_a_request_behind_them(self, wire, step):
        w = wire(ok)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"2\r\nab\r\n" * 9000 + b"0\r\n\r\n"
        for at in range(0, len(data := head + chunks + get()), step or len(data)):
            w.connection.data_received(data[at : at + (step or len(data))])
            for _ in range(20):
                await settle()
            assert not w.transport.paused
        assert [x.body for x in w.exchanges] == [b"ab" * 9000, b""]
        assert w.sent == OK * 2

    async def test_a_client_that_leaves_while_it_rests(self, wire):
        w = wire(ok)
        w.connection.data_received(post(self.BODY)[: 300 * KIB])
        assert w.transport.paused
        w.transport.abort()
        w.connection.connection_lost(None)
        await settle()
        assert w.transport.paused
        assert not w.exchanges

    async def test_a_client_that_leaves_while_its_body_is_put_together(self, wire):
        w = wire(ok)
        await w.feed(post(self.BODY), 16 * KIB)
        assert w.executor.jobs
        assert w.connection.eof_received() is False
        assert w.transport.aborted
        w.executor.run()
        await settle()
        assert not w.exchanges

    async def test_broken_chunks_behind_many_small_ones_are_refused(self, wire):
        w = wire(ok)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        await w.feed(head + b"1\r\nx\r\n" * 3000 + b"zz\r\n")
        for _ in range(6):
            await settle()
        assert isinstance(w.exchange.refusal, BadRequest)
        assert w.transport.eof
