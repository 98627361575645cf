import asyncio
import gzip
import math
import shutil
import ssl
import subprocess
import time

import pytest
from scripted_engine import GUARD_S, Engine, chunked, turns, whole

from coordinator.core.body import LongBody
from coordinator.transport import HttpClient, TransportError
from coordinator.transport.peers import Peer, Peers


async def test_request_and_reply(engine, get):
    engine.script = lambda peer, request: peer.send(whole(b'{"a":1}', status=201, extra=b"X-One: 1\r\nx-one: 2\r\n"))
    reply = await get(b"POST", "/v1/completions?x=1", [(b"req-id", b"7")], b"{}")
    assert engine.requests == [
        b"POST /v1/completions?x=1 HTTP/1.1\r\nhost: %b\r\nreq-id: 7\r\ncontent-length: 2\r\n\r\n{}"
        % engine.address.netloc.encode()
    ]
    assert (reply.status, reply.body, reply.truncated) == (201, b'{"a":1}', False)
    assert reply.header(b"x-one") == b"1"
    assert reply.header(b"x-none") is None


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (whole(b"abc"), b"abc"),
        (chunked(b"ab", b"c"), b"abc"),
        (b"HTTP/1.1 204 N\r\n\r\n", b""),
        (b"HTTP/1.1 100 C\r\n\r\n" + whole(b"abc"), b"abc"),
        (whole(gzip.compress(b"abc", mtime=0), extra=b"content-encoding: gzip\r\n"), b"abc"),
    ],
)
async def test_body_framings_leave_the_connection_open(engine, get, client, sent, body):
    engine.script = lambda peer, request: peer.send(sent)
    for _ in range(3):
        assert (await get()).body == body
    assert len(engine.peers) == client.open_connections == client.idle_connections == 1


async def test_body_up_to_the_close(engine, get, client):
    def script(peer, request):
        peer.send(b"HTTP/1.0 200 OK\r\n\r\nab")
        peer.send(b"c")
        peer.fin()

    engine.script = script
    assert (await get()).body == b"abc"
    await turns(3)
    assert client.open_connections == 0


async def test_head_request(engine, get, client):
    engine.script = lambda peer, request: peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    for _ in range(2):
        reply = await get(b"HEAD")
        assert (reply.status, reply.body) == (200, b"")
    assert len(engine.peers) == 1


async def test_a_thousand_in_series_use_one_connection(engine, get, client):
    for _ in range(1000):
        assert (await get(deadline_s=time.monotonic() + GUARD_S)).status == 200
    assert len(engine.peers) == client.open_connections == 1


async def test_there_is_no_cap_at_a_hundred_connections(engine, get, client):
    waiting = []

    def script(peer, request):
        waiting.append(peer)
        if len(waiting) == 300:
            for each in waiting:
                each.send(whole(b"ok"))

    engine.script = script
    replies = await asyncio.gather(*(get() for _ in range(300)))
    assert len(replies) == 300
    await turns(3)
    assert client.open_connections == 256  # as many are kept


async def test_large_request_and_reply(engine, get):
    body = bytes(range(256)) * 16384  # 4 MiB
    engine.script = lambda peer, request: peer.send(whole(request.partition(b"\r\n\r\n")[2]))
    assert (await get(b"POST", body=body)).body == body


async def test_connection_close_is_obeyed(engine, get, client):
    engine.script = lambda peer, request: peer.send(whole(b"ok", extra=b"connection: close\r\n"))
    for _ in range(2):
        await get()
    await turns(3)
    assert len(engine.peers) == 2
    assert client.open_connections == 0


async def test_keep_uses_a_connection_that_says_close_and_stays(engine, get, client):
    engine.script = lambda peer, request: peer.send(whole(b"ok", extra=b"connection: close\r\n"))
    for _ in range(5):
        assert (await get(b"POST", keep=True)).body == b"ok"
    assert len(engine.peers) == 1


async def test_keep_drops_a_connection_that_closes_after_all(engine, get, client):
    def script(peer, request):
        peer.send(whole(b"ok", extra=b"connection: close\r\n"))
        peer.fin()

    engine.script = script
    for _ in range(3):
        assert (await get(b"POST", keep=True)).body == b"ok"
    assert len(engine.peers) == len(engine.requests) == 3
    async with asyncio.timeout(GUARD_S):
        while client.open_connections:
            await turns(1)
    assert client.idle_connections == 0


async def test_keep_does_not_keep_what_ends_by_closing(engine, get, client):
    def script(peer, request):
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nok")
        peer.fin()

    engine.script = script
    assert (await get(keep=True)).body == b"ok"
    assert client.idle_connections == 0


