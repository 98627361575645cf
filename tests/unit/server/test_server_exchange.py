import pytest
from server_fakes import FakeTransport, get, post

from coordinator.core.errors import BadRequest
from coordinator.server.exchange import Exchange
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader

TEXT = ((b"Content-Type", b"text/plain"),)


class FakeLink:
    peer = "10.1.2.3"

    def __init__(self):
        self.transport = FakeTransport()
        self.draining = False
        self.date = bytes
        self.ends = []

    def answered(self, *, reusable):
        self.ends.append(reusable)

    def torn(self):
        self.ends.append("torn")

    def reset(self):
        self.ends.append("reset")


def exchange_for(data):
    reader = RequestReader(ServerLimits())
    reader.feed(data)
    assert reader.complete
    link = FakeLink()
    return Exchange(link, reader, reader.body, reader.refusal), link


def test_what_a_handler_sees():
    exchange, _ = exchange_for(post(b"hello", "X-A: 1", "X-A: 2", target="/p?q"))
    assert (exchange.method, exchange.target, exchange.path, exchange.query) == ("POST", "/p?q", "/p", "q")
    assert exchange.body == b"hello"
    assert exchange.peer == "10.1.2.3"
    assert exchange.header(b"x-a") == b"1"
    assert exchange.header(b"x-b") is None
    assert not any((exchange.started, exchange.finished, exchange.gone, exchange.congested))
    assert exchange.refusal is None


def test_a_complete_answer_is_one_write():
    exchange, link = exchange_for(get())
    exchange.respond(404, TEXT, b"no")
    assert link.transport.writes == [
        b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nno"
    ]
    assert link.ends == [True]
    assert exchange.started
    assert exchange.finished


def test_a_large_answer_is_whole():
    exchange, link = exchange_for(get())
    exchange.respond(200, (), b"x" * 100_000)
    assert link.transport.sent.endswith(b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000)


