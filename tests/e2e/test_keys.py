"""API keys on both ports, with real clients and processes."""

import json
import signal
import subprocess
import sys
from functools import partial

import openai
import pytest
from dialects import CHAT, CHAT_STREAM, DIALECTS, MODEL
from huggingface_hub import InferenceClient
from openai import OpenAI
from processes import HOST, call, call_json, replace_file, until
from raw_client import Client, ask, eventually
from traffic import HELD, open_streams

pytestmark = pytest.mark.xdist_group("keys")


def made(*arguments: str, stdin: str = "") -> str:
    """What `pd-coordinator key` prints."""
    command = [sys.executable, "-m", "coordinator", "key", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=90).stdout


def new_key(name: str, **limits: int) -> tuple[str, dict[str, object]]:
    """A key and its entry in the configuration."""
    key, line = made("new", "--name", name).splitlines()
    hashed = line.partition('hash: "')[2].partition('"')[0]
    return key, {"name": name, "hash": hashed, **limits}


@pytest.fixture(scope="module")
def keys() -> dict[str, tuple[str, dict[str, object]]]:
    """Some keys; each takes a process, so they are made once."""
    return {
        "a": new_key("team-a"),
        "b": new_key("team-b"),
        "few": new_key("few", requests_per_minute=3),
        "one": new_key("one", max_in_flight=1),
        "ops": new_key("ops"),
    }


def auth(keys, *names: str, management: tuple[str, ...] = (), **others) -> dict[str, object]:
    lists = {"keys": [keys[name][1] for name in names], "management_keys": [keys[name][1] for name in management]}
    return {**lists, **others}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("workers", [1, 2])
def test_clients_need_a_key_and_their_own_tools_send_it(start, keys, workers):
    server = {"workers": workers, "port": 0, "management_port": 0}
    coordinator = start.cluster(auth=auth(keys, "a", "b"), server=server).coordinator
    url, (key, _) = coordinator.url, keys["a"]
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client:
        messages = [{"role": "user", "content": "Hello"}]
        assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3).usage.completion_tokens == 3
        assert next(iter(client.models.list())).id == MODEL
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="pd-00000000-wrong").chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.code == "invalid_api_key"
    assert InferenceClient(url, token=key).text_generation("Hello", max_new_tokens=3)
    for name in ("x-api-key", "api-key"):
        assert call(coordinator.port, CHAT.path, CHAT.body("Hello"), headers={name: keys["b"][0]})[0] == 200
    assert call(coordinator.port, CHAT.path, CHAT.body("Hello"), headers=bearer(keys["ops"][0]))[0] == 401
    counted = partial(coordinator.metric, "pd_coordinator_key_requests_total")
    until(lambda: counted(key="team-a", outcome="ok") == 2, "calls that engines have served are counted")
    until(lambda: counted(key="-", outcome="client_error") == 2, "those without a key are counted")
    until(lambda: "key=team-b" in coordinator.log(), "the log names the key")
    assert not any(one in coordinator.log() for one, _ in keys.values())


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_each_family_says_so_in_its_own_way(keyed, dialect):
    status, headers, body = call(keyed.port, dialect.path, dialect.body("Hello"))
    assert status == 401
    assert headers["www-authenticate"].startswith("Bearer ")
    assert "x-request-id" in headers
    error = json.loads(body)["error"]
    assert "API key" in (error["message"] if isinstance(error, dict) else error)


@pytest.fixture(scope="module")
def keyed(_session_start, keys):
    cluster = _session_start.cluster(auth=auth(keys, "a", "few", "one", management=("ops",)))
    yield cluster.coordinator
    cluster.coordinator.check_log()


