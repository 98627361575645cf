"""A pretend prefill and a pretend decode instance in one process: fixed bytes at a fixed pace, as fast as it gets.

    python -m bench.engines FLAVOUR --tokens N --step-ms MS --prefill-ms MS [--together N]

Prints the two ports as one line of JSON, then serves until it is killed. Once per step every live stream gets one
event (`--together`: so many at once), as the batch of a decode instance does. `GET /handoffs` tells how many requests
came, and how many of them lacked what prefill and decode need to find each other's KV.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec
import uvloop

FLAVOURS = ("mindie", "vllm", "sglang")
CHAT = "/v1/chat/completions"
HEARTBEAT_S = 5.0
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
KV_TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-0",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def event(text: str, finish_reason: str | None) -> bytes:
    """One chunk of an OpenAI chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish_reason}
    chunk = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}
    return b"data: " + msgspec.json.encode({**chunk, "choices": [choice]}) + b"\n\n"


TOKEN = event(" token", None)
LAST = event(" end", "length")


def answer(tokens: int, extra: dict[str, Any]) -> bytes:
    """A whole OpenAI chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": " token" * tokens}, "finish_reason": "length"}
    usage = {"prompt_tokens": 300, "completion_tokens": tokens, "total_tokens": 300 + tokens}
    body = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1700000000, "model": "m"}
    return msgspec.json.encode({**body, "choices": [choice], "usage": usage, **extra})


def chunk(data: bytes) -> bytes:
    """Data in HTTP's chunked framing."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(body: bytes) -> bytes:
    """A JSON reply with its head."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Asked(msgspec.Struct):
    """What is read of a request's body."""

    stream: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_room: int | None = None


ASKED = msgspec.json.Decoder(Asked)
FIXED_PAGES = {
    "/get_model_info": b'{"model_path":"m","is_generation":true}',
    "/model_info": b'{"model_path":"m","is_generation":true}',
    "/get_server_info": b'{"model_path":"m","served_model_name":"m","tp_size":1,"dp_size":1}',
    "/server_info": b'{"model_path":"m","served_model_name":"m","tp_size":1,"dp_size":1}',
}


