"""Channels over real sockets: health, connecting, TLS, and what a worker's death looks like."""

import asyncio
import socket
import subprocess
import sys

import grpc
import pytest
from disagg_workers import FakeWorker, says, token_message
from disagg_world import World, ended, tokens_of
from engine_world import GUARD_S, Watcher, context, instance, until

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Address
from coordinator.core.view import ClusterView
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.engines.disaggpb.channel import Call, Worker
from coordinator.engines.disaggpb.settings import MISSING, channel_settings, check_settings


def worker(address, *, connect_s=GUARD_S, options=None, **settings):
    made = instance("d0", address, engine="disaggpb")
    return Worker(made, channel_settings(check_settings(settings), options or {}), connect_s)


async def failure_of(made, within_s=GUARD_S):
    with pytest.raises(EngineFailed) as caught:
        await made.probe(within_s)
    assert (caught.value.instance_id, caught.value.side) == ("d0", "decode")
    return caught.value


# --- health


@pytest.mark.parametrize("health", [None, 1], ids=["no health service", "serving"])
async def test_healthy(health):
    fake = await FakeWorker().listen()
    fake.health = health
    made = worker(fake.address)
    for _ in range(3):
        await made.probe(GUARD_S)
    assert fake.probes == 3
    await made.aclose()
    await fake.aclose()


@pytest.mark.parametrize("health", [0, 2, 3], ids=["unknown", "not serving", "service unknown"])
async def test_a_worker_that_says_that_it_does_not_serve(health):
    fake = await FakeWorker().listen()
    fake.health = health
    made = worker(fake.address)
    error = await failure_of(made)
    assert (error.reason, error.connecting) == ("engine_error", False)
    fake.health = 1
    await made.probe(GUARD_S)
    await made.aclose()
    await fake.aclose()


async def test_a_dead_worker_is_found_without_a_request_and_found_again():
    """An idle channel is not taken for a healthy one: the original gateway's flaw."""
    fake = await FakeWorker().listen()
    port = fake.address.port
    made = worker(fake.address, reconnect_s=0.1)
    await made.probe(GUARD_S)
    await fake.aclose()
    async with asyncio.timeout(GUARD_S):
        while not (await failure_of(made)).connecting:  # gRPC takes a moment to see that the connection has ended
            pass
    again = await FakeWorker().listen(port)
    async with asyncio.timeout(GUARD_S):
        while True:
            try:
                await made.probe(GUARD_S)
                break
            except EngineFailed:
                await asyncio.sleep(0.02)
    await made.aclose()
    await again.aclose()


async def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        made = worker(Address("127.0.0.1", taken.getsockname()[1]))
        error = await failure_of(made)
    assert (error.reason, error.connecting) == ("connect_refused", True)
    assert "127.0.0.1" not in error.message
    await made.aclose()


