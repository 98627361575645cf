"""TLS on our ports and towards engines, with real processes and certificates made on the spot."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import ssl
import subprocess
from functools import partial

import openai
import pytest
import uvloop
from certificates import Authority
from clusters import FAST, Starter, cluster_config
from dialects import CHAT, CHAT_STREAM, MODEL
from openai import OpenAI
from processes import HOST, call, call_json, until
from raw_client import eventually
from tls_front import TlsFront
from traffic import HELD

from coordinator.cli import main

pytestmark = pytest.mark.xdist_group("tls")
MESSAGES = [{"role": "user", "content": "Hello"}]
REFUSED = (ssl.SSLError, ConnectionError, http.client.HTTPException)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def over_tls(authority, tmp_path_factory):
    """A cluster whose data port speaks TLS."""
    with contextlib.closing(Starter(tmp_path_factory.mktemp("cluster"))) as start:
        yield start.cluster(tls={"data": authority.issue("server").keys})


def fetch(port: int, path: str, context: ssl.SSLContext, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(HOST, port, context=context, timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def refused(port: int, context: ssl.SSLContext) -> bool:
    try:
        fetch(port, "/v2/health/live", context)
    except REFUSED:
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_data_port(start, authority, workers):
    server = {"workers": workers, "port": 0, "management_port": 0}
    cluster = start.cluster(server=server, tls={"data": authority.issue("server").keys})
    coordinator, trust = cluster.coordinator, authority.trust()
    url = f"https://{HOST}:{cluster.port}"
    with OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=30,
        http_client=openai.DefaultHttpxClient(verify=trust),
    ) as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
    stranger = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30)
    with stranger, pytest.raises(openai.APIConnectionError):  # it does not know our authority
        stranger.models.list()
    with pytest.raises(REFUSED):  # plain text is no way in
        call(cluster.port, CHAT.path, CHAT.body("Hello"))
    until(lambda: "TLS handshakes failed" in coordinator.log(), "failed handshakes are told")
    assert coordinator.ready()  # the management port is as before


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(over_tls, authority):
    command = ["curl", "-sSN", "--cacert", str(authority.file), "--noproxy", "*", "--max-time", "60", "-v"]
    url = f"https://{HOST}:{over_tls.port}{CHAT_STREAM.path}"
    done = subprocess.run(
        [*command, url, "-d", json.dumps(CHAT_STREAM.body("Hello"))], capture_output=True, timeout=90, check=True
    )
    assert CHAT_STREAM.text(done.stdout, "Hello")
    wire = done.stderr.decode("latin-1")
    assert "SSL certificate verify ok" in wire
    assert "ALPN: server accepted http/1.1" in wire or "ALPN, server accepted to use http/1.1" in wire


def test_a_stream_whose_decode_dies_is_broken_off(over_tls, authority):
    body = CHAT_STREAM.body("Story [[fault:decode_error@3]] [[length:20]]")
    with pytest.raises(http.client.IncompleteRead) as caught:
        fetch(over_tls.port, CHAT_STREAM.path, authority.trust(), body)
    assert b'"error"' in caught.value.partial
    assert b"[DONE]" not in caught.value.partial


def test_clients_that_leave_free_what_they_held(over_tls, authority):
    connection = http.client.HTTPSConnection(HOST, over_tls.port, context=authority.trust(), timeout=30)
    body = CHAT_STREAM.body("Story [[fault:stall@4]] [[length:20]]")
    connection.request("POST", CHAT_STREAM.path, json.dumps(body))
    connection.getresponse().read(10)
    connection.close()
    over_tls.wait_idle()


def test_clients_and_operators_with_certificates(start, authority, tmp_path):
    server = authority.issue("server").keys
    given = {**server, "client_ca_file": str(authority.file)}
    instances = list(start.fleet([{"role": role, "timing": FAST} for role in ("prefill", "decode")]).instances)
    config = cluster_config(instances, {"tls": {"data": given, "management": given}})
    config["server"] |= {"metrics_port": 0, "status_port": 0}
    coordinator = start.coordinator(config)
    known = authority.trust(authority.issue("client", "client.example"))
    foreign = authority.trust(Authority(tmp_path, "foreign").issue("client", "client.example"))

    def ready() -> bool:
        return fetch(coordinator.management_port, "/v1/readiness", known)[0] == 200

    until(ready, "ready")
    assert fetch(coordinator.port, CHAT.path, known, CHAT.body("Hello"))[0] == 200
    for port in (coordinator.port, coordinator.management_port):
        assert refused(port, authority.trust())
        assert refused(port, foreign)
        with pytest.raises(REFUSED):
            call(port, "/v2/health/live")


@pytest.mark.parametrize("workers", [1, 2])
async def test_certificates_change_while_we_run(start, authority, tmp_path, workers):
    old = Authority(tmp_path, "old")
    keys = old.issue("server").keys
    server = {"workers": workers, "port": 0, "management_port": 0}
    cluster = start.cluster(server=server, tls={"data": keys, "reread_s": 0.1})
    coordinator, port = cluster.coordinator, cluster.port

    reader, writer = await asyncio.open_connection(HOST, port, ssl=old.trust(), server_hostname="localhost")
    body = json.dumps(CHAT_STREAM.body(f"Story {HELD}")).encode()
    head = f"POST {CHAT_STREAM.path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")

    new = Authority(tmp_path, "new")
    new.issue("server")
    await eventually(lambda: not refused(port, new.trust()), "the new certificate is used")
    # the system deals connections out by chance
    await eventually(lambda: all(refused(port, old.trust()) for _ in range(12)), "in all processes")
    cluster.go_on()
    rest = await reader.readuntil(b"0\r\n\r\n")  # what had begun goes on to its end
    assert b"[DONE]" in rest
    writer.close()

    told = "tls.data.cert_file: holds no certificate that can be used"
    before = coordinator.log().count(told)  # a file that is read while it is written is told, too
    (tmp_path / "server.pem").write_text("no certificate")
    await eventually(lambda: coordinator.log().count(told) > before, "a broken one is told")
    assert "not read again, those before stay in use" in coordinator.log()
    assert not refused(port, new.trust())


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize("port", ["data", "management"])
def test_what_cannot_be_loaded_stops_the_start(tmp_path, authority, command, port, capsys, monkeypatch):
    def run(coroutine):
        coroutine.close()
        pytest.fail("it has started")

    monkeypatch.setattr(uvloop, "run", run)
    good, other = authority.issue("good"), authority.issue("other")
    (tmp_path / "empty.pem").write_text("nothing")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-in", str(good.key), "-aes256", "-passout", "pass:abcd", "-out", str(locked)], check=True
    )
    cases = [
        ({"cert_file": str(good.cert)}, "cert_file needs key_file"),
        ({"cert_file": "nowhere.pem", "key_file": str(good.key)}, f"tls.{port}.cert_file: '{tmp_path}/nowhere.pem'"),
        (
            {"cert_file": str(tmp_path / "empty.pem"), "key_file": str(good.key)},
            "holds no certificate that can be used",
        ),
        ({"cert_file": str(good.cert), "key_file": str(other.key)}, "is not the key of the certificate"),
        ({"cert_file": str(good.cert), "key_file": str(good.cert)}, f"tls.{port}.key_file: holds no private key"),
        ({"cert_file": str(good.cert), "key_file": str(locked)}, f"tls.{port}.key_file: is encrypted"),
        ({**good.keys, "client_ca_file": str(tmp_path / "empty.pem")}, f"tls.{port}.client_ca_file: holds no"),
        ({"client_ca_file": str(authority.file)}, "client_ca_file needs cert_file"),
    ]
    for given, words in cases:
        file = tmp_path / "cluster.yaml"
        file.write_text(json.dumps({"tls": {port: given}, "server": {"port": 0, "management_port": 0}}))
        status, said = main([command, "--config", str(file)]), capsys.readouterr()
        assert (status, said.out) == (2, ""), (given, said)
        assert words in said.err
        assert f"cluster.yaml:1: tls.{port}" in said.err
        if command == "serve":
            break  # it is the same check


@pytest.fixture
def front(start, authority, tmp_path):
    """Puts TLS before an instance: (instance, who has issued the certificate, its host, whether ours is wanted)."""

    def make(instance, issuer, host, *, mutual=False):
        issued = issuer.issue(f"front-{instance.port}", host)
        ca = authority.file if mutual else None
        return start._own(TlsFront(instance.url, issued.cert, issued.key, ca, tmp_path))

    return make


@pytest.mark.parametrize("workers", [1, 2])
def test_engines_over_https_with_certificates_and_keys(start, authority, front, tmp_path, monkeypatch, workers):
    """vLLM instances behind TLS that asks for our certificate; each wants a key, and each has its own name."""
    key = "engine-secret-1"
    roles = ("prefill", "decode")
    options = [{"role": role, "engine": "vllm", "timing": FAST, "faults": [f"api_key={key}"]} for role in roles]
    instances = list(start.fleet(options).instances)
    (tmp_path / "engine.key").write_text(f"{key}\n")
    monkeypatch.setenv("ENGINE_KEY", key)
    fronts = [front(one, authority, f"{one.role}.example", mutual=True) for one in instances]
    config = cluster_config(instances, {"each": {"engine": "vllm"}})
    for row, before in zip(config["cluster"]["instances"], fronts, strict=True):
        row |= {"url": before.url, "server_name": f"{row['role']}.example"}
    config["cluster"]["instances"][0]["engine_key_file"] = str(tmp_path / "engine.key")
    ours = authority.issue("coordinator", "coordinator.example").keys
    config["tls"] = {"engines": {"ca_file": str(authority.file), **ours}}
    config["auth"] = {"engine_key_env": "ENGINE_KEY"}
    config["server"]["workers"] = workers
    coordinator = start.coordinator(config)
    coordinator.wait_ready()
    for _ in range(3):
        headers = {"Authorization": "Bearer of-the-client", "x-api-key": "of-the-client"}
        status, _, body = call(coordinator.port, CHAT_STREAM.path, CHAT_STREAM.body("Hello"), headers=headers)
        assert status == 200, body
        assert b"[DONE]" in body
    for before, role in zip(fronts, roles, strict=True):
        assert before.seen() == {(f"{role}.example", "coordinator")}
    for instance in instances:
        record = json.dumps(call_json(instance.port, "/sim/requests"))
        assert key in record
        assert "of-the-client" not in record
    assert key not in coordinator.log()
    assert key not in json.dumps(coordinator.manage("/v1/instances"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "mindie"])
def test_a_key_that_engines_do_not_take_is_no_fault_of_the_clients(start, tmp_path, engine):
    """The key of p1 and d1 is wrong: others serve, until those are gone; then it is a 502 without engines' words."""
    right, wrong = tmp_path / "right.key", tmp_path / "wrong.key"
    right.write_text("engine-secret-1")
    wrong.write_text("engine-secret-2")
    options = [
        {"role": role, "engine": engine, "timing": FAST, "faults": ["api_key=engine-secret-1"]}
        for role in ("prefill", "prefill", "decode", "decode")
    ]
    instances = list(start.fleet(options).instances)
    config = cluster_config(instances, {"each": {"engine": engine}})
    config["auth"] = {"engine_key_file": str(wrong)}
    config["retry"] = {"max_attempts": 3}
    config["scheduling"] = {"policy": "round_robin"}
    rows = {row["id"]: row for row in config["cluster"]["instances"]}
    rows["p0"]["engine_key_file"] = rows["d0"]["engine_key_file"] = str(right)
    coordinator = start.coordinator(config)
    coordinator.wait_ready()
    headers = {"Authorization": "Bearer of-the-client"}
    for _ in range(6):
        for dialect in (CHAT, CHAT_STREAM):
            status, _, body = call(coordinator.port, dialect.path, dialect.body("Hello"), headers=headers)
            assert status == 200, body
    failures = partial(coordinator.metric, "pd_coordinator_engine_failures_total", reason="key_refused")
    assert failures(instance="p1") > 0
    assert failures(instance="p0") == failures(instance="d0") == 0
    del rows["p0"]["engine_key_file"]
    coordinator.write_config(config)
    coordinator.signal(signal.SIGHUP)
    until(lambda: coordinator.metric("pd_coordinator_config_reloads_total", result="ok") == 1, "it is read again")
    for dialect in (CHAT, CHAT_STREAM):
        status, _, body = call(coordinator.port, dialect.path, dialect.body("Hello"), headers=headers)
        assert status == 502, body
        assert b"engine_failed" in body
        assert b"missing or wrong" not in body
    assert coordinator.metric("pd_coordinator_requests_total", outcome="client_error") == 0


