import asyncio
import errno
import math
import socket
import ssl
import threading

import pytest
from scripted_engine import GUARD_S, Engine, turns

from coordinator.core.instance import Address
from coordinator.transport import TransportError
from coordinator.transport.connect import Connector
from coordinator.transport.errors import connect_error
from coordinator.transport.resolve import Resolver


class Wire(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport


def names(*answers):
    return Resolver(lambda host: [(0, 0, 0, "", (answer, 0)) for answer in answers])


async def failure(connector, address, remaining_s=math.inf):
    with pytest.raises(TransportError) as caught:
        async with asyncio.timeout(GUARD_S):
            await connector.open(address, Wire, remaining_s)
    assert caught.value.unsent
    return caught.value


async def test_open_sets_no_delay(engine):
    wire = await Connector(connect_s=5).open(engine.address, Wire)
    assert wire.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    wire.transport.abort()


async def test_refused(dead_address):
    error = await failure(Connector(connect_s=5), dead_address)
    assert (error.reason, error.connecting) == ("connect_refused", True)
    assert dead_address.netloc in error.detail


@pytest.mark.parametrize("remaining_s", [math.inf, 1000.0])
async def test_black_hole_ends_at_the_connect_limit(black_hole, remaining_s):
    error = await failure(Connector(connect_s=0.05), black_hole, remaining_s)
    assert (error.reason, error.connecting) == ("connect_timeout", True)


@pytest.mark.parametrize("connect_s", [0, 60])
async def test_the_callers_own_deadline_is_no_fault_of_the_instance(black_hole, connect_s):
    error = await failure(Connector(connect_s=connect_s), black_hole, 0.05)
    assert (error.reason, error.connecting) == ("timeout", False)


async def test_name_unknown():
    error = await failure(Connector(connect_s=5, resolver=names()), Address("p0.example", 80))
    assert (error.reason, error.connecting) == ("dns_failed", True)


async def test_look_up_that_hangs_is_within_the_limit():
    go = threading.Event()
    resolver = Resolver(lambda host: go.wait(GUARD_S) and [])
    assert (await failure(Connector(connect_s=0.05, resolver=resolver), Address("p0", 80))).reason == "connect_timeout"
    go.set()


async def test_every_address_of_a_name_is_tried(engine):
    resolver = names("127.0.0.2", "127.0.0.1")  # nobody listens on the first
    wire = await Connector(connect_s=5, resolver=resolver).open(Address("p0", engine.address.port), Wire)
    assert wire.transport.get_extra_info("peername")[0] == "127.0.0.1"
    wire.transport.abort()


async def test_black_holed_address_leaves_time_for_the_next(black_hole):
    listener = socket.create_server(("127.0.0.2", black_hole.port))
    try:
        resolver = names("127.0.0.1", "127.0.0.2")
        address = Address("p0", black_hole.port)
        try:
            wire = await Connector(connect_s=1.0, resolver=resolver).open(address, Wire)
        except TransportError:  # a machine with other work may take longer than what was left
            wire = await Connector(connect_s=10.0, resolver=resolver).open(address, Wire)
        assert wire.transport.get_extra_info("peername")[0] == "127.0.0.2"
        wire.transport.abort()
        await turns(2)
    finally:
        listener.close()


async def test_failed_connect_leads_to_a_new_look_up(engine):
    answers = ["127.0.0.2"]
    resolver = Resolver(lambda host: [(0, 0, 0, "", (answer, 0)) for answer in answers])
    connector, address = Connector(connect_s=5, resolver=resolver), Address("p0", engine.address.port)
    assert (await failure(connector, address)).reason == "connect_refused"
    answers[0] = "127.0.0.1"
    wire = await connector.open(address, Wire)
    wire.transport.abort()


async def test_ipv6():
    engine = await Engine().listen("::1")
    wire = await Connector(connect_s=5).open(engine.address, Wire)
    assert wire.transport.get_extra_info("peername")[0] == "::1"
    wire.transport.abort()
    await engine.aclose()


async def test_no_tls_on_the_other_side(engine):
    engine.on_connect = lambda peer: peer.send(b"HTTP/1.1 400 X\r\ncontent-length: 0\r\n\r\n")
    address = Address("127.0.0.1", engine.address.port, tls=True)
    error = await failure(Connector(connect_s=5), address)
    assert (error.reason, error.connecting) == ("tls_failed", True)


@pytest.mark.parametrize("delay", range(8))
async def test_cancelled_at_any_await_the_socket_is_closed(engine, delay):
    task = asyncio.create_task(Connector(connect_s=5).open(engine.address, Wire))
    await turns(delay)
    task.cancel()
    try:
        (await task).transport.abort()
    except asyncio.CancelledError:
        assert task.cancelled()
    for peer in engine.peers:
        async with asyncio.timeout(GUARD_S):
            await peer.closed


@pytest.mark.parametrize(
    ("raised", "reason", "connecting"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connect_refused", True),
        (TimeoutError(errno.ETIMEDOUT, "x"), "connect_timeout", True),
        (ssl.SSLCertVerificationError("x"), "tls_failed", True),
        (ConnectionResetError(errno.ECONNRESET, "x"), "connect_failed", True),
        (OSError(errno.EHOSTUNREACH, "x"), "connect_failed", True),
        (OSError(errno.EMFILE, "x"), "connect_failed", False),
        (OSError(errno.EADDRNOTAVAIL, "x"), "connect_failed", False),
    ],
)
def test_what_opening_raises_in_words(raised, reason, connecting):
    error = connect_error(raised, "10.0.0.1:80")
    assert (error.reason, error.connecting, error.unsent) == (reason, connecting, True)
    assert str(error).startswith(f"{reason}: 10.0.0.1:80")
