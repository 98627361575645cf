"""TLS on our own server: real handshakes over real sockets, under both event loops."""

import asyncio
import contextlib
import gc
import logging
import ssl
from dataclasses import replace
from functools import partial

import pytest
from certificates import Authority

from coordinator.config import ServerTls
from coordinator.core.errors import InvalidKey
from coordinator.security.tls import PortTls, server_context
from coordinator.server.listener import HttpServer, ServerLimits
from coordinator.server.shared import Shared

LIMIT_S = 10
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
REFUSED = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Site:
    def __init__(self, tls, handler, gate=None, **limits):
        self.records = []
        self.cancelled = asyncio.Event()
        self._handler = handler
        log = logging.getLogger(f"test.tls.site{id(self)}")
        sink = logging.Handler()
        sink.emit = self.records.append
        log.addHandler(sink)
        self.server = HttpServer(self._handle, ServerLimits(**limits), log, gate=gate)
        self.server.tls = tls
        self.writers = []

    async def _handle(self, exchange):
        try:
            await self._handler(exchange)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def connect(self, context, data=b""):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.server.port, ssl=context, server_hostname="localhost" if context else None
        )
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    def count_handshakes(self):
        """Count those that begin; a limit that is changed after one has begun does not hold for it."""
        begin = self.server._shake_hands

        async def counting(*given):
            self.begun += 1
            await begin(*given)

        self.begun = 0
        self.server._shake_hands = counting

    async def aclose(self):
        await self.server.aclose()
        for writer in self.writers:
            writer.transport.abort()
        await until(lambda: self.server.connections == 0)


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def read(reader, end=None):
    async with asyncio.timeout(LIMIT_S):
        return await (reader.read() if end is None else reader.readuntil(end))


async def answered(site, context):
    """Connect and get an answer."""
    reader, _ = await site.connect(context, GET)
    return await read(reader, b"ok")


async def ok(exchange):
    exchange.respond(200, (), b"ok")


async def endless(exchange):
    exchange.start(200, (), b"first")
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def undated(monkeypatch):
    """Answers that can be compared as a whole."""
    monkeypatch.setattr("coordinator.server.listener.Shared", partial(Shared, date=bytes))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def given(authority):
    return ServerTls(**authority.issue("server").keys)


@pytest.fixture
async def site(given):
    made = []

    async def make(handler=ok, tls=None, **more):
        made.append(Site(tls or server_context(given), handler, **more))
        await made[-1].server.listen("127.0.0.1", 0)
        return made[-1]

    async with asyncio.timeout(4 * LIMIT_S):
        yield make
        for one in made:
            await one.aclose()
    gc.collect()  # a transport that was forgotten would warn here


async def test_requests_on_one_connection(site, authority):
    s = await site()
    reader, writer = await s.connect(authority.trust(), GET * 3)
    assert await read(reader, b"ok") + await read(reader, b"ok") + await read(reader, b"ok") == OK * 3
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()
    await until(lambda: s.server.connections == 0)
    assert not s.records


async def test_a_stream_in_pieces_and_a_broken_one(site, authority):
    gate = asyncio.Event()

    async def torn(exchange):
        exchange.start(200, (), b"one")
        await gate.wait()
        exchange.break_off(b"error")

    s = await site(torn)
    reader, _ = await s.connect(authority.trust(), GET)
    assert (await read(reader, b"one\r\n")).endswith(b"3\r\none\r\n")
    gate.set()
    assert await read(reader) == b"5\r\nerror\r\n"  # and then the end of the connection, without the last chunk


async def test_large_bodies_both_ways(site, authority):
    async def echo(exchange):
        exchange.respond(200, (), exchange.body)

    s = await site(echo)
    body = bytes(range(256)) * 20000
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, _ = await s.connect(authority.trust(), head + body)
    assert await read(reader, b"\r\n\r\n")
    async with asyncio.timeout(LIMIT_S):
        assert await reader.readexactly(len(body)) == body


async def test_a_client_that_leaves_ends_its_request(site, authority):
    s = await site(endless)
    reader, writer = await s.connect(authority.trust(), GET)
    await read(reader, b"first\r\n")
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        await s.cancelled.wait()
    await until(lambda: s.server.connections == 0)


async def test_a_client_that_is_cut_off_sees_no_proper_end(site, authority):
    async def cut(exchange):
        exchange.start(200, (), b"first")
        exchange.cut()

    s = await site(cut)
    reader, _ = await s.connect(authority.trust(), GET)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        assert not (await read(reader)).endswith(b"0\r\n\r\n")
    await until(lambda: s.server.connections == 0)


async def test_what_is_refused_early_reaches_a_client_that_still_sends(site, authority):
    def gate(method, path, headers):
        raise InvalidKey("no")

    async def refuse(exchange):
        exchange.respond(401, (), exchange.refusal.message.encode())

    s = await site(refuse, gate=gate)
    reader, writer = await s.connect(
        authority.trust(), b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n"
    )
    writer.write(b"x" * 2_000_000)
    assert (await read(reader)).endswith(b"\r\n\r\nno")
    await until(lambda: s.server.connections == 0)


