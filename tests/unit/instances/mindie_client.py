"""A raw client for the tests of simulated MindIE instances: sockets and bytes, written from the protocol page alone."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

from instances.options import Options
from instances.run import Fleet

DEADLINE_S = 20
MODEL = "sim-model"
_ids = itertools.count(1_000_000)


class Answer:
    """A whole HTTP answer; `connection_open`: whether the server left the connection open."""

    def __init__(self, status, reason, headers, body, connection_open=True):
        self.status, self.reason, self.headers, self.body = status, reason, headers, body
        self.connection_open = connection_open

    @property
    def json(self):
        return json.loads(self.body)


async def read_head(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    _, status, reason = first.split(" ", 2)
    headers = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
    return int(status), reason, headers


async def read_chunk(reader):
    """(size line, data) of one HTTP chunk; data b"" is the end of the body."""
    line = await reader.readuntil(b"\r\n")
    size = int(line, 16)
    data = await reader.readexactly(size + 2)
    assert data.endswith(b"\r\n")
    return line, data[:-2]


def encode_request(method, path, body=b"", headers=()):
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *(f"{k}: {v}" for k, v in dict(headers).items())]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def connect(instance):
    return await asyncio.open_connection(instance.host, instance.port)


async def call(instance, method, path, body=None, headers=()):
    """One request on a connection of its own; the answer, chunked bodies joined."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await connect(instance)
        try:
            writer.write(encode_request(method, path, payload, headers))
            status, reason, got = await read_head(reader)
            if got.get("transfer-encoding") == "chunked":
                parts = []
                while data := (await read_chunk(reader))[1]:
                    parts.append(data)
                whole = b"".join(parts)
            else:
                whole = await reader.readexactly(int(got.get("content-length", 0)))
            return Answer(status, reason, got, whole, connection_open=not reader.at_eof())
        finally:
            writer.close()


async def get(instance, path):
    return await call(instance, "GET", path)


async def post(instance, path, body=None, headers=()):
    return await call(instance, "POST", path, body, headers)


