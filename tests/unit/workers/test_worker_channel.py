"""Messages between supervisor and worker, on a socket pair."""

import asyncio
import itertools
import random
import socket
import struct

import msgspec
import pytest
from engine_world import instance, until

from coordinator.core.instance import Capacity
from coordinator.workers import channel as channels
from coordinator.workers.channel import MAX_MESSAGE_BYTES, Channel
from coordinator.workers.messages import AskMetrics, Charge, Credit, Down, Drain, Serving, Start, Told, Up, View

START = Start(1, 2, 8, '{"server":{}}', 100, ["/x"])
VIEW = View(
    3,
    [(instance("p0"), 0), (instance("d0", peers=frozenset({"p0"}), capacity=Capacity(4, 100)), 7)],
    [0], [1], ["m"], any_name=False, pair=True, why="because",
)  # fmt: skip
MESSAGES = [
    START,
    VIEW,
    Told("mindie", b"\x00\xff" * 300),
    AskMetrics(1),
    Drain(float("inf")),
    Drain(0.5),
    Told("x", b""),
]


class End:
    """What came out at one end."""

    def __init__(self):
        self.taken = []
        self.ended = 0

    def over(self):
        self.ended += 1


def fed(data, cuts=()):
    """Messages of a channel that gets `data` in pieces, and how often it ended."""
    end = End()
    made = Channel(Down, end.taken.append, end.over)
    edges = [0, *cuts, len(data)]
    for start, stop in itertools.pairwise(edges):
        made.data_received(data[start:stop])
    return end


def packed(*messages):
    parts = [msgspec.msgpack.encode(message, enc_hook=dict) for message in messages]
    return b"".join(struct.pack("!I", len(part)) + part for part in parts)


async def test_every_split_gives_the_same_messages():
    data = packed(*MESSAGES)
    for at in range(len(data) + 1):
        end = fed(data, [at])
        assert (end.taken, end.ended) == (MESSAGES, 0), at
    assert fed(data, range(1, len(data))).taken == MESSAGES
    chance = random.Random(1)
    for _ in range(50):
        assert fed(data, sorted(chance.sample(range(1, len(data)), 9))).taken == MESSAGES


async def test_instances_arrive_as_they_were():
    (view,) = fed(packed(VIEW)).taken
    assert [found for found, _ in view.members] == [found for found, _ in VIEW.members]
    assert hash(view.members[1][0]) == hash(VIEW.members[1][0])
    assert view.members[1][0].key == VIEW.members[1][0].key


@pytest.mark.parametrize(
    "junk", [struct.pack("!I", 3) + b"\xc1\xc1\xc1", packed(Serving(1)), struct.pack("!I", 1) + b"\xa0", packed([1, 2])]
)
async def test_what_is_no_message_ends_it_once(junk):
    end = fed(packed(MESSAGES[0]) + junk + packed(MESSAGES[1]))
    assert (end.taken, end.ended) == ([MESSAGES[0]], 1)


async def test_an_endless_message_is_not_waited_for():
    assert fed(struct.pack("!I", MAX_MESSAGE_BYTES + 1)).ended == 1
    assert fed(struct.pack("!I", MAX_MESSAGE_BYTES)).ended == 0


async def test_after_the_end_nothing_is_taken():
    end = End()
    made = Channel(Down, end.taken.append, end.over)
    made.close()
    made.data_received(packed(MESSAGES[0]))
    made.connection_lost(None)
    assert (end.taken, end.ended) == ([], 0)


class Pair:
    """Two channels that are connected."""

    async def __aenter__(self):
        sockets = socket.socketpair()
        for sock in sockets:
            sock.setblocking(False)
        self.supervisor, self.worker = End(), End()
        self.up: Channel = await Channel.open(sockets[0], Up, self.supervisor.taken.append, self.supervisor.over)
        self.down: Channel = await Channel.open(sockets[1], Down, self.worker.taken.append, self.worker.over)
        return self

    async def __aexit__(self, *_):
        for made in (self.up, self.down):
            await made.aclose(1)


async def test_both_ways_in_order():
    async with Pair() as pair:
        for number in range(2000):
            pair.up.send(AskMetrics(number))
            pair.down.send(Credit(str(number), "u"))
        await until(lambda: len(pair.worker.taken) == len(pair.supervisor.taken) == 2000)
        assert pair.worker.taken == [AskMetrics(number) for number in range(2000)]
        assert [message.instance for message in pair.supervisor.taken] == [str(number) for number in range(2000)]


async def test_large_messages_go_through():
    async with Pair() as pair:
        told = [Told("mindie", bytes([number]) * 3_000_000) for number in range(4)]
        for message in told:
            pair.up.send(message)
        await until(lambda: len(pair.worker.taken) == 4)
        assert pair.worker.taken == told


async def test_what_was_sent_before_the_close_arrives():
    async with Pair() as pair:
        pair.down.send(Charge("d0", "u", "decode", "timeout", "x" * 1_000_000, connecting=False))
        await pair.down.aclose(5)
        await until(lambda: pair.supervisor.ended)
        assert len(pair.supervisor.taken) == 1
        pair.down.send(Credit("d0", "u"))  # and nothing happens
        assert pair.worker.ended == 0


async def test_the_other_end_goes():
    async with Pair() as pair:
        pair.down._transport.abort()
        await until(lambda: pair.supervisor.ended)
        pair.up.send(AskMetrics(1))
        await asyncio.sleep(0)
        assert (pair.supervisor.ended, pair.worker.ended) == (1, 1)


async def test_an_end_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(channels, "MAX_PENDING_BYTES", 1_000_000)
    async with Pair() as pair:
        pair.down._transport.pause_reading()
        sent = 0
        while not pair.supervisor.ended:
            pair.up.send(Told("mindie", b"x" * 100_000))
            sent += 1
            assert sent < 50, "it would pile up without end"
        assert pair.supervisor.ended == 1
        assert sent >= 10
        pair.up.send(AskMetrics(1))


async def test_closing_does_not_wait_for_one_that_does_not_read():
    async with Pair() as pair:
        pair.down._transport.pause_reading()
        pair.up.send(Told("mindie", b"x" * 5_000_000))
        await pair.up.aclose(0.01)
        pair.down._transport.resume_reading()
        await until(lambda: pair.worker.ended)
        assert pair.worker.taken == []