async def test_surplus_bytes_cost_the_connection(engine, get, client):
    engine.script = lambda peer, request: peer.send(whole(b"ok") + whole(b"for nobody"))
    for _ in range(2):
        assert (await get()).body == b"ok"
    assert len(engine.peers) == 2


async def test_reply_before_the_request_is_all_sent_costs_the_connection(engine, get, client):
    def refuse_early(peer):
        peer.transport.pause_reading()
        asyncio.get_running_loop().call_later(0.02, peer.send, whole(b"too large", status=413))

    engine.on_connect = refuse_early
    reply = await get(b"POST", body=bytes(16 << 20))
    assert (reply.status, reply.body) == (413, b"too large")
    assert client.idle_connections == 0
    async with asyncio.timeout(GUARD_S):
        while client.open_connections:
            await turns(1)
    engine.peers[0].transport.resume_reading()


class TestSizes:
    async def test_reply_too_large(self, engine, get, client):
        engine.script = lambda peer, request: peer.send(whole(bytes(1001)))
        assert len((await get(max_reply_bytes=1001)).body) == 1001
        with pytest.raises(TransportError) as caught:
            await get(max_reply_bytes=1000)
        assert caught.value.reason == "reply_too_large"
        assert not caught.value.unsent

    async def test_endless_reply_is_cut_off(self, engine, get, client):
        def script(peer, request):
            peer.send(chunked(bytes(65536), end=False))
            for _ in range(20):
                peer.send(b"10000\r\n%b\r\n" % bytes(65536))

        engine.script = script
        with pytest.raises(TransportError) as caught:
            await get(max_reply_bytes=200_000)
        assert caught.value.reason == "reply_too_large"
        await engine.peers[0].closed
        assert client.open_connections == 0

    async def test_bomb(self, engine, get, client):
        bomb = gzip.compress(bytes(1 << 26))
        engine.script = lambda peer, request: peer.send(whole(bomb, extra=b"content-encoding: gzip\r\n"))
        with pytest.raises(TransportError) as caught:
            await get()
        assert caught.value.reason == "reply_too_large"
        await engine.peers[0].closed

    async def test_limit_holds_for_the_expanded_body(self, engine, get):
        packed = gzip.compress(bytes(5000))
        engine.script = lambda peer, request: peer.send(whole(packed, extra=b"content-encoding: gzip\r\n"))
        with pytest.raises(TransportError) as caught:
            await get(max_reply_bytes=4999)
        assert caught.value.reason == "reply_too_large"

    async def test_error_reply_is_cut_and_the_connection_closed_at_once(self, engine, get, client):
        def script(peer, request):
            peer.send(b"HTTP/1.1 500 E\r\ncontent-length: 104857600\r\n\r\n" + b"x" * 70_000)

        engine.script = script
        reply = await get(max_error_bytes=65536)
        assert (reply.status, len(reply.body), reply.truncated) == (500, 65536, True)
        async with asyncio.timeout(GUARD_S):
            await engine.peers[0].closed
        assert client.open_connections == 0

    async def test_short_error_reply_is_whole_and_the_connection_stays(self, engine, get, client):
        engine.script = lambda peer, request: peer.send(whole(b"x" * 65536, status=422))
        reply = await get()
        assert (reply.status, len(reply.body), reply.truncated) == (422, 65536, False)
        assert client.idle_connections == 1


class TestDeadline:
    async def test_passes_while_waiting(self, engine, get, client):
        await get()  # with a connection at hand it is written before the time begins to count
        engine.script = lambda peer, request: None
        with pytest.raises(TransportError) as caught:
            await get(deadline_s=time.monotonic() + 0.05)
        assert (caught.value.reason, caught.value.connecting, caught.value.unsent) == ("timeout", False, False)
        await engine.peers[0].closed

    async def test_passes_in_the_body(self, engine, get, client):
        await get()
        engine.script = lambda peer, request: peer.send(chunked(b"a", end=False))
        with pytest.raises(TransportError) as caught:
            await get(deadline_s=time.monotonic() + 0.05)
        assert caught.value.reason == "timeout"
        await engine.peers[0].closed

    async def test_passed_before(self, engine, get, client):
        await get()
        with pytest.raises(TransportError) as caught:
            await get(deadline_s=time.monotonic() - 1000.0)
        assert (caught.value.reason, caught.value.unsent) == ("timeout", True)
        assert client.idle_connections == 1
        assert len(engine.requests) == 1

    async def test_passes_while_connecting(self, get, client, black_hole):
        with pytest.raises(TransportError) as caught:
            await get(address=black_hole, deadline_s=time.monotonic() + 0.05)
        assert (caught.value.reason, caught.value.connecting) == ("timeout", False)

    async def test_leaves_no_timer_behind_that_could_hit_the_next_request(self, engine, get, monkeypatch):
        await get()
        loop, timers = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def remember(*given, **more):
            timers.append(call_later(*given, **more))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", remember)
        await get(deadline_s=time.monotonic() + GUARD_S)
        assert timers
        assert all(timer.cancelled() for timer in timers)
        assert len(engine.peers) == 1