class Cluster:
    """Both instances: who is decoding, and the pace."""

    def __init__(self, flavour: str, tokens: int, step_s: float, prefill_s: float, together: int) -> None:
        self.flavour = flavour
        self.tokens, self.step_s, self.prefill_s, self.together = tokens, step_s, prefill_s, together
        self.some = chunk(TOKEN) * together
        self.streams: dict[Connection, int] = {}
        self.requests: dict[bytes, tuple[int, bool]] = {}  # MindIE: by id, what is left and whether it streams
        self.results: Connection | None = None  # MindIE: who reads them
        self.handoffs = {"requests": 0, "bad": 0}
        self.whole = answer(tokens, {})
        self.prefilled = answer(1, {"kv_transfer_params": KV_TRANSFER})
        # smg tells the kind of engine, and with it the way of the handoff, by the owner of the model
        model = {"id": "m", "object": "model", "owned_by": flavour, "max_model_len": 131072}
        self.pages = {**FIXED_PAGES, "/v1/models": msgspec.json.encode({"object": "list", "data": [model]})}
        self.loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Listen, say where, and keep the pace."""
        ports = {}
        for role in ("prefill", "decode"):
            server = await self.loop.create_server(self._connection(role), "127.0.0.1", 0, backlog=8192)
            ports[role] = server.sockets[0].getsockname()[1]
        print(json.dumps(ports), flush=True)
        self.loop.call_later(HEARTBEAT_S, self._heartbeat)
        due_s = self.loop.time()
        while True:
            due_s = max(self.loop.time(), due_s + self.step_s)
            await asyncio.sleep(due_s - self.loop.time())
            self._step()

    def _connection(self, role: str) -> Callable[[], "Connection"]:
        return lambda: Connection(self, role)

    def _heartbeat(self) -> None:
        if self.results is not None:
            self.results.transport.write(chunk(b"ka:heartbeat\0"))
        self.loop.call_later(HEARTBEAT_S, self._heartbeat)

    def _step(self) -> None:
        for connection, left in list(self.streams.items()):
            if left > self.together:
                self.streams[connection] = left - self.together
                connection.transport.write(self.some)
            else:
                del self.streams[connection]
                connection.transport.write(chunk(TOKEN) * (left - 1) + chunk(LAST) + chunk(DONE) + END)
        if self.results is not None and self.requests:
            self.results.transport.write(b"".join(self._results()))

    def _results(self) -> list[bytes]:
        """A decode step of MindIE: one message in a chunk of its own for each request."""
        out = []
        for request_id, (left, stream) in list(self.requests.items()):
            token = chunk(b"reqId:%b\0data:%b\0" % (request_id, TOKEN))
            if left > self.together:
                self.requests[request_id] = (left - self.together, stream)
                out.append(token * self.together)
                continue
            del self.requests[request_id]
            ends = (LAST, DONE) if stream else (self.whole,)
            out.append(token * (left - 1))
            out += [chunk(b"reqId:%b\0lastData:%b\0" % (request_id, last)) for last in ends]
        return out


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection of a router to an instance."""

    transport: asyncio.Transport

    def __init__(self, cluster: Cluster, role: str) -> None:
        self.cluster, self.role = cluster, role
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.cluster.streams.pop(self, None)
        if self.cluster.results is self:
            self.cluster.results = None

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()  # some routers try HTTP/2 first

    # --- called by httptools

    def on_message_begin(self) -> None:
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        path = self.target.partition(b"?")[0].decode()
        if self.parser.get_method() == b"GET":
            self._page(path)
        elif path != CHAT:
            self.transport.write(plain(b"{}"))  # a stop, or another call that is no inference
        elif self.role == "prefill":
            self._prefill(b"".join(self.body))
        else:
            self._decode(b"".join(self.body))

    # --- the parts

    def _page(self, path: str) -> None:
        if path == "/dresult":
            self.cluster.results = self
            self.transport.write(STREAM_HEAD)
        elif path == "/handoffs":
            self.transport.write(plain(json.dumps(self.cluster.handoffs).encode()))
        else:
            self.transport.write(plain(self.cluster.pages.get(path, b"{}")))

    def _prefill(self, body: bytes) -> None:
        cluster, asked = self.cluster, ASKED.decode(body)
        if cluster.flavour == "vllm":
            reply = plain(cluster.prefilled)
        elif cluster.flavour == "sglang":
            self._received(whole=asked.bootstrap_room is not None)
            reply = STREAM_HEAD + chunk(LAST + DONE) + END if asked.stream else plain(cluster.whole)
        else:
            self._received(whole={b"req-id", b"req-type", b"d-target"} <= self.headers.keys())
            request_id = self.headers.get(b"req-id", b"")
            cluster.loop.call_later(cluster.prefill_s, self._hand_over, request_id, asked.stream)
            return
        cluster.loop.call_later(cluster.prefill_s, self.transport.write, reply)

    def _hand_over(self, request_id: bytes, stream: bool) -> None:  # noqa: FBT001
        """MindIE: reply with the first token, and let decode go on."""
        envelope: dict[str, object] = {"reqId": request_id.decode(), "isStream": stream}
        if stream:
            envelope |= {"isLastResp": False, "output": TOKEN.decode()}
        self.transport.write(plain(msgspec.json.encode(envelope)))
        # a whole answer comes with the next step: its tokens were counted into the prefill time
        self.cluster.requests[request_id] = (self.cluster.tokens - 1 if stream else 1, stream)

    def _decode(self, body: bytes) -> None:
        cluster, asked = self.cluster, ASKED.decode(body)
        if cluster.flavour == "vllm":
            given = asked.kv_transfer_params or {}
            self._received(whole=given.get("remote_engine_id") == KV_TRANSFER["remote_engine_id"])
        else:
            self._received(whole=asked.bootstrap_room is not None)
        if asked.stream:
            self.transport.write(STREAM_HEAD)
            cluster.streams[self] = cluster.tokens
        else:
            cluster.loop.call_later(cluster.prefill_s, self.transport.write, plain(cluster.whole))

    def _received(self, *, whole: bool) -> None:
        self.cluster.handoffs["requests"] += 1
        self.cluster.handoffs["bad"] += not whole


async def _serve(args: argparse.Namespace) -> None:
    await Cluster(args.flavour, args.tokens, args.step_ms / 1e3, args.prefill_ms / 1e3, args.together).serve()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flavour", choices=FLAVOURS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--prefill-ms", type=float, default=5)
    parser.add_argument("--together", type=int, default=1)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
