import asyncio
import time

import pytest
from scripted_engine import GUARD_S, Engine, Notes, turns, whole

from coordinator.transport import TransportError, open_link
from coordinator.transport.opening import MAX_HEAD_BYTES, Opening
from coordinator.transport.peers import Peer, Peers

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b'd\r\nka:heartbeat\0\r\n1d\r\nreqId:1\0data:data: {"x":1}\n\n\0\r\n'


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def link(engine, notes):
    links = []

    async def connect(address=None, **options):
        options = {"connect_s": 5.0, "head_s": 5.0, **options}
        async with asyncio.timeout(GUARD_S):
            links.append(
                await open_link(address or engine.address, "/dresult", [(b"user-agent", b"x")], notes, **options)
            )
        return links[-1]

    yield connect
    for each in links:
        each.close()


async def failure(link, **options):
    with pytest.raises(TransportError) as caught:
        await link(**options)
    return caught.value


async def closed(engine):
    async with asyncio.timeout(GUARD_S):
        for peer in engine.peers:
            await peer.closed


async def test_bytes_arrive_as_they_are_on_the_wire(engine, notes, link):
    engine.script = lambda peer, request: peer.send(HEAD)
    before_s = time.monotonic()
    await link()
    assert engine.requests == [
        b"GET /dresult HTTP/1.1\r\nhost: %b\r\nuser-agent: x\r\n\r\n" % engine.address.netloc.encode()
    ]
    assert notes.pieces == []
    for at in range(len(CHUNKS)):
        engine.peers[0].send(CHUNKS[at : at + 1])
        await turns(1)
    await notes.until(lambda: len(notes.body) == len(CHUNKS))
    assert notes.body == CHUNKS
    assert before_s <= notes.times[0] <= notes.times[-1] <= time.monotonic()
    assert notes.over == 0


async def test_bytes_together_with_the_head(engine, notes, link):
    engine.script = lambda peer, request: peer.send(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + CHUNKS)
    await link()
    await notes.until(lambda: notes.pieces)
    assert notes.body == CHUNKS


async def test_large_reads(engine, notes, link):
    frame = b"200000\r\n%b\r\n" % bytes(0x200000)
    engine.script = lambda peer, request: peer.send(HEAD + frame)
    await link()
    await notes.until(lambda: len(notes.body) == len(frame))
    assert notes.body == frame


async def test_an_ended_chunked_body_is_the_readers_business(engine, notes, link):
    engine.script = lambda peer, request: peer.send(HEAD + b"0\r\n\r\n")
    await link()
    await notes.until(lambda: notes.pieces)
    assert (notes.body, notes.over) == (b"0\r\n\r\n", 0)


@pytest.mark.parametrize(("way", "reason"), [("fin", "closed"), ("rst", "reset")])
async def test_loss_is_told_once(engine, notes, link, way, reason):
    engine.script = lambda peer, request: peer.send(HEAD + CHUNKS)
    opened = await link()
    await notes.until(lambda: notes.pieces)
    getattr(engine.peers[0], way)()
    await notes.until(lambda: notes.over)
    assert [error.reason for error in notes.errors] == [reason]
    await turns(5)
    opened.close()
    assert notes.over == 1


async def test_loss_right_after_the_head(engine, notes, link):
    def script(peer, request):
        peer.send(HEAD)
        peer.fin()

    engine.script = script
    await link()
    await notes.until(lambda: notes.over)
    assert [error.reason for error in notes.errors] == ["closed"]


async def test_close_is_silent_and_idempotent(engine, notes, link):
    engine.script = lambda peer, request: peer.send(HEAD + CHUNKS)
    opened = await link()
    await notes.until(lambda: notes.pieces)
    opened.close()
    opened.close()
    await closed(engine)
    await turns(5)
    assert notes.over == 0


async def test_close_from_inside_the_reader(engine, link, notes):
    engine.script = lambda peer, request: peer.send(HEAD)
    opened = await link()
    feed = notes.feed
    notes.feed = lambda data, now_s: (feed(data, now_s), opened.close())
    engine.peers[0].send(CHUNKS)
    await closed(engine)
    assert (notes.body, notes.over) == (CHUNKS, 0)


