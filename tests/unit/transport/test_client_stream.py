import asyncio
import gzip

import pytest
from scripted_engine import GUARD_S, Notes, chunked, turns, whole

from coordinator.transport import HttpClient, TransportError

PIECES = [b'data: {"x":1}\n\n', 'data: {"x":"你好🌍"}\n\n'.encode(), b"data: [DONE]\n\n"]


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def start(client, engine, notes):
    async def open_stream(method=b"POST", target="/v1/completions", headers=(), body=b"{}", **options):
        address = options.pop("address", engine.address)
        options.setdefault("sink", notes)
        async with asyncio.timeout(GUARD_S):
            return await client.open_stream(address, method, target, headers, body, **options)

    return open_stream


@pytest.fixture
def warm(engine, client, start):
    """Leave one used connection in the pool."""

    async def use():
        first, script = Notes(), engine.script
        engine.script = lambda peer, request: peer.send(whole(b"warm"))
        await start(sink=first)
        await first.until(lambda: first.over)
        engine.script = script
        assert client.idle_connections == 1

    return use


async def all_closed(engine, client):
    async with asyncio.timeout(GUARD_S):
        for peer in engine.peers:
            await peer.closed
        while client.open_connections or client._retries:
            await turns(1)


async def test_pieces_arrive_as_they_come_and_the_connection_is_used_again(engine, client, notes, start):
    engine.script = lambda peer, request: peer.send(chunked(end=False))
    await start()
    await engine.until(lambda: engine.requests)
    for count, piece in enumerate(PIECES, 1):
        engine.peers[0].send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await notes.until(lambda count=count: len(notes.pieces) == count)
        assert notes.pieces[-1] == piece
    assert notes.over == 0
    engine.peers[0].send(b"0\r\n\r\n")
    await notes.until(lambda: notes.over)
    assert (notes.ends, notes.errors) == (1, [])
    assert notes.heads == [(200, ((b"transfer-encoding", b"chunked"),))]
    assert notes.times == sorted(notes.times)
    assert client.idle_connections == 1


async def test_each_chunk_of_one_read_is_one_piece(engine, notes, start):
    engine.script = lambda peer, request: peer.send(chunked(*PIECES))
    await start()
    await notes.until(lambda: notes.over)
    assert notes.pieces == PIECES


async def test_characters_cut_between_reads_stay_whole_in_sum(engine, notes, start):
    data = chunked(*(bytes([byte]) for byte in PIECES[1]))
    engine.script = lambda peer, request: [
        asyncio.get_running_loop().call_soon(peer.send, data[at : at + 1]) for at in range(len(data))
    ]
    await start()
    await notes.until(lambda: notes.over)
    assert (notes.body, notes.ends) == (PIECES[1], 1)


async def test_large_pieces(engine, notes, start):
    line = b"data: " + b"x" * (2 << 20) + b"\n\n"
    engine.script = lambda peer, request: peer.send(chunked(line, b"data: [DONE]\n\n"))
    await start()
    await notes.until(lambda: notes.over)
    assert notes.body == line + b"data: [DONE]\n\n"


async def test_error_statuses_are_replies_too(engine, client, notes, start):
    engine.script = lambda peer, request: peer.send(whole(b'{"error":1}', status=503))
    await start()
    await notes.until(lambda: notes.over)
    assert (notes.heads[0][0], notes.body, notes.ends) == (503, b'{"error":1}', 1)
    assert client.idle_connections == 1


async def test_compressed_stream_comes_out_plain(engine, notes, start):
    packed = gzip.compress(b"".join(PIECES))
    reply = chunked(packed[:7], packed[7:], extra=b"content-encoding: gzip\r\n")
    engine.script = lambda peer, request: peer.send(reply)
    await start()
    await notes.until(lambda: notes.over)
    assert (notes.body, notes.ends) == (b"".join(PIECES), 1)
    assert b"content-encoding" not in dict(notes.heads[0][1])


