"""Keys that engines want: in each call to them, in place of what a client has sent."""

import math

import pytest
from scripted_engine import Notes, chunked, whole

from coordinator.core.instance import Address
from coordinator.transport import HttpClient, TransportError, open_link
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


class TestRefused:
    """Who sends credentials of its own is told apart where they are refused: it is nothing that the client did."""

    @pytest.fixture
    async def keyed(self):
        client = HttpClient(connect_s=5, peers=Peers(Peer(key=b"k1")))
        yield client
        await client.aclose()
        assert client.open_connections == 0

    @pytest.mark.parametrize("status", [401, 403])
    async def test_a_call(self, engine, keyed, status):
        engine.script = lambda peer, request: peer.send(whole(b'{"error":"secret words"}', status=status))
        with pytest.raises(TransportError) as caught:
            await keyed.fetch(engine.address, b"GET", "/v1/models", CLIENTS, deadline_s=math.inf)
        error = caught.value
        assert (error.reason, error.connecting, error.unsent) == ("key_refused", False, False)
        assert f"status {status}" in error.detail
        assert "secret words" not in str(error)

    @pytest.mark.parametrize("status", [401, 403])
    @pytest.mark.parametrize("reused", [False, True])
    async def test_a_stream(self, engine, keyed, status, reused):
        if reused:
            engine.script = lambda peer, request: peer.send(whole(b"warm"))
            await keyed.fetch(engine.address, b"GET", "/", (), deadline_s=math.inf)
            assert keyed.idle_connections == 1
        engine.script = lambda peer, request: peer.send(whole(b'{"error":"secret words"}', status=status))
        notes = Notes()
        await keyed.open_stream(engine.address, b"POST", "/v1/x", CLIENTS, b"{}", sink=notes)
        await notes.until(lambda: notes.over)
        assert ([error.reason for error in notes.errors], notes.heads, notes.body) == (["key_refused"], [], b"")

    async def test_other_answers_come_as_they_are(self, engine, keyed):
        engine.script = lambda peer, request: peer.send(whole(b"no", status=404))
        assert (await keyed.fetch(engine.address, b"GET", "/", (), deadline_s=math.inf)).status == 404
        notes = Notes()
        await keyed.open_stream(engine.address, b"POST", "/v1/x", (), b"{}", sink=notes)
        await notes.until(lambda: notes.over)
        assert (notes.heads[0][0], notes.body, notes.ends, notes.errors) == (404, b"no", 1, [])

    async def test_a_stream_that_breaks_before_its_head_is_lost_for_that_reason(self, engine, keyed):
        engine.script = lambda peer, request: peer.fin()
        notes = Notes()
        await keyed.open_stream(engine.address, b"POST", "/v1/x", (), b"{}", sink=notes)
        await notes.until(lambda: notes.over)
        assert ([error.reason for error in notes.errors], notes.heads) == (["closed"], [])

    async def test_without_a_key_of_ours_the_answer_is_the_clients(self, engine, client):
        engine.script = lambda peer, request: peer.send(whole(b"no", status=401))
        assert (await client.fetch(engine.address, b"GET", "/", CLIENTS, deadline_s=math.inf)).status == 401
        notes = Notes()
        await client.open_stream(engine.address, b"POST", "/v1/x", CLIENTS, b"{}", sink=notes)
        await notes.until(lambda: notes.over)
        assert (notes.heads[0][0], notes.ends, notes.errors) == (401, 1, [])
