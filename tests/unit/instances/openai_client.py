"""A raw client for the tests of simulated vLLM and SGLang instances: written from the protocol pages alone."""

import asyncio
import json
from contextlib import asynccontextmanager

from mindie_client import DEADLINE_S, call, connect, encode_request, read_chunk, read_head, until

__all__ = ["DEADLINE_S", "call", "get", "post", "until"]

MODEL = "sim-model"
JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(instance, path, body, headers=()):
    return await call(instance, "POST", path, body, {**JSON, **dict(headers)})


async def get(instance, path):
    return await call(instance, "GET", path)


def chat(text, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def completion(prompt, **more):
    return {"model": MODEL, "prompt": prompt, **more}


class Events:
    """A stream: the events that came, and how it ended (`terminator`, `eof` or `reset`)."""

    def __init__(self, raw, ended):
        self.raw, self.ended = raw, ended
        self.values, self.done, self.comments = [], 0, 0
        for block in raw.replace(b"\r\n", b"\n").decode().split("\n\n"):
            lines = block.split("\n")
            self.comments += sum(line.startswith(":") for line in lines)
            data = "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))
            if data == "[DONE]":
                self.done += 1
            elif data:
                assert not self.done, "an event after [DONE]"
                self.values.append(json.loads(data))

    @property
    def chunks(self):
        """Events with choices."""
        return [value for value in self.values if value.get("choices")]

    @property
    def error(self):
        return next((value["error"] for value in self.values if "error" in value), None)

    @property
    def usage(self):
        return [value["usage"] for value in self.values if value.get("usage") and not value["choices"]]

    def text(self, index=0):
        parts = [choice for value in self.chunks for choice in value["choices"] if choice["index"] == index]
        return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)

    def finish(self, index=0):
        found = [c["finish_reason"] for v in self.chunks for c in v["choices"] if c["index"] == index]
        reasons = [reason for reason in found if reason]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


class Open:
    """A request whose answer is still to be read."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def head(self):
        async with asyncio.timeout(DEADLINE_S):
            return await read_head(self.reader)

    async def body(self):
        """(bytes, how they ended)."""
        parts = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                while data := (await read_chunk(self.reader))[1]:
                    parts.append(data)
        except asyncio.IncompleteReadError as cut:
            return b"".join(parts) + cut.partial, "eof"
        except ConnectionResetError:
            return b"".join(parts), "reset"
        return b"".join(parts), "terminator"

    def leave(self):
        self.writer.transport.abort()


@asynccontextmanager
async def opened(instance, path, body, headers=()):
    """Send a request; its answer is read by the caller."""
    reader, writer = await connect(instance)
    try:
        writer.write(encode_request("POST", path, json.dumps(body).encode(), {**JSON, **dict(headers)}))
        yield Open(reader, writer)
    finally:
        writer.close()


async def stream(instance, path, body, headers=()):
    async with opened(instance, path, {**body, "stream": True}, headers) as request:
        status, _, got = await request.head()
        assert status == 200, await request.reader.read(1000)
        assert got["content-type"] == "text/event-stream"
        return Events(*await request.body())


# --- vLLM, the two legs by hand

WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def clamped(body):
    """The prefill leg of a body."""
    leg = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": WANTED}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


async def prefill_leg(prefill, path, body, request_id="r1"):
    """kv_transfer_params of a one-token leg."""
    answer = await post(prefill, path, clamped(body), {"X-Request-Id": request_id})
    assert answer.status == 200, answer.body
    return answer.json["kv_transfer_params"]


async def decode_leg(decode, path, body, params, request_id="r1"):
    return await post(decode, path, {**body, "kv_transfer_params": params}, {"X-Request-Id": request_id})
