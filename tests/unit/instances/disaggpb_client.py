"""Drives simulated disaggpb workers by hand: written from the protocol page alone."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from instances.disaggpb import vocabulary
from instances.disaggpb.proto.disagg_pb2 import DecodeRequest, KVBlockStream, PreFillRequest, TokenStream
from instances.options import Options
from instances.run import Fleet

PREFILL, DECODE = "/disagg.PrefillWorker/Prefill", "/disagg.DecodeWorker/Decode"
DEADLINE_S = 20
PROMPT = vocabulary.encode("the quiet river follows a road [[length:9]]")
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def pair(*, prefill=(), decode=(), more=None, **settings):
    """One prefill and one decode worker."""
    return Fleet(
        [
            Options(engine="disaggpb", role=role, faults=tuple(faults), settings=settings, **(more or {}))
            for role, faults in (("prefill", prefill), ("decode", decode))
        ]
    )


@asynccontextmanager
async def channel_to(instance, options=UNLIMITED, credentials=None):
    target = f"{instance.host}:{instance.port}"
    if credentials is None:
        made = grpc.aio.insecure_channel(target, options=options)
    else:
        made = grpc.aio.secure_channel(target, credentials, options=options)
    async with made as channel:
        yield channel


def prefill_call(channel, request_id="r1", prompt=PROMPT, **more):
    request = PreFillRequest(request_id=request_id, token_ids=prompt, **{"max_new_tokens": 30, **more})
    call = channel.unary_stream(PREFILL, PreFillRequest.SerializeToString, KVBlockStream.FromString)
    return call(request, timeout=DEADLINE_S)


def decode_call(channel, blocks, request_id="r1", prompt=PROMPT, **more):
    fields = {"max_new_tokens": 30, **more}
    request = DecodeRequest(request_id=request_id, kv_blocks=blocks, token_ids=prompt, **fields)
    call = channel.unary_stream(DECODE, DecodeRequest.SerializeToString, TokenStream.FromString)
    return call(request, timeout=DEADLINE_S)


async def messages(call):
    """(messages, status code, details)."""
    got = []
    try:
        async for message in call:
            got.append(message)  # noqa: PERF401 - what came before an error counts
    except grpc.aio.AioRpcError as error:
        return got, error.code(), error.details()
    return got, grpc.StatusCode.OK, ""


async def prefilled(instance, request_id="r1", prompt=PROMPT, **more):
    """All messages of a prefill, whatever its end."""
    async with channel_to(instance) as channel:
        return await messages(prefill_call(channel, request_id, prompt, **more))


async def decoded(instance, blocks, request_id="r1", prompt=PROMPT, **more):
    """All messages of a decode, whatever its end."""
    async with channel_to(instance) as channel:
        return await messages(decode_call(channel, blocks, request_id, prompt, **more))


def blocks_of(got):
    return [message.block for message in got if message.HasField("block")]


def ids_of(got):
    return [message.token_id for message in got]


async def kv_of(instance, request_id="r1", prompt=PROMPT):
    """The blocks of a prefill that went well."""
    got, code, details = await prefilled(instance, request_id, prompt)
    assert code is grpc.StatusCode.OK, details
    return blocks_of(got)


async def until_open(instance):
    """Wait until a port takes connections again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(instance.host, instance.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return
