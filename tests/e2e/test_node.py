"""Node's fetch: uploads in chunks, streams read piece by piece, an answer that breaks off."""

import json
import shutil
import subprocess

import pytest
from dialects import CHAT, CHAT_STREAM
from traffic import HELD

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
STORY = "Tell me about a horse"

WHOLE = """
const [url, body] = process.argv.slice(1);
const upload = new ReadableStream({
  start(c) { for (const part of body.match(/.{1,20}/gs)) c.enqueue(new TextEncoder().encode(part)); c.close(); },
});
const reply = await fetch(url, { method: "POST", body: upload, duplex: "half" });
const type = reply.headers.get("content-type");
console.log(JSON.stringify({ status: reply.status, type, body: await reply.text() }));
"""

STREAM = """
const [url, body] = process.argv.slice(1);
const reply = await fetch(url, { method: "POST", body, headers: { "Content-Type": "application/json" } });
let text = "", failure = null;
const decoder = new TextDecoder();
try {
  for await (const piece of reply.body) { text += decoder.decode(piece, { stream: true }); console.error(text.length); }
} catch (error) { failure = String(error); }
console.log(JSON.stringify({ status: reply.status, text, failure }));
"""


def command(program: str, url: str, body: object) -> list[str]:
    """A program with a URL and a JSON body."""
    return [NODE or "node", "--input-type=module", "-e", program, url, json.dumps(body)]


def node(program: str, url: str, body: object) -> dict:
    """Run it; what it prints."""
    done = subprocess.run(command(program, url, body), capture_output=True, check=True, timeout=60)
    answer: dict = json.loads(done.stdout)
    return answer


def test_upload_in_chunks(cluster):
    answer = node(WHOLE, cluster.coordinator.url + CHAT.path, CHAT.body(STORY))
    assert (answer["status"], answer["type"]) == (200, "application/json")
    assert CHAT.text(answer["body"].encode(), STORY)


def test_stream(cluster):
    prompt = f"{STORY} {HELD}"
    words = command(STREAM, cluster.coordinator.url + CHAT_STREAM.path, CHAT_STREAM.body(prompt, 25))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert int(run.stderr.readline()) > 0  # a piece is there: nothing is held back until the end
        cluster.go_on()
        printed, _ = run.communicate(timeout=60)
    answer = json.loads(printed)
    assert (answer["status"], answer["failure"]) == (200, None)
    assert CHAT_STREAM.text(answer["text"].encode(), prompt)


def test_a_stream_that_breaks_off_throws(cluster):
    prompt = f"{STORY} [[fault:decode_error@4]] [[length:30]]"
    answer = node(STREAM, cluster.coordinator.url + CHAT_STREAM.path, CHAT_STREAM.body(prompt, 30))
    assert answer["failure"] is not None
    assert '"code":"engine_failed"' in answer["text"]
