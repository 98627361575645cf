"""The server over real sockets, under both event loops."""

import asyncio
import contextlib
import errno
import gzip
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import time
import zlib
from functools import partial

import pytest

from coordinator.core.errors import BodyTooLarge
from coordinator.server.listener import HttpServer, ServerLimits
from coordinator.server.shared import Shared

MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LIMIT_S = 10


class Clock:
    """Stands still until a test has come so far that its limits may count."""

    def __init__(self):
        self.began_s = time.monotonic()
        self.goes = False

    def __call__(self):
        return time.monotonic() if self.goes else self.began_s


class Site:
    """A server with a scripted handler, and its clients."""

    def __init__(self, handler=None, *, clock=time.monotonic, **limits):
        self.exchanges = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.handler = handler
        self.records = []
        log = logging.getLogger(f"test.server.site{id(self)}")
        sink = logging.Handler()
        sink.emit = self.records.append
        log.addHandler(sink)
        self.server = HttpServer(self.handle, ServerLimits(**limits), log, clock)
        self.writers = []

    async def handle(self, exchange):
        self.exchanges.append(exchange)
        self.arrived.set()
        if self.handler is not None:
            await self.handler(exchange)
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def connect(self, data=b"", host="127.0.0.1"):
        reader, writer = await asyncio.open_connection(host, self.server.port)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def aclose(self):
        await self.server.aclose()
        for writer in self.writers:
            writer.close()
        for writer in self.writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await until(lambda: self.server.connections == 0)


async def until(condition):
    """Let the loop run until something holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def reset(writer):
    """Leave by RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def ok(exchange):
    exchange.respond(200, (), b"ok")


@pytest.fixture(autouse=True)
def undated(monkeypatch):
    """Answers that can be compared as a whole."""
    monkeypatch.setattr("coordinator.server.listener.Shared", partial(Shared, date=bytes))


@pytest.fixture
async def site():
    made = []

    async def make(handler=None, **limits):
        made.append(Site(handler, **limits))
        await made[-1].server.listen("127.0.0.1", 0)
        return made[-1]

    async with asyncio.timeout(3 * LIMIT_S):
        yield make
        for one in made:
            await one.aclose()


async def read(reader, end=None, count=None):
    async with asyncio.timeout(LIMIT_S):
        if count is not None:
            return await reader.readexactly(count)
        return await (reader.read() if end is None else reader.readuntil(end))


async def test_requests_on_one_connection(site):
    s = await site(ok)
    reader, writer = await s.connect(GET * 3)
    assert await read(reader, count=3 * len(OK)) == OK * 3
    writer.write(GET)
    assert await read(reader, count=len(OK)) == OK
    assert s.server.connections == 1
    assert s.exchanges[0].peer == "127.0.0.1"
    writer.close()
    await until(lambda: s.server.connections == 0)


async def test_each_piece_is_sent_at_once(site):
    gate = asyncio.Event()

    async def slow(exchange):
        exchange.start(200, (), b"one")
        await gate.wait()
        exchange.end(b"two")

    s = await site(slow)
    reader, _ = await s.connect(GET)
    assert (await read(reader, b"one\r\n")).endswith(b"3\r\none\r\n")
    gate.set()
    assert await read(reader, b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
    sock = s.exchanges[0]._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("how", ["fin", "half", "rst"])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_cancels_its_handler(site, how, started):
    s = await site()
    _, writer = await s.connect(GET)
    await until(s.arrived.is_set)
    if started:
        s.exchanges[0].start(200, (), b"x")
    if how == "rst":
        reset(writer)
    elif how == "half":
        writer.write_eof()
    else:
        writer.close()
    await until(s.cancelled.is_set)
    await until(lambda: s.server.connections == 0)
    s.exchanges[0].write(b"late")
    s.exchanges[0].end()
    assert s.exchanges[0].gone
    assert not s.records


async def test_a_refused_upload_gets_its_answer_and_no_reset(site):
    async def refuse(exchange):
        assert isinstance(exchange.refusal, BodyTooLarge)
        exchange.respond(413, (), b"too large")

    s = await site(refuse, clock=Clock(), max_body_bytes=8 * MIB)
    body = b"x" * (9 * MIB)
    reader, writer = await s.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body[: 7 * MIB])  # what a client does that sends all before it reads
    async with asyncio.timeout(LIMIT_S):
        await writer.drain()
    assert (await read(reader)).endswith(b"\r\n\r\ntoo large")
    writer.close()
    await until(lambda: s.server.connections == 0)