async def test_an_engine_with_a_foreign_certificate_gets_nothing(start, authority, front, tmp_path):
    (instance,) = start.fleet([{"role": "hybrid", "engine": "vllm", "timing": FAST}]).instances
    foreign = Authority(tmp_path, "foreign")
    config = cluster_config([instance], {"each": {"engine": "hybrid"}})
    config["cluster"]["instances"][0]["url"] = front(instance, foreign, HOST).url
    config["tls"] = {"engines": {"ca_file": str(authority.file)}}
    coordinator = start.coordinator(config)
    coordinator.said("not ready yet: tls failed")
    assert not coordinator.ready()
    assert call_json(instance.port, "/sim/requests")["requests"] == []
    config["tls"] = {"engines": {"ca_file": str(foreign.file)}}
    coordinator.write_config(config)
    coordinator.signal(signal.SIGHUP)
    coordinator.wait_ready()
    assert call(coordinator.port, CHAT.path, CHAT.body("Hello"))[0] == 200


def test_an_engine_that_is_somebody_else_gets_nothing(start, authority, front):
    (instance,) = start.fleet([{"role": "hybrid", "engine": "vllm", "timing": FAST}]).instances
    config = cluster_config([instance], {"each": {"engine": "hybrid"}})
    config["cluster"]["instances"][0]["url"] = front(instance, authority, "another.example").url
    config["tls"] = {"engines": {"ca_file": str(authority.file)}}
    start.coordinator(config).said("not ready yet: tls failed")
    assert call_json(instance.port, "/sim/requests")["requests"] == []


def test_the_result_stream_of_mindie_over_https(start, authority, front):
    instances = list(start.fleet([{"role": role, "timing": FAST} for role in ("prefill", "decode")]).instances)
    config = cluster_config(instances, {"tls": {"engines": {"ca_file": str(authority.file)}}})
    for row, instance in zip(config["cluster"]["instances"], instances, strict=True):
        row["url"] = front(instance, authority, HOST).url
    start.coordinator(config).wait_ready()
    assert instances[1].state()["dresult"]["open"]


def test_a_failure_of_tls_tells_clients_nothing(start, authority):
    config = cluster_config([], {})
    config["cluster"]["instances"] = [{"role": "hybrid", "engine": "hybrid", "url": f"https://{HOST}:1"}]
    coordinator = start.coordinator(config | {"timeouts": {"schedule_s": 0.2, "drain_s": 1}})
    status, _, body = call(coordinator.port, CHAT.path, CHAT.body("Hello"))
    assert status == 503
    for word in (HOST.encode(), b"ssl", b"certificate", b"Traceback"):
        assert word not in body