async def test_unframed_stream_ends_with_the_connection(engine, client, notes, start):
    def script(peer, request):
        peer.send(b"HTTP/1.0 200 OK\r\n\r\nab")
        peer.fin()

    engine.script = script
    await start()
    await notes.until(lambda: notes.over)
    assert (notes.body, notes.ends, notes.errors) == (b"ab", 1, [])
    await all_closed(engine, client)


@pytest.mark.parametrize("way", ["fin", "rst"])
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 2", chunked(end=False), chunked(PIECES[0], end=False)])
async def test_a_break_is_lost_and_never_an_end(engine, client, notes, start, sent, way):
    def script(peer, request):
        peer.send(sent)
        asyncio.get_running_loop().call_later(0.01, getattr(peer, way))

    engine.script = script
    await start()
    await notes.until(lambda: notes.over)
    assert notes.ends == 0
    assert [error.reason for error in notes.errors] == ["closed" if way == "fin" else "reset"]
    assert not notes.errors[0].unsent
    await turns(5)
    assert notes.over == 1
    assert client.open_connections == 0


async def test_unreadable_reply_is_lost_once(engine, client, notes, start):
    engine.script = lambda peer, request: peer.send(chunked(b"x", end=False) + b"zz\r\n")
    await start()
    await notes.until(lambda: notes.over)
    assert [error.reason for error in notes.errors] == ["bad_reply"]
    await all_closed(engine, client)
    assert notes.over == 1


async def test_head_limit(engine, client, notes, start):
    engine.script = lambda peer, request: peer.send(whole(b"x", extra=b"x: %b\r\n" % (b"y" * 2000)))
    await start(max_head_bytes=1000)
    await notes.until(lambda: notes.over)
    assert [error.reason for error in notes.errors] == ["bad_reply"]


async def test_no_connection_is_raised_and_the_sink_not_called(notes, start, dead_address):
    with pytest.raises(TransportError) as caught:
        await start(address=dead_address)
    assert caught.value.reason == "connect_refused"
    assert notes.over == 0


@pytest.mark.parametrize("delay", range(8))
async def test_cancelled_while_opening(engine, client, notes, start, delay):
    engine.script = lambda peer, request: None
    task = asyncio.create_task(start())
    await turns(delay)
    task.cancel()
    try:
        (await task).close()
    except asyncio.CancelledError:
        assert task.cancelled()
    await all_closed(engine, client)
    assert notes.over == 0


class TestClose:
    async def test_in_mid_stream(self, engine, client, notes, start):
        engine.script = lambda peer, request: peer.send(chunked(PIECES[0], end=False))
        stream = await start()
        await notes.until(lambda: notes.pieces)
        stream.close()
        stream.close()
        await all_closed(engine, client)
        assert notes.over == 0

    async def test_before_the_head(self, engine, client, notes, start):
        engine.script = lambda peer, request: None
        stream = await start()
        await engine.until(lambda: engine.requests)
        stream.close()
        await all_closed(engine, client)
        assert notes.over == 0

    async def test_from_inside_the_sink(self, engine, client, start):
        class Leaver(Notes):
            def data(self, data, now_s):
                super().data(data, now_s)
                stream.close()

        notes = Leaver()
        engine.script = lambda peer, request: peer.send(chunked(*PIECES))
        stream = await start(sink=notes)
        await all_closed(engine, client)
        assert notes.pieces == PIECES[:1]
        assert notes.over == 0

    async def test_from_inside_the_head(self, engine, client, start):
        class Leaver(Notes):
            def head(self, status, headers):
                super().head(status, headers)
                stream.close()

        notes = Leaver()
        engine.script = lambda peer, request: peer.send(chunked(*PIECES))
        stream = await start(sink=notes)
        await all_closed(engine, client)
        assert (len(notes.heads), notes.pieces, notes.over) == (1, [], 0)

    async def test_after_the_end_it_spares_the_next_request(self, engine, client, notes, start):
        engine.script = lambda peer, request: peer.send(whole(b"one"))
        stream = await start()
        await notes.until(lambda: notes.over)
        engine.script = lambda peer, request: peer.send(chunked(b"t", end=False))
        second = Notes()
        await start(sink=second)
        await second.until(lambda: second.pieces)
        stream.close()
        stream.pause()
        engine.peers[0].send(b"2\r\nwo\r\n0\r\n\r\n")
        await second.until(lambda: second.over)
        assert (second.body, second.ends) == (b"two", 1)
        assert len(engine.peers) == 1

    async def test_after_a_loss_it_does_nothing(self, engine, notes, start):
        engine.script = lambda peer, request: peer.fin()
        stream = await start()
        await notes.until(lambda: notes.over)
        stream.pause()
        stream.resume()
        stream.close()
        assert notes.over == 1