@pytest.mark.parametrize(
    ("request_", "end", "reusable"),
    [
        (get(), b"\r\n\r\n", True),
        (get("Connection: close"), b"\r\nConnection: close\r\n\r\n", False),
        (get(version="1.0"), b"\r\nConnection: close\r\n\r\n", False),
        (get("Connection: keep-alive", version="1.0"), b"\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_the_connection_header_of_a_complete_answer(request_, end, reusable):
    exchange, link = exchange_for(request_)
    exchange.respond(200, TEXT, b"")
    assert link.transport.sent == b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 0" + end
    assert link.ends == [reusable]


def test_statuses():
    for status, line in [(503, b"503 Service Unavailable"), (429, b"429 Too Many Requests"), (499, b"499 Unknown")]:
        exchange, link = exchange_for(get())
        exchange.respond(status, (), b"")
        assert link.transport.sent.startswith(b"HTTP/1.1 " + line + b"\r\n")


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status):
    exchange, link = exchange_for(get())
    exchange.respond(status, (), b"")
    assert link.transport.sent.endswith(b"\r\n\r\n")
    assert b"ength" not in link.transport.sent


def test_head_gets_no_body():
    exchange, link = exchange_for(get(method="HEAD"))
    exchange.respond(200, (), b"hello")
    assert link.transport.sent == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    exchange, link = exchange_for(get(method="HEAD"))
    exchange.start(200, (), b"first")
    exchange.write(b"second")
    exchange.end(b"third")
    assert link.transport.sent == b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert link.ends == [True]


def test_a_stream_is_one_write_a_piece():
    exchange, link = exchange_for(get())
    exchange.start(200, TEXT, b"first")
    exchange.write(b"")
    exchange.write(b"0123456789abcdefg")
    exchange.end(b"last")
    assert link.transport.writes == [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n",
        b"11\r\n0123456789abcdefg\r\n",
        b"4\r\nlast\r\n0\r\n\r\n",
    ]
    assert link.ends == [True]


def test_a_stream_may_begin_and_end_empty():
    exchange, link = exchange_for(get("Connection: close"))
    exchange.start(200, ())
    exchange.end()
    assert link.transport.writes == [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
        b"0\r\n\r\n",
    ]
    assert link.ends == [False]


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
def test_a_1_0_stream_ends_by_close(headers):
    exchange, link = exchange_for(get(*headers, version="1.0"))
    exchange.start(200, (), b"a")
    exchange.write(b"b")
    exchange.end(b"c")
    assert link.transport.sent == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"
    assert link.ends == [False]


def test_a_torn_stream_lacks_the_last_chunk():
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    exchange.break_off(b"error")
    assert link.transport.sent.endswith(b"5\r\nerror\r\n")
    assert link.ends == ["torn"]
    assert exchange.finished


def test_break_off_without_an_answer():
    exchange, link = exchange_for(get())
    exchange.break_off(b"error")
    assert link.transport.sent == b""
    assert link.ends == ["torn"]


def test_cut():
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    exchange.cut()
    exchange.cut()
    assert link.ends == ["reset"]
    assert exchange.finished


@pytest.mark.parametrize("how", ["end", "break_off", "cut"])
def test_nothing_follows_a_finished_answer(how):
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    getattr(exchange, how)()
    sent = link.transport.sent
    exchange.write(b"late")
    exchange.end(b"late")
    exchange.break_off(b"late")
    exchange.cut()
    assert link.transport.sent == sent
    assert len(link.ends) == 1
    with pytest.raises(RuntimeError):
        exchange.respond(200, (), b"")
    with pytest.raises(RuntimeError):
        exchange.start(200, ())


def test_a_client_that_left_gets_nothing():
    exchange, link = exchange_for(get())
    exchange.on_writable = lambda: None
    exchange.left()
    exchange.respond(200, (), b"x")
    exchange.start(200, ())
    exchange.write(b"x")
    exchange.end(b"x")
    exchange.break_off(b"x")
    exchange.cut()
    assert link.transport.sent == b""
    assert link.ends == []
    assert exchange.gone
    assert not exchange.finished
    assert exchange.on_writable is None


def test_a_client_that_left_in_mid_stream_gets_nothing_more():
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    sent = link.transport.sent
    exchange.left()
    exchange.write(b"x")
    exchange.end(b"x")
    assert link.transport.sent == sent
    assert link.ends == []


def test_pieces_need_a_start():
    exchange, _ = exchange_for(get())
    with pytest.raises(RuntimeError):
        exchange.write(b"x")
    with pytest.raises(RuntimeError):
        exchange.end()
    assert not exchange.finished


@pytest.mark.parametrize("value", [b"a\r\nSet-Cookie: x", b"a\nb", b"a\rb"])
@pytest.mark.parametrize("call", ["respond", "start"])
def test_no_header_can_be_injected(value, call):
    exchange, link = exchange_for(get())
    arguments = (200, [(b"X-Request-Id", value)], b"")
    with pytest.raises(ValueError, match="line break"):
        getattr(exchange, call)(*arguments)
    assert link.transport.sent == b""
    exchange.respond(500, (), b"")
    assert link.ends == [True]


def test_draining_closes_after_the_answer():
    exchange, link = exchange_for(get())
    link.draining = True
    exchange.respond(200, (), b"")
    assert b"Connection: close\r\n" in link.transport.sent
    assert link.ends == [False]
    exchange, link = exchange_for(get())
    exchange.start(200, ())
    link.draining = True
    exchange.end()
    assert link.ends == [False]


def test_a_refused_request_closes():
    exchange, link = exchange_for(b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(exchange.refusal, BadRequest)
    exchange.respond(400, (), b"")
    assert b"Connection: close\r\n" in link.transport.sent
    assert link.ends == [False]


def test_buffered_bytes():
    exchange, link = exchange_for(get())
    link.transport.unsent = 17
    assert exchange.buffered_bytes() == 17
