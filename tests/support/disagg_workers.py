"""Fake disaggpb workers on loopback: real gRPC servers whose answers a test writes."""

import asyncio
import contextlib

import grpc
from disagg_messages import DecodeRequest, KVBlock, KVBlockStream, PreFillRequest, TokenStream
from grpc import aio

from coordinator.core.instance import Address

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
EOS = 2


def kv_message(ident, layer, block=0, *, k=b"kk", v=b"vv", done=False):
    made = KVBlock(request_id=ident, layer_idx=layer, block_idx=block, k_data=k, v_data=v)
    return KVBlockStream(block=made, done=done).SerializeToString()


END = KVBlockStream(done=True).SerializeToString()


def token_message(ident, number, reason=""):
    made = TokenStream(request_id=ident, token_id=number, done=bool(reason), finish_reason=reason)
    return made.SerializeToString()


class Ask:
    """One call that a worker got.

    Attributes:
        method: `Prefill` or `Decode`.
        message: what was asked, as protobuf reads it.
        size_bytes: of the request on the wire.
        ended: whether the worker has ended it, with a status or in order.
        left: set when the call is over, in whatever way.
    """

    def __init__(self, method, message, size_bytes, context):
        self.method, self.message, self.size_bytes, self.context = method, message, size_bytes, context
        self.ended = False
        self.left = asyncio.Event()

    @property
    def wire_id(self):
        return self.message.request_id

    async def fail(self, code, details=""):
        """End the call with a status."""
        await self.context.abort(code, details)


class FakeWorker:
    """A server of both services.

    Attributes:
        prefill: an async generator function of the call; yields messages.
        decode: the same.
        health: None: no such service; `hang`: one that does not answer; else the status that it tells.
        calls: what came, in order.
        callers: where calls came from: one for each connection.
    """

    def __init__(self, options=UNLIMITED, credentials=None):
        self.options = options
        self.credentials = credentials
        self.prefill, self.decode = layers(), says(EOS)
        self.health = None
        self.probes = 0
        self.calls = []
        self.callers = set()

    async def listen(self, port=0):
        self.server = aio.server(options=self.options)
        streams = grpc.unary_stream_rpc_method_handler
        self.server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("disagg.PrefillWorker", {"Prefill": streams(self._prefill)}),
                grpc.method_handlers_generic_handler("disagg.DecodeWorker", {"Decode": streams(self._decode)}),
                grpc.method_handlers_generic_handler(
                    "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
                ),
            )
        )
        host = f"127.0.0.1:{port}"
        add = self.server.add_insecure_port if self.credentials is None else self.server.add_secure_port
        port = add(host) if self.credentials is None else add(host, self.credentials)
        await self.server.start()
        self.address = Address("127.0.0.1", port, tls=self.credentials is not None)
        return self

    @property
    def accepted(self):
        """Connections on which calls have come."""
        return len(self.callers)

    async def aclose(self):
        await self.server.stop(None)

    async def restart(self):
        """Break every connection, and listen again."""
        await self.server.stop(None)
        await self.listen(self.address.port)

    async def _prefill(self, data, context):
        await self._answer(self.prefill, Ask("Prefill", PreFillRequest.FromString(data), len(data), context))

    async def _decode(self, data, context):
        await self._answer(self.decode, Ask("Decode", DecodeRequest.FromString(data), len(data), context))

    async def _answer(self, script, ask):
        """Write what the script yields.

        No generator of ours is handed to gRPC: one that is cancelled between two messages it would leave to the event
        loop, which closes it in a task of its own, at some later turn or never.
        """
        self.calls.append(ask)
        self.callers.add(ask.context.peer())
        context, ended, writes = ask.context, ask.left, False
        context.add_done_callback(lambda _: ended.set())
        try:
            async with contextlib.aclosing(script(ask)) as messages:
                async for message in messages:
                    writes = True
                    await context.write(message)
                    writes = False
        except asyncio.CancelledError:
            raise  # the caller has left
        except BaseException:
            ask.ended = not writes  # else the caller has left just then
            raise
        ask.ended = True

    async def _check(self, data, context):
        self.probes += 1
        if self.health is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service grpc.health.v1.Health")
        if self.health == "hang":
            await asyncio.Event().wait()
        return b"\x08%c" % self.health

    def asked(self, method):
        return [call for call in self.calls if call.method == method]


# --- scripts


def layers(number=2, size=2, *, block=b"k"):
    """The KV of a prompt: so many layers, `size` bytes of keys and values each."""

    async def script(ask):
        for layer in range(number):
            yield kv_message(ask.wire_id, layer, k=block * size, v=block * size)
        yield END

    return script


def sends(*messages, then=None):
    """These messages, made for the call's id where they are functions; then a status."""

    async def script(ask):
        for message in messages:
            yield message(ask.wire_id) if callable(message) else message
        if then is not None:
            await ask.fail(*then)

    return script


def says(*tokens, reason="stop", then=None):
    """These tokens, the last one with the finish reason; with `then` a status in its place."""

    async def script(ask):
        for at, token in enumerate(tokens):
            last = at == len(tokens) - 1 and then is None
            yield token_message(ask.wire_id, token, reason if last else "")
        if then is not None:
            await ask.fail(*then)

    return script


def fails(code, details=""):
    return sends(then=(code, details))


def hangs(*messages):
    """These messages and then nothing more."""

    async def script(ask):
        for message in messages:
            yield message(ask.wire_id) if callable(message) else message
        await asyncio.Event().wait()

    return script