async def test_a_torn_answer_reaches_the_client_as_far_as_it_goes(site):
    async def tear(exchange):
        exchange.start(200, (), b"token")
        exchange.break_off(b"error")

    s = await site(tear)
    reader, writer = await s.connect(GET + GET)
    got = await read(reader)
    assert got.endswith(b"5\r\ntoken\r\n5\r\nerror\r\n")
    writer.close()
    await until(lambda: s.server.connections == 0)
    assert len(s.exchanges) == 1


async def test_a_client_that_does_not_read_is_noticed_and_cut(site):
    seen = []

    async def flood(exchange):
        exchange.start(200, ())
        while exchange.buffered_bytes() < MIB:
            exchange.write(b"x" * 65000)
            await asyncio.sleep(0)
            seen.append(exchange.congested)
        exchange.cut()

    s = await site(flood)
    reader, _ = await s.connect(GET)
    reader._transport.pause_reading()
    await until(lambda: s.server.connections == 0)
    assert seen[-1]
    assert s.exchanges[0].finished
    reader._transport.resume_reading()
    with pytest.raises(ConnectionResetError):
        await read(reader)
    assert not s.records


async def test_a_slow_client_gets_everything(site):
    resumed = asyncio.Event()

    async def flood(exchange):
        exchange.start(200, ())
        exchange.on_writable = resumed.set
        while not exchange.congested:
            exchange.write(b"x" * 65000)
            await asyncio.sleep(0)
        await resumed.wait()
        exchange.end(b"the end")

    s = await site(flood)
    reader, _ = await s.connect(GET)
    reader._transport.pause_reading()
    await until(lambda: s.exchanges and s.exchanges[0].congested)
    reader._transport.resume_reading()
    assert (await reader_end(reader)).endswith(b"7\r\nthe end\r\n0\r\n\r\n")


async def reader_end(reader):
    got = b""
    async with asyncio.timeout(LIMIT_S):
        while not got.endswith(b"0\r\n\r\n"):
            got = got[-100:] + await reader.read(MIB)
    return got


# --- compressed bodies


async def test_a_bomb_does_not_fill_the_memory(site):
    async def refuse(exchange):
        exchange.respond(exchange.refusal.status, (), b"no")

    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * MIB) for _ in range(400)) + packer.flush()
    s = await site(refuse)
    before = peak = rss()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    reader, _ = await s.connect(head + bomb)
    answer = asyncio.create_task(read(reader, b"no"))
    while not answer.done():
        await asyncio.sleep(0.001)
        peak = max(peak, rss())
    assert answer.result().startswith(b"HTTP/1.1 413 ")
    assert peak - before < 100 * MIB


async def test_a_compressed_body_of_some_size_arrives(site):
    body = os.urandom(3 * MIB)
    packed = gzip.compress(body, 1)
    s = await site(ok)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    reader, _ = await s.connect(head + packed)
    assert await read(reader, count=len(OK)) == OK
    assert s.exchanges[0].body == body


def rss():
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


# --- time


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\nX", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab", GET]
)
async def test_silent_connections_are_closed(site, data):
    clock = Clock()
    s = await site(ok, clock=clock, idle_s=0.1, head_s=0.1, body_s=0.1)
    reader, _ = await s.connect(data)
    if data == GET:
        assert await read(reader, count=len(OK)) == OK
    await until(lambda: s.server.connections == 1)
    clock.goes = True
    with contextlib.suppress(ConnectionResetError):  # where its bytes were not read before the time was over
        assert await read(reader) == b""
    await until(lambda: s.server.connections == 0)


async def test_a_running_request_outlives_every_limit(site):
    clock = Clock()

    async def slow(exchange):
        clock.goes = True
        await asyncio.sleep(0.4)
        await ok(exchange)

    s = await site(slow, clock=clock, idle_s=0.1, head_s=0.1, body_s=0.1)
    reader, _ = await s.connect(GET)
    assert await read(reader) == OK


