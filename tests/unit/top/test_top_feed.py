"""Listening to the feed: what comes, and in which words it is told that nothing does."""

import asyncio
import contextlib
import ssl

import pytest
from certificates import Authority

from coordinator.security.keys import Key, new_hash, split_hash
from coordinator.top.feed import FeedLost, KeyRefused, Source, listen

KEY = "the-key-of-ops-1"


async def take(source, count):
    found = []
    async with contextlib.aclosing(listen(source)) as events:
        async for event in events:
            found.append(event)
            if len(found) == count:
                break
    return found


class Canned:
    """A server that answers with bytes of the test's."""

    def __init__(self, answer):
        self._answer = answer

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answer)
        writer.close()


async def test_events(site):
    kinds = [kind for kind, _ in await take(Source(site.url), 3)]
    assert kinds == ["snapshot", "tick", "tick"]
    assert (await take(Source(f"{site.url}/"), 1))[0][0] == "snapshot"


async def test_the_end_of_it(site):
    async with contextlib.aclosing(listen(Source(site.url))) as events:
        await anext(events)
        stopping = asyncio.create_task(site.feed.aclose())
        with pytest.raises(FeedLost, match="the feed has ended"):
            async for _ in events:
                pass
        await stopping


async def test_nobody_is_there():
    with pytest.raises(FeedLost, match="cannot be reached"):
        await take(Source("http://127.0.0.1:1"), 1)


async def test_keys(site):
    site.keys = [Key(0, "ops", split_hash(new_hash(KEY))[1])]
    await site.stop()
    await site.start()
    with pytest.raises(KeyRefused, match="a management key is needed"):
        await take(Source(site.url), 1)
    with pytest.raises(KeyRefused, match="not accepted"):
        await take(Source(site.url, "not-the-key-of-ops-1"), 1)
    assert (await take(Source(site.url, KEY), 1))[0][0] == "snapshot"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n", "status 404: is this a management port"),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi", "there is no live feed"),
        (HEAD + b'event: tick\nid: 9\ndata: {"n":9}\n\n', "a part of the feed is missing"),
        (HEAD + b"event: tick\nid: 1\ndata: {\n\n", "what came is no live feed"),
        (HEAD + b"event: tick\nid: 1\ndata: {}\n\n", "what came is no live feed"),
        (HEAD + b"data: {}\n\n", "what came is no live feed"),
        (HEAD, "the feed has ended"),
        (b"nonsense\r\n\r\n", "closed without an answer: is this a management port"),
        (b"", "does it speak plain http"),
    ],
)  # fmt: skip
async def test_other_answers(answer, sentence):
    async with Canned(answer) as url:
        with pytest.raises(FeedLost, match=sentence):
            await take(Source(url), 1)


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def guarded(request, tmp_path):
    """A port that wants a certificate of its authority, (url, authority)."""
    authority = Authority(tmp_path)
    own = authority.issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    context.load_cert_chain(own.cert, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = request.param

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b'event: snapshot\ndata: {"n":4}\n\n')
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", authority
    server.close()
    await server.wait_closed()


async def test_a_port_that_wants_a_certificate(guarded, tmp_path):
    url, authority = guarded
    (tmp_path / "other").mkdir()

    def bundle(issued):
        file = issued.cert.with_suffix(".both")
        file.write_bytes(issued.cert.read_bytes() + issued.key.read_bytes())
        return file

    with pytest.raises(FeedLost, match=r"want a certificate of yours\? Give it with --cert-file"):
        await take(Source(url, ca_file=authority.file), 1)
    strange = bundle(Authority(tmp_path / "other").issue("stranger"))
    with pytest.raises(FeedLost, match="accept the certificate of --cert-file"):
        await take(Source(url, ca_file=authority.file, cert_file=strange), 1)
    ours = bundle(authority.issue("ops"))
    assert await take(Source(url, ca_file=authority.file, cert_file=ours), 1) == [("snapshot", {"n": 4})]


async def test_comments_are_passed_over():
    async with Canned(HEAD + b'retry: 1\n\n: still there\n\nevent: snapshot\nid: 4\ndata: {"n":4}\n\n') as url:
        assert await take(Source(url), 1) == [("snapshot", {"n": 4})]


def test_trust():
    assert Source("http://a").trust() is True
    assert isinstance(Source("https://a").trust(), ssl.SSLContext)


def test_trust_in_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        Source("https://a", ca_file=tmp_path / "no.pem").trust()
