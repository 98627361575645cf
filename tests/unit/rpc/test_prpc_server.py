"""The baidu_std server over real sockets."""

import asyncio
import contextlib
import gzip
import logging
import socket

import pytest
from engine_world import until

from coordinator.rpc.prpc import PrpcLimits, PrpcServer
from coordinator.wire.protobuf.brpc_pb2 import RpcMeta
from coordinator.wire.prpc import (
    BAD_REQUEST,
    GZIP,
    INTERNAL,
    NO_METHOD,
    NO_SERVICE,
    PayloadError,
    PrpcParser,
    encode_frame,
    encode_reply,
)

GUARD_S = 10.0


def call(method="echo", payload=b"", correlation_id=1, service="test.Service", **more):
    meta = RpcMeta(correlation_id=correlation_id, **more)
    meta.request.service_name = service
    meta.request.method_name = method
    return encode_frame(meta, payload)


def refuse(_payload, _caller):
    raise PayloadError(BAD_REQUEST, "not like this")


def fail(_payload, _caller):
    raise RuntimeError("a fault")


def name(payload, caller):
    before, caller.name = caller.name, payload.decode()
    return before.encode()


METHODS = {"test.Service": {"echo": lambda payload, _caller: payload, "name": name, "refuse": refuse, "fail": fail}}


class Caller:
    """A connection that reads replies by correlation id."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.parser = PrpcParser()

    async def replies(self, number):
        found = []
        async with asyncio.timeout(GUARD_S):
            while len(found) < number:
                data = await self.reader.read(65536)
                assert data, "closed"
                found += self.parser.feed(data)
        return [(f.meta.correlation_id, f.meta.response.error_code, f.payload) for f in found]

    async def closed(self):
        async with asyncio.timeout(GUARD_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        return True


@contextlib.asynccontextmanager
async def serving(methods=METHODS, clock=None, **limits):
    more = {"clock": clock} if clock else {}
    server = PrpcServer(methods, PrpcLimits(**limits), logging.getLogger("test.prpc"), **more)
    await server.listen("127.0.0.1", 0)
    writers = []

    async def connect():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        return Caller(reader, writer)

    try:
        yield server, connect
    finally:
        await server.aclose()
        assert server.connections == 0
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_calls_in_one_write_are_answered_each_under_its_id():
    async with serving() as (_, connect):
        caller = await connect()
        caller.writer.write(b"".join(call(payload=b"%d" % n, correlation_id=n) for n in (5, 3, 9)))
        assert await caller.replies(3) == [(5, 0, b"5"), (3, 0, b"3"), (9, 0, b"9")]


async def test_a_call_in_single_bytes_is_answered():
    async with serving() as (_, connect):
        caller = await connect()
        for byte in call(payload=b"abc", correlation_id=-7):
            caller.writer.write(bytes([byte]))
            await caller.writer.drain()
        assert await caller.replies(1) == [(-7, 0, b"abc")]


async def test_callers_are_told_apart_by_their_connections():
    async with serving() as (_, connect):
        for who in (b"one", b"two"):
            caller = await connect()
            caller.writer.write(call("name", who) + call("name", b"x"))
            assert [payload for *_, payload in await caller.replies(2)] == [b"", who]


async def test_gzip_calls_are_answered():
    async with serving() as (_, connect):
        caller = await connect()
        caller.writer.write(call(payload=gzip.compress(b"packed"), compress_type=GZIP))
        assert await caller.replies(1) == [(1, 0, b"packed")]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (call(service="no.Such"), NO_SERVICE),
        (call("none"), NO_METHOD),
        (call("refuse"), BAD_REQUEST),
        (call("fail"), INTERNAL),
        (call(compress_type=1), BAD_REQUEST),
        (call(payload=b"no gzip", compress_type=GZIP), BAD_REQUEST),
    ],
)
async def test_faults_of_one_call_leave_the_connection_alone(asked, code):
    async with serving() as (_, connect):
        caller = await connect()
        caller.writer.write(asked + call(payload=b"next", correlation_id=2))
        assert await caller.replies(2) == [(1, code, b""), (2, 0, b"next")]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"PRPC" + b"\xff" * 8, encode_reply(1, b"")])
async def test_what_is_no_call_ends_the_connection(data, caplog):
    async with serving() as (_, connect):
        caller = await connect()
        caller.writer.write(data)
        assert await caller.closed()
        assert "is closed" in caplog.text


async def test_a_frame_above_the_limit_ends_the_connection_before_its_body_comes():
    async with serving(max_body_bytes=1000) as (server, connect):
        caller = await connect()
        caller.writer.write(call(payload=b"x" * 2000)[:12])
        assert await caller.closed()
        assert server.connections == 0


async def test_a_frame_that_is_never_finished_ends_the_connection():
    now = [100.0]
    async with serving(clock=lambda: now[0], frame_s=20.0) as (server, connect):
        slow, quick = await connect(), await connect()
        slow.writer.write(call()[:-1])
        quick.writer.write(call(payload=b"x"))
        await quick.replies(1)
        await until(lambda: any(c.frame_since_s == 100.0 for c in server._connections))
        now[0] += 21
        server.expire(now[0])
        assert await slow.closed()
        quick.writer.write(call(payload=b"idle connections stay"))
        assert (await quick.replies(1))[0][2] == b"idle connections stay"


async def test_connections_above_the_limit_are_closed():
    async with serving(max_connections=1) as (server, connect):
        first = await connect()
        first.writer.write(call(payload=b"x"))
        await first.replies(1)
        second = await connect()
        assert await second.closed()
        first.writer.write(call(payload=b"y"))
        assert (await first.replies(1))[0][2] == b"y"
        assert server.connections == 1


async def test_a_caller_that_reads_no_replies_is_cut_off():
    async with serving(max_unsent_bytes=100_000) as (server, connect):
        caller = await connect()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GUARD_S):
                while server.connections:
                    caller.writer.write(call(payload=b"x" * 65536))
                    await asyncio.sleep(0)
        assert server.connections == 0


async def test_closing_ends_everything():
    async with serving() as (server, connect):
        caller = await connect()
        caller.writer.write(call(payload=b"x"))
        await caller.replies(1)
        await server.aclose()
        assert await caller.closed()
        await server.aclose()


@pytest.mark.parametrize("turns", range(5))
async def test_closing_ends_those_who_have_just_come(turns):
    if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        pytest.skip("asyncio's own server forgets a socket that it accepts while it is closed")
    async with serving() as (server, _):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.aclose()
            async with asyncio.timeout(GUARD_S):
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