async def until(condition):
    """Wait until something holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for signals no event
            await asyncio.sleep(0.001)


def new_id():
    return str(next(_ids))


def control(decode, req_id=None, **more):
    """Control headers for a prefill request."""
    headers = {
        "req-id": req_id or new_id(),
        "req-type": "prefill",
        "d-target": decode.host,
        "d-port": str(decode.port),
    }
    return {**headers, **{key.replace("_", "-"): value for key, value in more.items()}}


class Link:
    """One `/dresult` connection, read chunk by chunk; a chunk is one message here, as the engine sends it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.head = None

    async def chunk(self):
        """Payload of the next chunk that is not a heartbeat; b"" when the body ended."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                _, data = await read_chunk(self.reader)
                if data != b"ka:heartbeat\0":
                    return data

    async def wire_chunk(self):
        """The next chunk as it stands on the wire."""
        async with asyncio.timeout(DEADLINE_S):
            line, data = await read_chunk(self.reader)
            return line + data + b"\r\n"

    async def event(self):
        """(req-id, prefix, body) of the next message."""
        data = await self.chunk()
        assert data.startswith(b"reqId:"), data
        assert data.endswith(b"\0"), data
        req_id, _, rest = data[len(b"reqId:") : -1].partition(b"\0")
        prefix, _, body = rest.partition(b":")
        return req_id.decode(), prefix.decode(), body

    async def events(self, req_id, last_data=1):
        """All events of one request up to its end: lastData (so many), error or retry."""
        found = []
        while True:
            got, prefix, body = await self.event()
            if got != req_id:
                continue
            found.append((prefix, body))
            last_data -= prefix == "lastData"
            if prefix in ("error", "retry") or last_data == 0:
                return found


@asynccontextmanager
async def linked(decode):
    """An open result stream."""
    reader, writer = await connect(decode)
    try:
        writer.write(encode_request("GET", "/dresult"))
        link = Link(reader, writer)
        async with asyncio.timeout(DEADLINE_S):
            link.head = await read_head(reader)
        yield link
    finally:
        writer.close()


@asynccontextmanager
async def cluster(prefill=None, decode=None, **both):
    """One prefill and one decode instance and the link: yields (fleet, prefill, decode, link)."""
    options = [
        Options(role="prefill", **{**both, **(prefill or {})}),
        Options(role="decode", **{**both, **(decode or {})}),
    ]
    async with Fleet(options) as fleet, linked(fleet.decode[0]) as link:
        yield fleet, fleet.prefill[0], fleet.decode[0], link


def body_of(family, prompt, *, stream=False, limit=None):
    """(path, body) of a request in that dialect."""
    own = {} if limit is None else {"max_tokens": limit}
    parameters = {"parameters": {} if limit is None else {"max_new_tokens": limit}}
    flag = {"stream": stream}
    bodies = {
        "chat": (
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **flag, **own},
        ),
        "completions": ("/v1/completions", {"model": MODEL, "prompt": prompt, **flag, **own}),
        "tgi": ("/generate_stream" if stream else "/generate", {"inputs": prompt, **parameters}),
        "tgi_root": ("/", {"inputs": prompt, **flag, **parameters}),
        "vllm": ("/generate", {"prompt": prompt, **flag, **own}),
        "triton": (f"/v2/models/{MODEL}/generate{'_stream' if stream else ''}", {"text_input": prompt, **parameters}),
        "native": ("/infer", {"inputs": prompt, **flag, **parameters}),
    }
    return bodies[family]


FAMILIES = ("chat", "completions", "tgi", "tgi_root", "vllm", "triton", "native")
OPENAI = ("chat", "completions")


def text_of_stream(family, data):
    """The answer's text in the bytes of a stream."""
    if family == "vllm":
        assert data.endswith(b"\0")
        return "".join(json.loads(part)["text"][0] for part in data[:-1].split(b"\0"))
    events = [part for part in data.decode().split("\n\n") if part]
    prefix = "data:" if family == "triton" else "data: "
    assert all(event.startswith(prefix) for event in events)
    if family in OPENAI:
        assert events[-1] == "data: [DONE]"
        events = events[:-1]
    values = [json.loads(event[len(prefix) :]) for event in events]
    if family == "chat":
        return "".join(value["choices"][0]["delta"]["content"] for value in values)
    if family == "completions":
        return "".join(value["choices"][0]["text"] for value in values)
    if family == "triton":
        return "".join(value["text_output"] for value in values)
    if family == "native":
        # the last event has no text of its own, but the whole
        assert values[-1]["token"]["text"] is None
        text = "".join(value["token"]["text"] for value in values[:-1])
        assert values[-1]["generated_text"].startswith(text)
        return values[-1]["generated_text"]
    joined = "".join(value["token"]["text"] for value in values)
    assert values[-1]["generated_text"] == joined
    return joined


def text_of_whole(family, data, prompt=""):
    """The answer's text in a complete answer."""
    value = json.loads(data)
    if family == "chat":
        return value["choices"][0]["message"]["content"]
    if family == "completions":
        return value["choices"][0]["text"]
    if family == "triton":
        return value["text_output"]
    if family == "vllm":
        assert value["text"][0].startswith(prompt)
        return value["text"][0][len(prompt) :]
    if family == "tgi_root":
        assert len(value) == 1
        value = value[0]
    return value["generated_text"]


async def run(prefill, decode, link, family, prompt, **more):
    """A whole request: (envelope, events, text)."""
    stream = more.get("stream", False)
    path, body = body_of(family, prompt, **more)
    headers = control(decode)
    answer = await post(prefill, path, body, headers)
    assert answer.status == 200, answer.body
    envelope = answer.json
    assert envelope["reqId"] == headers["req-id"]
    assert envelope["isStream"] is stream
    events = []
    if not envelope.get("isLastResp"):
        events = await link.events(headers["req-id"], 2 if stream and family in OPENAI else 1)
    if not stream:
        whole = events[-1][1] if events else envelope["output"].encode()
        return envelope, events, text_of_whole(family, whole, prompt)
    data = envelope["output"].encode() + b"".join(body for _, body in events)
    return envelope, events, text_of_stream(family, data)


async def expected_text(family, prompt, **more):
    """The answer of an ordinary engine: what prefill and decode together must give."""
    async with Fleet([Options(role="hybrid")]) as fleet:
        path, body = body_of(family, prompt, **more)
        answer = await post(fleet.hybrid[0], path, body)
        assert answer.status == 200, answer.body
        if more.get("stream"):
            return text_of_stream(family, answer.body)
        return text_of_whole(family, answer.body, prompt)