# --- room


async def test_above_max_connections_clients_wait_in_the_backlog(site):
    s = await site(ok, max_connections=2)
    first, second, third = [await s.connect(GET) for _ in range(3)]
    for reader, _ in (first, second):
        assert await read(reader, count=len(OK)) == OK
    await asyncio.sleep(0.05)
    assert s.server.connections == 2
    assert len(s.exchanges) == 2
    first[1].close()
    assert await read(third[0], count=len(OK)) == OK
    assert s.server.connections == 2
    assert not s.records


class Poor:
    """A listening socket of a process without descriptors."""

    def __init__(self, sock, number):
        self.sock = sock
        self.number = number
        self.calls = 0

    def accept(self):
        self.calls += 1
        raise OSError(self.number, "short")

    def __getattr__(self, name):
        return getattr(self.sock, name)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM])
async def test_a_shortage_costs_one_warning_and_no_busy_loop(site, number, monkeypatch):
    monkeypatch.setattr("coordinator.server.acceptor._RETRY_S", 0.05)
    s = await site(ok)
    acceptor = s.server._acceptor
    kept, _ = await s.connect(GET)
    await read(kept, count=len(OK))
    acceptor._pause()
    poor = Poor(acceptor._sockets[0], number)
    acceptor._sockets[0] = poor
    start_s = time.monotonic()
    acceptor.resume()
    reader, _ = await s.connect(GET)
    await until(lambda: poor.calls >= 4 and acceptor._retry is not None)
    assert time.monotonic() - start_s > 0.1
    assert len(s.records) == 1
    assert errno.errorcode[number] in s.records[0].getMessage()
    acceptor._pause()
    acceptor._sockets[0] = poor.sock
    acceptor._retry.cancel()
    s.writers[0].close()  # a connection that is closed makes it try again
    assert await read(reader, count=len(OK)) == OK


SHORT_OF_FILES = """
import asyncio, logging, resource, sys, time
from functools import partial
import uvloop
from coordinator.server import listener
from coordinator.server.listener import HttpServer, ServerLimits

listener.Shared = partial(listener.Shared, date=bytes)

async def handle(exchange):
    exchange.respond(200, (), b"ok")

async def main():
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    server = HttpServer(handle, ServerLimits(), logging.getLogger("s"))
    await server.listen("127.0.0.1", 0)
    print(server.port, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    start_s = time.process_time()
    await loop.run_in_executor(None, sys.stdin.readline)
    print(time.process_time() - start_s, flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    await server.aclose()

uvloop.run(main())
"""


async def test_a_process_out_of_descriptors_serves_all_in_turn():
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SHORT_OF_FILES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        clients = []
        async with asyncio.timeout(LIMIT_S):
            for _ in range(80):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GET)
                clients.append((reader, writer))
            process.stdin.write("\n")
            process.stdin.flush()
            await asyncio.sleep(0.5)
            process.stdin.write("\n")
            process.stdin.flush()
            for reader, writer in clients:
                assert await reader.readexactly(len(OK)) == OK
                writer.close()
                await writer.wait_closed()
        out, _ = process.communicate("\n", timeout=LIMIT_S)
        lines = out.splitlines()
        assert sum("WARNING no connection can be accepted" in line for line in lines) == 1
        burnt_s = [float(line) for line in lines if "WARNING" not in line]
        assert len(burnt_s) == 1
        assert burnt_s[0] < 0.3
    finally:
        process.kill()
        process.communicate()


# --- the end


async def test_draining_closes_idle_connections_and_says_close_to_the_others(site):
    gate = asyncio.Event()

    async def slow(exchange):
        if exchange.path == "/slow":
            await gate.wait()
        await ok(exchange)

    s = await site(slow)
    idle, _ = await s.connect(GET)
    await read(idle, count=len(OK))
    busy, _ = await s.connect(GET.replace(b"/ ", b"/slow "))
    await until(lambda: len(s.exchanges) == 2)
    s.server.draining = True
    assert s.server.draining
    assert await read(idle) == b""
    late, _ = await s.connect(GET)
    assert b"Connection: close\r\n" in await read(late)
    gate.set()
    assert b"Connection: close\r\n" in await read(busy)
    await until(lambda: s.server.connections == 0)