async def test_somebody_who_never_answers():
    """The connection is made by the kernel, and nobody speaks HTTP/2 on it."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = Address("127.0.0.1", mute.getsockname()[1])
        made = worker(address, connect_s=0.1)
        error = await failure_of(made)
        assert error.connecting
        assert error.reason == "connect_timeout"
        await made.aclose()


async def test_a_check_that_takes_too_long():
    fake = await FakeWorker().listen()
    fake.health = "hang"
    made = worker(fake.address)
    await made.call("/disagg.DecodeWorker/Decode", lambda: b"", float("inf"))  # connected
    error = await failure_of(made, 0.1)
    assert error.reason == "timeout"
    await made.aclose()
    await fake.aclose()


async def test_something_else_listens_there():
    async def http(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    made = worker(Address("127.0.0.1", server.sockets[0].getsockname()[1]), connect_s=0.5)
    error = await failure_of(made)
    assert error.connecting
    await made.aclose()
    server.close()


async def test_a_closed_channel():
    fake = await FakeWorker().listen()
    made = worker(fake.address)
    await made.probe(GUARD_S)
    await made.aclose()
    assert (await failure_of(made)).reason == "closed"
    with pytest.raises(EngineFailed) as caught:
        await made.call("/disagg.DecodeWorker/Decode", lambda: b"", float("inf"))
    assert caught.value.reason == "closed"
    await made.aclose()
    await fake.aclose()


async def test_a_cancelled_wait_for_a_connection():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        made = worker(Address("127.0.0.1", mute.getsockname()[1]))
        calling = asyncio.create_task(made.call("/disagg.DecodeWorker/Decode", lambda: b"", float("inf")))
        await asyncio.sleep(0.05)
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        await made.aclose()


async def test_a_request_is_not_kept_as_long_as_its_call():
    fake = await FakeWorker().listen()
    made = worker(fake.address)
    taken = []

    def request():
        taken.append(1)
        return b"\x0a\x011\x1a\x01\x05"

    call = await made.call("/disagg.DecodeWorker/Decode", request, float("inf"))
    assert isinstance(call, Call)
    assert await call.read()
    assert taken == [1]
    assert await call.read() is None
    call.part()
    call.cancel()
    await made.aclose()
    await fake.aclose()


# --- the engine around them


async def test_attached_detached_and_probed():
    async with World() as world:
        one = world.instances["p0"]
        assert await world.engine.probe(one) is None
        await world.engine.detach(one)
        with pytest.raises(EngineFailed) as caught:
            await world.engine.probe(one)
        assert caught.value.reason == "closed"
        await world.engine.detach(one)
        watcher = Watcher()
        world.engine.attach(one, watcher)
        assert watcher.up
        assert (await world.run()).error is None


async def test_without_grpc_an_instance_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "coordinator.engines.disaggpb.channel", None)
    engine = DisaggpbEngine(context())
    watcher = Watcher()
    engine.attach(instance("p0"), watcher)
    assert watcher.told == [MISSING]
    await engine.aclose()


def test_the_table_needs_no_grpc():
    """The module is imported with all others; gRPC is not."""
    code = "import sys, coordinator.engines.table; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


async def test_a_worker_that_dies_in_the_middle():
    async with World(decodes=2) as world:
        first = world.worker("d0")

        async def dies(ask):
            stop.append(asyncio.create_task(first.server.stop(None)))
            await asyncio.Event().wait()
            yield b""

        stop = []
        first.decode = dies
        client = await world.run()
        assert client.error is None
        assert world.members.charged[0][0] == "d0"
        assert len(world.calls("Prefill")) == 1
        await asyncio.gather(*stop)


# --- TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """An authority, and certificates of a worker and of a coordinator."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name in ("worker.test", "coordinator.test"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text(f"subjectAltName=DNS:{name}\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "ext", "-out", f"{name}.pem")  # fmt: skip
    return folder


def secured(pki, *, clients=False):
    """A worker with TLS, which with `clients` wants a certificate of its callers."""
    pair = [((pki / "worker.test.key").read_bytes(), (pki / "worker.test.pem").read_bytes())]
    ca = (pki / "ca.pem").read_bytes() if clients else None
    return FakeWorker(credentials=grpc.ssl_server_credentials(pair, ca, require_client_auth=clients))


@pytest.mark.parametrize("clients", [False, True], ids=["server alone", "both sides"])
@pytest.mark.parametrize("where", ["settings", "options"])
async def test_tls(pki, clients, where):
    keys = {"ca_file": str(pki / "ca.pem"), "server_name": "worker.test"}
    if clients:
        keys |= {"cert_file": str(pki / "coordinator.test.pem"), "key_file": str(pki / "coordinator.test.key")}
    given = {"settings": keys} if where == "settings" else {"options": {"p0": keys, "d0": keys}}
    async with World(workers={name: secured(pki, clients=clients) for name in ("p0", "d0")}, **given) as world:
        for one in world.instances.values():
            assert one.address.tls
            await world.engine.probe(one)
        world.script(decode=says(4, 2))
        assert tokens_of(await world.run()) == ([4, 2], "stop")