class TestFlow:
    async def test_pause_holds_the_engine_back_and_resume_lets_it_go_on(self, engine, notes, start):
        piece, count = bytes(1 << 16), 400  # 25 MiB: more than both sockets' buffers
        engine.script = lambda peer, request: peer.send(chunked(*[piece] * count))
        stream = await start()
        await notes.until(lambda: notes.pieces)
        stream.pause()
        stream.pause()
        got = -1
        while got != len(notes.body):  # what was under way when it was paused
            got = len(notes.body)
            await asyncio.sleep(0.02)
        assert got < len(piece) * count
        stream.resume()
        stream.resume()
        await notes.until(lambda: notes.over)
        assert (len(notes.body), notes.ends) == (len(piece) * count, 1)

    async def test_paused_at_its_end_the_connection_reads_on_for_the_next(self, engine, client, start, notes):
        class Pauser(Notes):
            def data(self, data, now_s):
                super().data(data, now_s)
                stream.pause()

        first = Pauser()
        engine.script = lambda peer, request: peer.send(whole(b"one"))
        stream = await start(sink=first)
        await first.until(lambda: first.over)
        assert first.ends == 1
        await start()
        await notes.until(lambda: notes.over)
        assert (notes.body, len(engine.peers)) == (b"one", 1)

    async def test_closed_while_paused(self, engine, client, notes, start):
        engine.script = lambda peer, request: peer.send(chunked(b"x", end=False))
        stream = await start()
        await notes.until(lambda: notes.pieces)
        stream.pause()
        stream.close()
        stream.resume()
        await all_closed(engine, client)
        assert notes.over == 0


