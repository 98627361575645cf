"""curl, the way people try a service out."""

import gzip
import json
import shutil
import subprocess

import pytest
from dialects import BY_NAME, CHAT, CHAT_STREAM

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")
STORY = "Tell me about a bridge"


def curl(*arguments: str, data: bytes | None = None) -> tuple[str, bytes]:
    """Run curl; what it says about the wire (-v), and the body."""
    command = [CURL or "curl", "--no-progress-meter", "--noproxy", "*", "--max-time", "60", "-v", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    return done.stderr.decode("latin-1"), done.stdout


def test_form_content_type(cluster):
    wire, body = curl(f"{cluster.coordinator.url}{CHAT.path}", "-d", json.dumps(CHAT.body(STORY)))
    assert "Content-Type: application/x-www-form-urlencoded" in wire
    assert CHAT.text(body, STORY)


def test_stream_keeps_the_connection(cluster):
    url = f"{cluster.coordinator.url}{CHAT_STREAM.path}"
    wire, body = curl("-N", url, url, "-d", json.dumps(CHAT_STREAM.body(STORY)))
    assert "Re-using existing connection" in wire
    first, second, _ = body.decode().split("data: [DONE]\n\n")
    assert first.count("data: ") == second.count("data: ") > 10
    assert wire.count("< Content-Type: text/event-stream") + wire.count("< content-type: text/event-stream") == 2


def test_expect_on_a_large_body(cluster):
    data = json.dumps(CHAT.body(STORY + " water" * 360_000)).encode()
    assert len(data) > 2 << 20
    # without the time curl gives up waiting after a second, and a coordinator that has the body says no word more of it
    waits = ["--expect100-timeout", "60"]
    wire, body = curl(f"{cluster.coordinator.url}{CHAT.path}", *waits, "--data-binary", "@-", data=data)
    assert "Expect: 100-continue" in wire
    assert "HTTP/1.1 100 Continue" in wire
    assert CHAT.text(body, "")


def test_upgrade_offer(cluster):
    wire, body = curl("--http2", f"{cluster.coordinator.url}{CHAT.path}", "-d", json.dumps(CHAT.body(STORY)))
    assert "Upgrade: h2c" in wire
    assert "< HTTP/1.1 200 OK" in wire
    assert CHAT.text(body, STORY)


@pytest.mark.parametrize("name", ["chat", "chat-stream"])
def test_http_1_0(cluster, name: str):
    dialect = BY_NAME[name]
    wire, body = curl("--http1.0", f"{cluster.coordinator.url}{dialect.path}", "-d", json.dumps(dialect.body(STORY)))
    assert "chunked" not in wire
    assert dialect.text(body, STORY)


def test_gzip_body(cluster):
    packed = gzip.compress(json.dumps(CHAT.body(STORY)).encode())
    headers = ["-H", "Content-Encoding: gzip"]
    _, body = curl(f"{cluster.coordinator.url}{CHAT.path}", *headers, "--data-binary", "@-", data=packed)
    assert CHAT.text(body, STORY)


def test_chunked_upload(cluster):
    headers = ["-H", "Transfer-Encoding: chunked", "-H", "Content-Type: application/json"]
    data = json.dumps(CHAT.body(STORY)).encode()
    _, body = curl(f"{cluster.coordinator.url}{CHAT.path}", *headers, "--data-binary", "@-", data=data)
    assert CHAT.text(body, STORY)


def test_a_stream_that_breaks_off_is_an_error(cluster):
    data = json.dumps(CHAT_STREAM.body(f"{STORY} [[fault:decode_error@4]] [[length:30]]", 30))
    with pytest.raises(subprocess.CalledProcessError) as failure:
        curl("-N", f"{cluster.coordinator.url}{CHAT_STREAM.path}", "-d", data)
    assert failure.value.returncode == 18  # the body is not complete
    assert b'"code":"engine_failed"' in failure.value.stdout