@pytest.mark.parametrize(
    "settings",
    [{}, {"server_name": "worker.test"}, {"ca_file": "ca.pem"}, {"ca_file": "ca.pem", "server_name": "other.test"}],
    ids=["nothing", "no authority", "no name", "another name"],
)
async def test_certificates_are_checked(pki, settings):
    fake = await secured(pki).listen()
    given = {key: str(pki / value) if key == "ca_file" else value for key, value in settings.items()}
    made = worker(fake.address, **given)
    error = await failure_of(made)
    assert (error.reason, error.connecting) == ("tls_failed", True), error.detail
    await made.aclose()
    await fake.aclose()


async def test_a_worker_that_wants_a_certificate(pki):
    fake = await secured(pki, clients=True).listen()
    made = worker(fake.address, ca_file=str(pki / "ca.pem"), server_name="worker.test")
    error = await failure_of(made)
    assert error.instance_id == "d0"
    await made.aclose()
    await fake.aclose()


# --- keep-alive


async def test_pings_find_a_silent_peer():
    """Between us and the worker everything is lost at once; without pings nobody would notice."""
    settings = {"keepalive_s": 0.2, "keepalive_timeout_s": 0.2}
    async with World(attempts=1, settings=settings) as world:
        relay = await Lossy(world.worker("d0").address.port).listen()
        one = instance("d0", relay.address, engine="disaggpb")
        await world.engine.detach(world.instances["d0"])
        world.engine.attach(one, Watcher())
        world.scheduler.on_view(ClusterView(2, ready=(world.instances["p0"], one)))
        world.script(decode=hang_after_first)
        client = await begun(world)
        relay.lossy = True
        await ended(client)
        assert isinstance(client.error, EngineFailed)
        assert client.error.reason == "reset"
        relay.close()


async def begun(world):
    """A request whose stream has begun; some before it may fail, for on a slow machine pings are answered late."""
    async with asyncio.timeout(GUARD_S):
        while True:
            client = world.start()
            await until(lambda client=client: client.writes or client.task.done())
            if client.writes:
                return client
            await ended(client)


async def hang_after_first(ask):
    yield b"\x10\x05"
    await asyncio.Event().wait()


class Lossy:
    """Passes bytes on until told to lose them."""

    def __init__(self, port):
        self.port = port
        self.lossy = False
        self.tasks = set()
        self.writers = []

    async def listen(self):
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self.server.sockets[0].getsockname()[1])
        return self

    async def _accept(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, back]
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader, writer):
        while data := await reader.read(65536):
            if not self.lossy:
                writer.write(data)
        writer.close()

    def close(self):
        self.server.close()
        for writer in self.writers:
            writer.close()


async def test_new_certificates_count_for_new_connections_and_calls_that_run_end_on_the_old_one(pki, tmp_path):
    """The authority's file is replaced by another one: what runs goes on, what comes next is checked against it."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes((pki / "ca.pem").read_bytes())
    settings = {"ca_file": str(ca), "server_name": "worker.test"}
    async with World(workers={name: secured(pki) for name in ("p0", "d0")}, settings=settings) as world:
        gate = asyncio.Event()

        async def slowly(ask):
            yield token_message(ask.wire_id, 4)
            await gate.wait()
            yield token_message(ask.wire_id, 2, "stop")

        world.script(decode=slowly)
        running = asyncio.create_task(world.run(), name="running")
        await until(lambda: world.workers["d0"].calls)
        world.engine.renew_certificates()
        await world.engine.probe(world.instances["d0"])
        assert not running.done()
        ca.write_bytes((pki / "coordinator.test.pem").read_bytes())  # which has not issued the worker's
        world.engine.renew_certificates()
        with pytest.raises(EngineFailed):
            await world.engine.probe(world.instances["d0"])
        gate.set()
        assert tokens_of(await running) == ([4, 2], "stop")
        ca.write_bytes((pki / "ca.pem").read_bytes())
        world.engine.renew_certificates()
        await world.engine.probe(world.instances["d0"])
        world.script(decode=says(4, 2))
        assert tokens_of(await world.run()) == ([4, 2], "stop")
        assert len(world.workers["d0"].callers) == 2  # the old connection and another one
        ca.unlink()
        world.engine.renew_certificates()  # keeps what it has
        await world.engine.probe(world.instances["d0"])
