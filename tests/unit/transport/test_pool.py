import asyncio

import pytest

from coordinator.core.instance import Address
from coordinator.transport.connection import Connection
from coordinator.transport.pool import SWEEPS_PER_IDLE_TIME, Pool

HERE = Address("10.0.0.1", 1025)
THERE = Address("10.0.0.2", 1025)


class Wire(asyncio.Transport):
    """A transport without a socket."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self.closing = False
        self.reading = True

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closing

    def abort(self):
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
async def pool():
    pool = Pool(idle_s=60.0, max_idle_per_address=3, clock=Clock())
    yield pool
    await pool.aclose()
    assert pool.open_count == pool.idle_count == 0


def connect(pool, address=HERE):
    connection = Connection(address, pool)
    connection.connection_made(Wire(connection))
    pool.add(connection)
    return connection


async def test_last_used_is_given_out_first_and_to_one_only(pool):
    first, second = connect(pool), connect(pool)
    for connection in (first, second):
        assert pool.put(connection, 0.0)
    assert [pool.take(HERE) for _ in range(3)] == [second, first, None]
    assert pool.take(THERE) is None


async def test_idle_ones_are_bounded_per_address(pool):
    assert [pool.put(connect(pool), 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert pool.put(connect(pool, THERE), 0.0)
    assert pool.idle_count == 4


async def test_a_closing_connection_is_passed_over(pool):
    alive, closing = connect(pool), connect(pool)
    pool.put(alive, 0.0)
    pool.put(closing, 0.0)
    closing._transport.closing = True
    assert pool.take(HERE) is alive
    closing.connection_lost(None)


@pytest.mark.parametrize("event", ["bytes", "eof", "lost"])
async def test_an_idle_connection_on_which_anything_happens_is_dropped(pool, event):
    connection = connect(pool)
    pool.put(connection, 0.0)
    if event == "bytes":
        connection.data_received(b"HTTP/1.1 408 X\r\n\r\n")
    elif event == "eof":
        connection.eof_received()
    else:
        connection.connection_lost(ConnectionResetError())
    assert pool.idle_count == 0
    assert not connection.usable
    await asyncio.sleep(0)
    assert pool.open_count == 0
    assert pool._sweeper is None


async def test_sweep_closes_what_was_idle_for_too_long(pool):
    old, young = connect(pool), connect(pool)
    pool.put(old, 900.0)
    pool.put(young, 990.0)
    pool.sweep()
    assert (old.usable, young.usable) == (False, True)
    pool._clock.now = 1049.9
    pool.sweep()
    assert young.usable
    pool._clock.now = 1050.0
    pool.sweep()
    assert not young.usable
    assert pool.idle_count == 0


async def test_one_timer_and_only_while_there_are_idle_connections(pool):
    assert pool._sweeper is None
    connections = [connect(pool) for _ in range(3)]
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    for connection in connections:
        pool.put(connection, 1000.0)
    timer = pool._sweeper
    assert before_s - 0.1 <= timer.when() - 60.0 / SWEEPS_PER_IDLE_TIME <= loop.time() + 0.1
    pool.sweep()
    assert pool._sweeper is not timer  # goes on
    timer.cancel()
    for connection in connections:
        connection.close()
    assert pool._sweeper is None
    pool.put(connect(pool), 1000.0)
    pool.take(HERE)
    pool.sweep()
    assert pool._sweeper is None


async def test_removed_address(pool):
    idle, busy, other = connect(pool), connect(pool), connect(pool, THERE)
    pool.put(idle, 0.0)
    pool.put(other, 0.0)
    pool.close_address(HERE)
    assert (idle.usable, busy.usable, other.usable) == (False, True, True)
    assert not pool.put(busy, 0.0)
    assert pool.put(connect(pool), 0.0)  # the same address again, known anew


async def test_aclose_waits_until_all_is_closed(pool):
    connections = [connect(pool), connect(pool, THERE)]
    pool.put(connections[0], 0.0)
    await pool.aclose()
    assert pool.open_count == 0
    assert not any(connection.usable for connection in connections)