async def test_stop_listening(site):
    s = await site(ok)
    reader, writer = await s.connect(GET)
    await read(reader, count=len(OK))
    s.server.stop_listening()
    with pytest.raises(OSError):  # noqa: PT011
        await s.connect()
    writer.write(GET)
    assert await read(reader, count=len(OK)) == OK


async def test_who_waits_in_the_backlog_is_served_before_listening_stops(site):
    s = await site(ok)
    sock = socket.create_connection(("127.0.0.1", s.server.port))  # the loop has no turn between this and the stop
    s.server.stop_listening()
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(GET)
    assert await read(reader, count=len(OK)) == OK
    writer.close()


async def test_aclose_closes_the_connection_of_who_has_just_come(site):
    s = await site(ok)
    with socket.create_connection(("127.0.0.1", s.server.port), LIMIT_S) as sock:  # the loop has no turn in between
        await s.server.aclose()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert s.server.connections == 0
    assert not s.records


async def test_aclose_lets_handlers_say_goodbye(site):
    async def polite(exchange):
        exchange.start(200, (), b"x")
        try:
            await asyncio.Event().wait()
        finally:
            exchange.break_off(b"bye")

    s = await site(polite)
    reader, _ = await s.connect(GET)
    await read(reader, b"x\r\n")
    await s.server.aclose()
    assert (await read(reader)).endswith(b"3\r\nbye\r\n")
    assert s.server.connections == 0
    assert not s.records


async def test_aclose_does_not_wait_for_stubborn_handlers(site, monkeypatch):
    monkeypatch.setattr("coordinator.server.listener._STOP_TASKS_S", 0.1)

    async def stubborn(exchange):
        exchange.start(200, (), b"x")
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()

    gate = asyncio.Event()
    s = await site(stubborn)
    reader, _ = await s.connect(GET)
    await read(reader, b"x\r\n")
    async with asyncio.timeout(LIMIT_S):
        await s.server.aclose()
    assert await read(reader) == b""
    assert s.server.connections == 0
    gate.set()
    await until(lambda: not s.server._shared.tasks)


async def test_aclose_aborts_clients_that_take_nothing(site):
    async def flood(exchange):
        exchange.start(200, ())
        while exchange.buffered_bytes() < MIB:
            exchange.write(b"x" * 65000)
            await asyncio.sleep(0)
        exchange.end()

    s = await site(flood)
    reader, _ = await s.connect(GET)
    reader._transport.pause_reading()
    await until(lambda: s.exchanges and s.exchanges[0].finished)
    async with asyncio.timeout(LIMIT_S):
        await s.server.aclose()
    await until(lambda: s.server.connections == 0)


async def test_a_server_that_never_listened_can_be_closed():
    async def handle(exchange):
        raise NotImplementedError

    await HttpServer(handle, ServerLimits(), logging.getLogger("test.server")).aclose()


# --- addresses


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


async def listening(host, **options):
    s = Site(ok)
    await s.server.listen(host, 0, **options)
    return s


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("host", "clients"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"]), ("", ["::1", "127.0.0.1"])]
)
async def test_ipv6(host, clients):
    s = await listening(host)
    for client in clients:
        reader, _ = await s.connect(GET, client)
        assert await read(reader, count=len(OK)) == OK
        assert s.exchanges[-1].peer == client
    await s.aclose()


async def test_two_servers_may_share_a_port():
    one = await listening("127.0.0.1", reuse_port=True)
    two = Site(ok)
    await two.server.listen("127.0.0.1", one.server.port, reuse_port=True)
    await two.aclose()
    await one.aclose()


async def test_a_port_in_use_is_an_error():
    one = await listening("127.0.0.1")
    two = Site(ok)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        await two.server.listen("127.0.0.1", one.server.port)
    assert caught.value.errno == errno.EADDRINUSE
    await two.aclose()
    await one.aclose()


async def test_an_unknown_host_is_an_error():
    s = Site(ok)
    with pytest.raises(OSError):  # noqa: PT011
        await s.server.listen("no.such.host.invalid", 0)
    await s.aclose()
