"""Node's fetch: uploads in chunks, streams read piece by piece, an answer that breaks off."""

import json
import shutil
import subprocess

import pytest
from dialects import CHAT, CHAT_STREAM

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
let text = "", failure = null, pieces = 0;
const decoder = new TextDecoder();
try {
  for await (const piece of reply.body) { pieces += 1; text += decoder.decode(piece, { stream: true }); }
} catch (error) { failure = String(error); }
console.log(JSON.stringify({ status: reply.status, pieces, text, failure }));
"""


def node(program: str, url: str, body: object) -> dict:
    """Run a program with a URL and a JSON body; what it prints."""
    command = [NODE or "node", "--input-type=module", "-e", program, url, json.dumps(body)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=20)
    answer: dict = json.loads(done.stdout)
    return answer


def test_upload_in_chunks(cluster):
    answer = node(WHOLE, cluster.coordinator.url + CHAT.path, CHAT.body(STORY))
    assert (answer["status"], answer["type"]) == (200, "application/json")
    assert CHAT.text(answer["body"].encode(), STORY)


def test_stream(cluster):
    prompt = f"{STORY} [[fault:slow=0.02]] [[length:20]]"
    answer = node(STREAM, cluster.coordinator.url + CHAT_STREAM.path, CHAT_STREAM.body(prompt, 20))
    assert (answer["status"], answer["failure"]) == (200, None)
    assert CHAT_STREAM.text(answer["text"].encode(), prompt)
    assert answer["pieces"] > 5  # not held back until the end


def test_a_stream_that_breaks_off_throws(cluster):
    prompt = f"{STORY} [[fault:decode_error@4]] [[length:30]]"
    answer = node(STREAM, cluster.coordinator.url + CHAT_STREAM.path, CHAT_STREAM.body(prompt, 30))
    assert answer["failure"] is not None
    assert '"code":"engine_failed"' in answer["text"]
