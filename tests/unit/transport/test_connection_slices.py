"""A long request body goes out slice by slice."""

import pytest
from scripted_engine import Home, Notes, turns, whole

from coordinator.core.body import LongBody
from coordinator.core.instance import Address
from coordinator.transport.connection import SLICE_BYTES, Connection
from coordinator.transport.errors import TransportError
from coordinator.transport.request import Call

BODY = bytes(range(256)) * (SLICE_BYTES // 256) * 3 + b"the rest"


class Socket:
    """A transport that keeps what is written, and is full when a test says so."""

    def __init__(self):
        self.writes = []
        self.protocol = None
        self.full = self.closing = False

    def write(self, data):
        assert not self.closing
        self.writes.append(bytes(data))
        if self.full:
            self.protocol.pause_writing()

    def writelines(self, pieces):  # one system call
        self.write(b"".join(pieces))

    def abort(self):
        self.closing = True

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return 0


class World:
    def __init__(self):
        self.home, self.socket, self.notes = Home(), Socket(), Notes()
        self.connection = self.socket.protocol = Connection(Address("127.0.0.1", 1), self.home)
        self.connection.connection_made(self.socket)

    def begin(self, body=BODY):
        return self.connection.begin(Call(b"HEAD", body, bodiless=False), self.notes)

    @property
    def sizes(self):
        return [len(data) for data in self.socket.writes]


@pytest.fixture
async def world():
    return World()


async def test_one_slice_in_a_turn_of_the_loop(world):
    world.begin()
    assert world.sizes == [4 + SLICE_BYTES]
    await turns(1)
    assert world.sizes == [4 + SLICE_BYTES, SLICE_BYTES]
    await turns(5)
    assert world.sizes == [4 + SLICE_BYTES, SLICE_BYTES, SLICE_BYTES, 8]
    assert b"".join(world.socket.writes) == b"HEAD" + BODY


@pytest.mark.parametrize("made", [bytes, lambda body: LongBody([body[:9], memoryview(body)[9:]])])
async def test_a_body_of_one_slice_is_written_at_once(world, made):
    world.begin(made(BODY[:SLICE_BYTES]))
    assert world.sizes == [4 + SLICE_BYTES]


async def test_a_body_in_parts_is_cut_into_the_same_slices(world):
    world.begin(LongBody([BODY[:9], memoryview(BODY)[9:]]))
    await turns(5)
    assert world.sizes == [4 + SLICE_BYTES, SLICE_BYTES, SLICE_BYTES, 8]
    assert b"".join(world.socket.writes) == b"HEAD" + BODY


async def test_an_engine_that_is_slow_is_waited_for(world):
    world.socket.full = True
    world.begin()
    for number in range(1, 4):
        await turns(5)
        assert len(world.sizes) == number
        world.connection.resume_writing()
    world.connection.resume_writing()
    await turns(5)
    assert b"".join(world.socket.writes) == b"HEAD" + BODY


async def test_a_request_that_is_given_up_is_not_sent_to_its_end(world):
    claim = world.begin()
    world.connection.abandon(claim)
    world.connection.resume_writing()
    await turns(5)
    assert world.sizes == [4 + SLICE_BYTES]


async def test_a_lost_connection_gets_nothing_more(world):
    world.begin()
    world.socket.closing = True
    world.connection.connection_lost(ConnectionResetError())
    await turns(5)
    assert world.sizes == [4 + SLICE_BYTES]
    assert isinstance(world.notes.errors[0], TransportError)


async def test_a_reply_to_a_half_sent_request_costs_the_connection(world):
    world.begin()
    world.connection.data_received(whole(b"no", status=413))
    await turns(5)
    assert (world.notes.body, world.notes.ends) == (b"no", 1)
    assert world.socket.closing
    assert not world.home.kept
    assert world.sizes == [4 + SLICE_BYTES]


async def test_a_reply_to_a_sent_request_does_not(world):
    world.begin()
    await turns(5)
    world.connection.data_received(whole(b"ok"))
    assert world.home.kept == 1
    assert not world.socket.closing