def test_probes_stay_open_and_nothing_else_does(keyed):
    for path in ("/health", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"):
        assert call(keyed.port, path)[0] == 200, path
    for path in ("/v1/models", "/info", "/v2", f"/v2/models/{MODEL}"):
        assert call(keyed.port, path)[0] == 401, path
    for path in ("/v1/startup", "/v1/health", "/v1/readiness", "/v2/health/live", "/v2/health/ready", "/metrics"):
        assert call(keyed.management_port, path)[0] == 200, path
    for path in ("/v1/instances", "/v1/coordinator_info", "/recvs_info", "/nothing"):
        assert call(keyed.management_port, path)[0] == 401, path


async def test_a_stranger_cannot_make_us_keep_a_body(keyed):
    async with await Client.connect(keyed.port) as client:
        head = f"POST {CHAT.path} HTTP/1.1\r\nHost: a\r\nContent-Length: 30000000\r\n\r\n"
        await client.send(head.encode() + b"x" * 100)
        assert await client.head() == 401
    async with await Client.connect(keyed.port) as client:
        head = f"POST {CHAT.path} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 300\r\n\r\n"
        await client.send(head.encode())
        assert await client.head() == 401


def test_requests_of_a_minute(keyed, keys):
    answers = [call(keyed.port, CHAT.path, CHAT.body("Hello"), headers=bearer(keys["few"][0])) for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
    assert 1 <= int(answers[-1][1]["retry-after"]) <= 65
    error = json.loads(answers[-1][2])["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert call(keyed.port, "/v1/models", headers=bearer(keys["few"][0]))[0] == 200  # goes to no engine


async def test_requests_in_flight(keyed, keys):
    (key, _) = keys["one"]
    prompt = f"Story {HELD}"
    async with await Client.connect(keyed.port) as client:
        await client.send(request_with_key(CHAT_STREAM.path, CHAT_STREAM.body(prompt), key))
        assert await client.head() == 200
        refused = await ask(keyed.port, CHAT.path, CHAT.body("Hello"), headers=bearer(key))
        assert (refused.status, refused.header("retry-after")) == (429, "1")

    def free() -> bool:
        return call(keyed.port, CHAT.path, CHAT.body("Hello"), headers=bearer(key))[0] == 200

    await eventually(free, "the client has left: its place is free")


def request_with_key(path: str, body: object, key: str) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_managing_needs_a_key_of_its_own_and_leaves_a_line(keyed, keys):
    port, (ops, _) = keyed.management_port, keys["ops"]
    new = {"role": "decode", "url": f"http://{HOST}:9", "id": "extra"}
    assert call(port, "/v1/instances", new)[0] == 401
    assert call(port, "/v1/instances", new, headers=bearer(keys["a"][0]))[0] == 401
    assert call(port, "/v1/instances", new, headers=bearer(ops))[0] == 201
    assert call(port, "/v1/instances/extra", method="DELETE", headers={"x-api-key": ops})[0] == 202
    status, headers, _ = call(port, "/v1/instances")
    assert (status, "Basic" in headers["www-authenticate"]) == (401, True)
    log = until(lambda: keyed.log() if "path=/v1/instances/extra" in keyed.log() else "", "audit lines")
    lines = [line.partition("management call ")[2] for line in log.splitlines() if "management call" in line]
    assert f"key=- client={HOST} method=POST path=/v1/instances status=401" in lines
    assert f'key=ops client={HOST} method=POST path=/v1/instances about="extra http://{HOST}:9" status=201' in lines
    assert f"key=ops client={HOST} method=DELETE path=/v1/instances/extra status=202" in lines
    assert ops not in log


@pytest.mark.parametrize("workers", [1, 2])
async def test_keys_change_while_we_run(start, keys, workers, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [keys["b"][1]]}))
    server = {"workers": workers, "port": 0, "management_port": 0}
    given = auth(keys, "a", keys_file=str(file), reread_s=0.1)
    cluster = start.cluster(auth=given, server=server)
    coordinator, port = cluster.coordinator, cluster.port

    def status(name: str) -> int:
        return call(port, CHAT.path, CHAT.body("Hello"), headers=bearer(keys[name][0]))[0]

    def everywhere(*wanted: tuple[str, int]) -> bool:
        """Whether the answer is this one, in each process: the system deals connections out by chance."""
        return all(status(name) == code for name, code in wanted for _ in range(10 if workers > 1 else 1))

    assert everywhere(("a", 200), ("b", 200), ("ops", 401))
    async with await Client.connect(port) as client:
        body = CHAT_STREAM.body(f"Story {HELD}")
        await client.send(request_with_key(CHAT_STREAM.path, body, keys["a"][0]))
        assert await client.head() == 200

        replace_file(file, json.dumps({"keys": [keys["ops"][1]]}))
        await eventually(lambda: everywhere(("b", 401), ("ops", 200)), "the file counts")
        replace_file(file, "keys: [")
        await eventually(lambda: "those before stay valid" in coordinator.log(), "a broken one is told")
        assert everywhere(("ops", 200))

        coordinator.write_config(cluster.config | {"auth": auth(keys, "b")})
        coordinator.signal(signal.SIGHUP)
        await eventually(lambda: everywhere(("a", 401), ("b", 200), ("ops", 401)), "the reload counts")
        cluster.go_on()
        await client.rest()
        assert client.complete  # what ran with a key that is gone has ended in order

    coordinator.write_config({name: value for name, value in cluster.config.items() if name != "auth"})
    coordinator.signal(signal.SIGHUP)
    await eventually(lambda: status("b") == 401, "no keys: nobody, not everybody")


def test_keys_of_clients_end_here(start, keys):
    cluster = start.cluster(auth=auth(keys, "a"))
    headers = {
        **bearer(keys["a"][0]),
        "api-key": "of-the-client",
        "x-forwarded-for": "203.0.113.1",
        "traceparent": "00-1",
    }
    assert call(cluster.port, CHAT.path, CHAT.body("Hello"), headers=headers)[0] == 200
    for instance in cluster.instances:
        record = json.dumps(call_json(instance.port, "/sim/requests?last=50"))
        for word in (keys["a"][0], "of-the-client", "203.0.113.1"):
            assert word not in record
    assert "00-1" in json.dumps(call_json(cluster.prefill.port, "/sim/requests?last=50"))


@pytest.mark.parametrize(("trusted", "client"), [([], HOST), (["127.0.0.0/8"], "203.0.113.9")])
def test_the_address_in_the_log_is_a_proxys_word_only_where_it_is_trusted(start, trusted, client):
    server = {"port": 0, "management_port": 0, "trusted_proxies": trusted}
    coordinator = start.cluster(server=server).coordinator
    # the first address is the client's own invention: a proxy has added the second
    headers = {"X-Forwarded-For": "127.0.0.1, 198.51.100.1, 203.0.113.9", "X-Request-Id": "behind-a-proxy"}
    assert call(coordinator.port, CHAT.path, CHAT.body("Hello"), headers=headers)[0] == 200
    coordinator.said(f"id=behind-a-proxy api=openai path={CHAT.path} client={client} ")


def test_without_keys_a_web_page_manages_at_names_of_ours_only(start):
    """A page whose name resolves to us is of the same origin, for its browser; the live page has to go on working."""
    cluster = start.cluster()
    coordinator = cluster.coordinator
    port = coordinator.management_port

    def drain(host: str) -> int:
        headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        return call(port, "/v1/instances/p0/drain", b"", method="POST", headers=headers)[0]

    assert drain("pd.example") == 403
    assert drain(f"{HOST}:{port}") == drain("localhost") == 200
    assert call(port, "/", headers={"Host": "pd.example"})[0] == 200
    cluster.config["server"]["management_names"] = ["PD.example"]
    coordinator.write_config(cluster.config)
    coordinator.signal(signal.SIGHUP)
    until(lambda: drain("pd.example") == 200, "the name is ours")
    assert drain("evil.example") == 403


def test_a_key_that_there_was_can_be_kept(start):
    own = "sk-engine-key-of-old-days"
    line = made("hash", "--name", "old", stdin=own + "\n")
    hashed = line.partition('hash: "')[2].partition('"')[0]
    coordinator = start.cluster(auth={"keys": [{"name": "old", "hash": hashed}]}).coordinator
    for _ in range(2):
        assert call(coordinator.port, CHAT.path, CHAT.body("Hello"), headers=bearer(own))[0] == 200
    assert own not in coordinator.log()
    weak = subprocess.run(
        [sys.executable, "-m", "coordinator", "key", "hash"],
        input="short",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (weak.returncode, weak.stdout) == (2, "")


async def test_streams_without_keys_are_as_before(cluster):
    (stream,) = await open_streams(cluster.port, CHAT_STREAM, ["Hello"])
    assert CHAT_STREAM.text(await stream.rest(), "Hello")
    await stream.leave()
