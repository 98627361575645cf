"""Keys that engines want: in each call to them, in place of what a client has sent."""

import math

import pytest
from scripted_engine import Notes, chunked

from coordinator.core.instance import Address
from coordinator.transport import HttpClient, open_link
from coordinator.transport.peers import Peer, Peers
from coordinator.transport.request import HeaderBlock, encode_call

ADDRESS = Address("e", 1)
CLIENTS = (
    (b"traceparent", b"00-1"),
    (b"authorization", b"Bearer of-the-client"),
    (b"X-Api-Key", b"of-the-client"),
    (b"api-key", b"of-the-client"),
    (b"x-authorization-note", b"stays"),
)


@pytest.mark.parametrize("headers", [CLIENTS, HeaderBlock(CLIENTS)], ids=["pairs", "block"])
@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 70000], ids=["none", "small", "large"])
def test_the_engines_key_takes_the_place_of_the_clients(headers, body):
    head = b"".join(encode_call(b"POST", "/v1/x", ADDRESS, headers, body, b"k1"))
    assert b"of-the-client" not in head
    assert head.count(b"\r\nauthorization: Bearer k1\r\n") == 1
    assert b"\r\ntraceparent: 00-1\r\n" in head
    assert b"\r\nx-authorization-note: stays\r\n" in head


def test_without_one_nothing_is_touched():
    head, _ = encode_call(b"POST", "/v1/x", ADDRESS, CLIENTS, b"{}")
    assert head.count(b"of-the-client") == 3


async def test_calls_streams_and_links_carry_it(engine):
    peers = Peers(Peer(key=b"k1"))
    client = HttpClient(connect_s=5, peers=peers)
    try:
        await client.fetch(engine.address, b"GET", "/health", CLIENTS, deadline_s=math.inf)
        notes = Notes()
        await client.open_stream(engine.address, b"POST", "/v1/x", CLIENTS, b"{}", sink=notes)
        await engine.until(lambda: len(engine.requests) == 2)
        engine.script = lambda peer, request: peer.send(chunked(b"a", end=False))
        link = await open_link(engine.address, "/dresult", (), Notes(), connect_s=5, head_s=5, peers=peers)
        link.close()
    finally:
        await client.aclose()
    assert len(engine.requests) == 3
    for request in engine.requests:
        assert request.count(b"\r\nauthorization: Bearer k1\r\n") == 1
        assert b"of-the-client" not in request