async def test_plain_http_gets_no_answer(site, authority):
    s = await site()
    reader, _ = await s.connect(None, GET * 10)
    with contextlib.suppress(ConnectionError):
        assert b"HTTP/1.1" not in await read(reader)
    await until(lambda: s.server.connections == 0)
    assert [record.getMessage() for record in s.records] == ["1 TLS handshakes failed, the last one: http request"]


async def test_slow_handshakes_are_bounded_and_do_not_hold_others_up(site, authority):
    s = await site(head_s=0.2)
    s.count_handshakes()
    silent = [await s.connect(None) for _ in range(5)]
    partial = [await s.connect(None, b"\x16\x03\x01\x02\x00\x01") for _ in range(5)]
    await until(lambda: s.begun == 10)
    s.server.limits = replace(s.server.limits, head_s=LIMIT_S)  # for one that is not slow, though the machine may be
    reader, writer = await s.connect(authority.trust(), GET)
    assert await read(reader, b"ok") == OK
    writer.close()
    for held, _ in (*silent, *partial):
        with contextlib.suppress(ConnectionError):
            await read(held)  # closed by the server
    await until(lambda: s.server.connections == 0)
    assert len(s.records) == 1  # told once, not ten times


async def test_handshakes_count_for_the_limit_of_connections(site, authority):
    s = await site(head_s=0.5, max_connections=2)
    s.count_handshakes()
    for _ in range(2):
        await s.connect(None)
    await until(lambda: s.begun == 2)
    s.server.limits = replace(s.server.limits, head_s=LIMIT_S)
    reader, _ = await s.connect(authority.trust(), GET)  # waits in the backlog, then gets its turn
    assert await read(reader, b"ok") == OK


async def test_stopping_in_the_midst_of_a_handshake(site):
    s = await site()
    await s.connect(None, b"\x16\x03\x01")
    await until(lambda: s.server.connections == 1)
    await s.server.aclose()
    await until(lambda: s.server.connections == 0)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_that_are_spoken(site, authority, version):
    s = await site()
    context = authority.trust()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await s.connect(context, GET)
    assert await read(reader, b"ok") == OK
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_are_refused(site, authority):
    s = await site()
    context = authority.trust()
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await s.connect(context)


async def test_clients_need_a_certificate_where_an_authority_is_named(site, authority, tmp_path):
    given = ServerTls(**authority.issue("server").keys, client_ca_file=str(authority.file))
    s = await site(tls=server_context(given))
    mine = authority.issue("client", "client.example")
    reader, _ = await s.connect(authority.trust(mine), GET)
    assert await read(reader, b"ok") == OK
    foreign = Authority(tmp_path, "foreign").issue("client", "client.example")
    for context in (authority.trust(), authority.trust(foreign)):
        with pytest.raises(REFUSED):
            await answered(s, context)


async def test_new_certificates_count_for_new_connections_and_old_ones_live_on(site, authority, tmp_path):
    port = PortTls(server_context(ServerTls(**authority.issue("server").keys)))
    s = await site(tls=port.context)
    reader, writer = await s.connect(authority.trust(), GET)
    assert await read(reader, b"ok") == OK
    fresh = Authority(tmp_path, "fresh")
    port.take(server_context(ServerTls(**fresh.issue("server").keys)))
    for sni in ("localhost", None):
        context = fresh.trust()
        context.check_hostname = sni is not None
        new_reader, new_writer = await asyncio.open_connection(
            "127.0.0.1", s.server.port, ssl=context, server_hostname=sni or "127.0.0.1"
        )
        s.writers.append(new_writer)
        new_writer.write(GET)
        assert await read(new_reader, b"ok") == OK
    with pytest.raises(ssl.SSLError):
        await s.connect(authority.trust())
    writer.write(GET)
    assert await read(reader, b"ok") == OK


async def test_an_authority_that_is_taken_away_counts_no_more(site, authority, tmp_path):
    keys = authority.issue("server").keys
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    port = PortTls(server_context(ServerTls(**keys, client_ca_file=str(old.file))))
    s = await site(tls=port.context)
    before, after = (one.issue(f"client-{i}", "c.example") for i, one in enumerate((old, new)))
    trusting = authority.trust(before)
    reader, _ = await s.connect(trusting, GET)
    assert await read(reader, b"ok") == OK
    port.take(server_context(ServerTls(**keys, client_ca_file=str(new.file))))
    reader, _ = await s.connect(authority.trust(after), GET)
    assert await read(reader, b"ok") == OK
    for context in (trusting, authority.trust(before), authority.trust()):
        with pytest.raises(REFUSED):
            await answered(s, context)


async def test_an_authority_may_be_demanded_later(site, authority):
    keys = authority.issue("server").keys
    port = PortTls(server_context(ServerTls(**keys)))
    s = await site(tls=port.context)
    port.take(server_context(ServerTls(**keys, client_ca_file=str(authority.file))))
    with pytest.raises(REFUSED):
        await answered(s, authority.trust())
