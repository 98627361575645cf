"""Streams of small pieces are acknowledged seldom, other replies as the kernel likes."""

import asyncio
import socket
import struct

import pytest
from scripted_engine import GUARD_S, Home, Notes, chunked, whole

from coordinator.core.instance import Address
from coordinator.transport.connection import Connection
from coordinator.transport.request import Call

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux can be told")
PIECE = b"data: {}\n\n"
PIECES = 60
SEGMENTS_IN = 140  # where `struct tcp_info` of linux/tcp.h has tcpi_segs_in


class Transport:
    """Remembers what its socket is told, and after how many reads."""

    def __init__(self):
        self.reads = 0
        self.told = []

    def get_extra_info(self, name):
        assert name == "socket"
        return self

    def setsockopt(self, *option):
        assert option == (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        self.told.append(self.reads)

    def write(self, data):
        pass

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        pass


class World:
    def __init__(self):
        self.transport, self.notes = Transport(), Notes()
        self.now_s = 100.0
        self.connection = Connection(Address("127.0.0.1", 1), Home(), lambda: self.now_s)
        self.connection.connection_made(self.transport)

    def begin(self, *, flowing):
        self.transport.reads = 0
        self.transport.told.clear()
        self.connection.begin(Call(b"HEAD", b"", bodiless=False, flowing=flowing), self.notes)

    def read(self, data, after_s=0.01):
        self.now_s += after_s
        self.transport.reads += 1
        self.connection.data_received(data)

    def stream(self, *gaps_s):
        """A head, a piece after each of the gaps, and the end."""
        self.read(chunked(end=False))
        for gap_s in gaps_s:
            self.read(b"%x\r\n%b\r\n" % (len(PIECE), PIECE), gap_s)
        self.read(b"0\r\n\r\n", 1)


@pytest.fixture
async def world():
    return World()


@pytest.mark.parametrize(
    ("gaps_s", "told"),
    [
        ([0.01] * 200, [3]),
        ([0.02, 0.01, 0.03, 0.039, 0.03], [3]),
        ([0.5] + [0.01] * 9, [4]),
        ([0.03, 0.03, 0.01, 0.01], [5]),
        ([0.01, 0.01, 0.05, 0.01, 0.01, 1, 1, 0.001, 0.01], [3, 6, 10]),
        ([0.05] * 200, []),
        ([0.01, 0.03] * 100, []),
        ([0.01], []),
    ],
    ids=["steady", "not so steady", "late first piece", "faster later", "with pauses", "slow", "now and then", "one"],
)
async def test_a_stream_is_where_its_pieces_come_quickly(world, gaps_s, told):
    world.begin(flowing=True)
    world.stream(*gaps_s)
    assert world.transport.told == told
    assert world.notes.body == PIECE * len(gaps_s)


async def test_each_stream_of_a_connection_is(world):
    for _ in range(3):
        world.begin(flowing=True)
        world.stream(0.01, 0.01)
        assert world.transport.told == [3]


async def test_a_reply_in_one_read_is_not(world):
    world.begin(flowing=True)
    world.read(whole(b"ok"))
    assert world.notes.ends == 1
    assert world.transport.told == []


async def test_a_reply_that_is_no_stream_is_not(world):
    for flowing in (True, False):
        world.begin(flowing=flowing)
        world.stream(0.01, 0.01, 0.05, 0.01)
    assert world.transport.told == []


def segments_in(peer):
    """Packets that have come to the engine's end of the connection."""
    info = peer.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, SEGMENTS_IN)[0]


async def acknowledgements(engine, client):
    """How many a stream of PIECES pieces gets, each of which comes in a read of its own."""
    notes = Notes()
    engine.script = lambda peer, request: peer.send(chunked(end=False))
    async with asyncio.timeout(GUARD_S):
        stream = await client.open_stream(engine.address, b"POST", "/", (), b"{}", sink=notes)
    await notes.until(lambda: notes.heads)
    peer = engine.peers[-1]
    before = segments_in(peer)
    for count in range(1, PIECES + 1):
        peer.send(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        await notes.until(lambda count=count: len(notes.pieces) == count)
    found = segments_in(peer) - before
    stream.close()
    return found


async def test_an_engine_gets_one_for_two_pieces(engine, client):
    # where the process stands still for 40 ms the kernel falls back, and the client's clock here does not show it
    counts = []
    while len(counts) < 5 and (not counts or counts[-1] > PIECES * 2 // 3):
        counts.append(await acknowledgements(engine, client))
    assert counts[-1] <= PIECES * 2 // 3, counts