class TestStale:
    @pytest.mark.parametrize("way", ["fin", "rst"])
    async def test_is_replaced_without_notice(self, engine, client, notes, start, warm, way):
        def script(peer, request):
            if len(peer.requests) > 1:
                getattr(peer, way)()
            else:
                peer.send(chunked(*PIECES))

        engine.script = script
        await warm()
        await start(body=b"again")
        await notes.until(lambda: notes.over)
        assert (notes.pieces, notes.ends, notes.errors) == (PIECES, 1, [])
        assert [request[-5:] for request in engine.requests[1:]] == [b"again", b"again"]

    async def test_alive_it_streams_straight_to_the_sink(self, engine, client, notes, start, warm):
        engine.script = lambda peer, request: peer.send(chunked(PIECES[0], end=False))
        await warm()
        stream = await start()
        assert stream._claim.sink is not notes
        await notes.until(lambda: notes.pieces)
        assert stream._claim.sink is notes
        engine.peers[0].send(b"1\r\nx\r\n0\r\n\r\n")
        await notes.until(lambda: notes.over)
        assert (notes.pieces, notes.ends, len(notes.heads)) == ([PIECES[0], b"x"], 1, 1)
        assert len(engine.peers) == 1

    async def test_is_reported_as_unsent_where_it_may_not_be_replaced(self, engine, notes, start, warm):
        engine.script = lambda peer, request: peer.fin()
        await warm()
        await start(retry_stale=False)
        await notes.until(lambda: notes.over)
        assert [(error.reason, error.unsent) for error in notes.errors] == [("closed", True)]
        assert len(engine.requests) == 2

    async def test_is_replaced_once_only(self, engine, notes, start, warm):
        engine.script = lambda peer, request: peer.fin()
        await warm()
        await start()
        await notes.until(lambda: notes.over)
        assert [(error.reason, error.unsent) for error in notes.errors] == [("closed", False)]
        assert len(engine.requests) == 3

    async def test_failure_after_its_head_is_lost(self, engine, notes, start, warm):
        def script(peer, request):
            peer.send(chunked(b"x", end=False))
            peer.fin()

        engine.script = script
        await warm()
        await start()
        await notes.until(lambda: notes.over)
        assert [(error.reason, error.unsent) for error in notes.errors] == [("closed", False)]
        assert len(engine.requests) == 2

    async def test_replacement_that_cannot_connect_is_lost(self, engine, notes, start, warm):
        engine.script = lambda peer, request: peer.fin()
        await warm()
        engine.server.close()
        await start()
        await notes.until(lambda: notes.over)
        assert [(error.reason, error.connecting) for error in notes.errors] == [("connect_refused", True)]

    @pytest.mark.parametrize("delay", range(6))
    async def test_closed_while_it_is_replaced(self, engine, client, notes, start, warm, delay):
        engine.script = lambda peer, request: peer.fin() if len(peer.requests) > 1 else None
        await warm()
        stream = await start()
        async with asyncio.timeout(GUARD_S):
            while stream._retry is None:
                await turns(1)
        await turns(delay)
        stream.close()
        await all_closed(engine, client)
        assert notes.over == 0

    async def test_pause_is_kept(self, engine, notes, start, warm):
        engine.script = lambda peer, request: peer.fin() if len(peer.requests) > 1 else peer.send(chunked(*PIECES))
        await warm()
        stream = await start()
        async with asyncio.timeout(GUARD_S):
            while stream._retry is None:
                await turns(1)
        stream.pause()
        await engine.until(lambda: len(engine.requests) == 3)
        await turns(5)
        assert notes.heads == []
        stream.resume()
        await notes.until(lambda: notes.over)
        assert notes.pieces == PIECES

    @pytest.mark.parametrize("delay", [0, 1, 3])
    async def test_client_closed_while_it_is_replaced(self, engine, notes, delay):
        client = HttpClient(connect_s=5.0)
        engine.script = lambda peer, request: peer.send(whole(b"x")) if len(peer.requests) == 1 else peer.fin()
        first = Notes()
        await client.open_stream(engine.address, b"GET", "/", [], sink=first)
        await first.until(lambda: first.over)
        engine.script = lambda peer, request: peer.fin() if len(peer.requests) > 1 else None
        stream = await client.open_stream(engine.address, b"GET", "/", [], sink=notes)
        async with asyncio.timeout(GUARD_S):
            while stream._retry is None:
                await turns(1)
        await turns(delay)
        await client.aclose()
        assert [error.reason for error in notes.errors] == ["closed"]
        assert client.open_connections == 0


async def test_aclose_tells_the_sink(engine, notes):
    client = HttpClient(connect_s=5.0)
    engine.script = lambda peer, request: peer.send(chunked(b"x", end=False))
    await client.open_stream(engine.address, b"GET", "/", [], sink=notes)
    await notes.until(lambda: notes.pieces)
    await client.aclose()
    assert [error.reason for error in notes.errors] == ["closed"]
    assert client.open_connections == 0


async def test_fault_of_a_sink_is_logged_and_ends_its_stream_alone(engine, client, start):
    class Broken(Notes):
        def data(self, data, now_s):
            raise ZeroDivisionError

    said = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    engine.script = lambda peer, request: peer.send(chunked(*PIECES))
    notes = Broken()
    await start(sink=notes)
    await notes.until(lambda: notes.over)
    assert [error.reason for error in notes.errors] == ["bad_reply"]
    assert [type(context["exception"]) for context in said] == [ZeroDivisionError]
    await all_closed(engine, client)


async def test_a_finished_reply_refers_to_nothing_any_more(engine, notes, start):
    engine.script = lambda peer, request: peer.send(chunked(*PIECES))
    stream = await start()
    reader = stream._claim
    await notes.until(lambda: notes.over)
    assert reader.sink is None
    assert reader._parser is None  # its callbacks are bound to the reader: a cycle