class TestRefusals:
    TEXT = b'{"message":"Non DMI does not support dresult request"}'

    @pytest.mark.parametrize("status", [400, 404, 503])
    async def test_status_and_text_are_for_the_log(self, engine, notes, link, status):
        engine.script = lambda peer, request: peer.send(whole(self.TEXT, status=status))
        error = await failure(link)
        assert (error.reason, error.connecting) == ("bad_reply", False)
        assert f"status {status}: {self.TEXT.decode()}" in error.detail
        await closed(engine)
        assert (notes.pieces, notes.over) == ([], 0)

    async def test_long_text_is_cut(self, engine, link):
        engine.script = lambda peer, request: peer.send(b"HTTP/1.1 500 E\r\n\r\n" + b"x" * 100_000)
        error = await failure(link)
        assert 4096 <= len(error.detail) < 4200

    async def test_text_that_ends_with_the_connection(self, engine, link):
        def script(peer, request):
            peer.send(b"HTTP/1.1 400 B\r\n\r\nno")
            peer.fin()

        engine.script = script
        error = await failure(link)
        assert error.detail.endswith("status 400: no")

    async def test_text_that_does_not_come(self, engine, link):
        engine.script = lambda peer, request: peer.send(b"HTTP/1.1 400 B\r\ncontent-length: 9\r\n\r\nno")
        for head_s in (0.05, 0.5, 5.0):  # the head itself must have come by then, which takes time on a busy machine
            error = await failure(link, head_s=head_s)
            if error.reason != "timeout":
                break
        assert error.reason == "bad_reply"
        assert error.detail.endswith("status 400: no")

    @pytest.mark.parametrize(
        "reply",
        [whole(b"hello"), b"HTTP/1.1 200 OK\r\n\r\n", HEAD[:-2] + b"content-encoding: gzip\r\n\r\n"],
    )
    async def test_not_plain_chunks(self, engine, link, reply):
        engine.script = lambda peer, request: peer.send(reply)
        error = await failure(link)
        assert error.reason == "bad_reply"
        assert "200" in error.detail
        await closed(engine)

    async def test_not_http(self, engine, link):
        engine.script = lambda peer, request: peer.send(b"SSH-2.0-x\r\n\r\n")
        assert (await failure(link)).reason == "bad_reply"

    async def test_endless_head(self, engine, link):
        engine.script = lambda peer, request: peer.send(b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1))
        assert (await failure(link)).reason == "bad_reply"


@pytest.mark.parametrize(("way", "reason"), [("fin", "closed"), ("rst", "reset")])
@pytest.mark.parametrize("sent", [b"", HEAD[:30]])
async def test_loss_before_the_head_is_raised(engine, notes, link, sent, way, reason):
    def script(peer, request):
        peer.send(sent)
        asyncio.get_running_loop().call_later(0.01, getattr(peer, way))

    engine.script = script
    error = await failure(link)
    assert error.reason == reason
    assert notes.over == 0


async def test_no_head_in_time(engine, notes, link):
    engine.script = lambda peer, request: peer.send(HEAD[:30])
    assert (await failure(link, head_s=0.05)).reason == "timeout"
    await closed(engine)
    assert notes.over == 0


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("key", "reason"), [(b"k1", "key_refused"), (b"", "bad_reply")])
async def test_a_key_that_is_not_taken_is_told_from_other_refusals(engine, link, status, key, reason):
    engine.script = lambda peer, request: peer.send(whole(b"who are you", status=status))
    error = await failure(link, peers=Peers(Peer(key=key)))
    assert error.reason == reason
    assert f"status {status}" in error.detail
    assert (b"authorization: Bearer k1" in engine.requests[0]) is bool(key)


async def test_no_connection(link, dead_address, black_hole):
    assert (await failure(link, address=dead_address)).reason == "connect_refused"
    assert (await failure(link, address=black_hole, connect_s=0.05)).reason == "connect_timeout"


async def test_closed_before_the_request(engine, link):
    engine.on_connect = lambda peer: peer.fin()
    assert (await failure(link)).reason in {"closed", "reset"}


@pytest.mark.parametrize("delay", range(10))
async def test_cancelled_at_any_await(engine, notes, link, delay):
    engine.script = lambda peer, request: peer.send(HEAD[:30])
    task = asyncio.create_task(link())
    await turns(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await closed(engine)
    assert notes.over == 0


async def test_ipv6(notes, link):
    engine = await Engine().listen("::1")
    engine.script = lambda peer, request: peer.send(HEAD + CHUNKS)
    (await link(engine.address)).close()
    await engine.aclose()


def test_opening_split_at_every_byte():
    data = b"HTTP/1.1 102 P\r\n\r\n" + HEAD + CHUNKS
    for cut in range(len(data) + 1):
        opening, rest = Opening(), b""
        for piece in (data[:cut], data[cut:]):
            rest += piece if opening.accepted else opening.feed(piece)
        assert opening.accepted
        assert rest == CHUNKS


def test_refusal_split_at_every_byte():
    data = whole(b"no", status=400)
    for cut in range(len(data) + 1):
        opening = Opening()
        for piece in (data[:cut], data[cut:]):
            if opening.refusal is None:
                assert opening.feed(piece) == b""
        assert opening.refusal == "status 400: no"
        assert not opening.accepted