class TestCancellation:
    @pytest.mark.parametrize("delay", range(12))
    async def test_at_any_await_nothing_stays_in_use(self, engine, client, delay):
        engine.script = lambda peer, request: peer.send(chunked(b"a", end=False))
        task = asyncio.create_task(client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf))
        await turns(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(GUARD_S):
            while client.open_connections:
                await turns(1)
            for peer in engine.peers:
                await peer.closed

    async def test_while_waiting_on_a_warm_connection(self, engine, client, get):
        await get()
        engine.script = lambda peer, request: None
        task = asyncio.create_task(get(b"POST", deadline_s=time.monotonic() + GUARD_S))
        await engine.until(lambda: len(engine.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.idle_connections == 0
        async with asyncio.timeout(GUARD_S):
            await engine.peers[0].closed

    async def test_while_connecting(self, client, black_hole):
        task = asyncio.create_task(client.fetch(black_hole, b"GET", "/", [], deadline_s=math.inf))
        await turns(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.open_connections == 0


class TestClose:
    async def test_aclose_ends_what_runs(self, engine):
        client = HttpClient(connect_s=5.0)
        engine.script = lambda peer, request: None
        task = asyncio.create_task(client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf))
        await engine.until(lambda: engine.requests)
        await client.aclose()
        with pytest.raises(TransportError) as caught:
            await task
        assert caught.value.reason == "closed"
        assert client.open_connections == 0

    async def test_aclose_ends_what_connects(self, engine):
        client = HttpClient(connect_s=5.0)
        task = asyncio.create_task(client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf))
        await turns(1)
        await client.aclose()
        with pytest.raises(TransportError) as caught:
            await task
        assert caught.value.reason == "closed"

    async def test_nothing_goes_out_after_aclose(self, engine):
        client = HttpClient(connect_s=5.0)
        await client.aclose()
        with pytest.raises(TransportError) as caught:
            await client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf)
        assert (caught.value.reason, caught.value.unsent) == ("closed", True)
        assert engine.peers == []

    async def test_removed_address_loses_its_connections(self, engine, get, client):
        await get()
        client.close_address(engine.address)
        async with asyncio.timeout(GUARD_S):
            await engine.peers[0].closed
        assert client.idle_connections == 0
        await get()
        assert len(engine.peers) == 2

    async def test_idle_connections_are_closed_in_time(self, engine):
        client = HttpClient(connect_s=5.0, idle_s=0.02)
        await client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf)
        async with asyncio.timeout(GUARD_S):
            await engine.peers[0].closed
        assert client.idle_connections == 0
        await client.aclose()


async def test_bad_header_is_refused_and_nothing_is_sent(engine, get, client):
    with pytest.raises(ValueError, match="framing"):
        await get(headers=[(b"x", b"a\r\nb: c")])
    assert engine.peers == []


async def test_ipv6(client):
    engine = await Engine().listen("::1")
    reply = await client.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf)
    assert reply.status == 200
    assert b"host: [::1]:%d\r\n" % engine.address.port in engine.requests[0]
    await client.aclose()
    await engine.aclose()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=engine -keyout {key} -out {cert} "
        "-addext subjectAltName=IP:127.0.0.1",
        shell=True,
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with the openssl command")
async def test_https_checks_the_certificate(certificate):
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(*certificate)
    engine = await Engine().listen(ssl=serving)
    trusted = Peer(ssl.create_default_context(cafile=str(certificate[0])))
    trusting = HttpClient(connect_s=5.0, peers=Peers(trusted))
    for _ in range(3):
        reply = await trusting.fetch(engine.address, b"POST", "/", [], bytes(100_000), deadline_s=math.inf)
        assert reply.body == b"ok"
    whole = bytes(range(256)) * 4000
    body = LongBody([b"{", memoryview(whole)[:1000], b"," * 70_000, memoryview(whole), b"}"])
    reply = await trusting.fetch(engine.address, b"POST", "/", [], body, deadline_s=math.inf)
    assert reply.body == b"ok"
    assert engine.requests[-1].endswith(bytes(body))
    assert len(engine.peers) == 1
    await trusting.aclose()
    assert trusting.open_connections == 0

    strict = HttpClient(connect_s=5.0)
    with pytest.raises(TransportError) as caught:
        await strict.fetch(engine.address, b"GET", "/", [], deadline_s=math.inf)
    assert (caught.value.reason, caught.value.connecting) == ("tls_failed", True)
    await strict.aclose()
    await engine.aclose()
