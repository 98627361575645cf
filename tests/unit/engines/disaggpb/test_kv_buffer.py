"""Decode's request grows out of prefill's messages: what is in it, and what is refused."""

import asyncio
import tracemalloc
from functools import partial

import pytest
from disagg_messages import DecodeRequest, KVBlock, KVBlockStream
from engine_world import instance

from coordinator.core.errors import EngineFailed, KvTooLarge, Side
from coordinator.engines.disaggpb import kv
from coordinator.engines.disaggpb.budget import KvBudget, KvLimits
from coordinator.engines.disaggpb.kv import KvBuffer, LayerCounts, Payload
from coordinator.wire.disaggpb import decode_tail, pack_ids

END = KVBlockStream(done=True).SerializeToString()
ID = "77"


def message(layer=0, block=0, *, ident=ID, k=b"ab", v=b"cd", done=False):
    made = KVBlock(request_id=ident, layer_idx=layer, block_idx=block, k_data=k, v_data=v)
    return KVBlockStream(block=made, done=done).SerializeToString()


async def buffer(expected_bytes=0, limit=1 << 20, layers=None):
    room = await KvBudget(KvLimits(limit, limit)).admit("m", 1)
    agree = partial((layers or LayerCounts()).agree, "m")
    return KvBuffer(ID, instance("p0"), room, agree, expected_bytes), room


@pytest.mark.parametrize("expected_bytes", [0, 10, 1 << 16])
async def test_blocks_become_entries_of_the_request(expected_bytes):
    made, room = await buffer(expected_bytes)
    sent = [message(layer, block, k=bytes([layer]) * 300) for layer in range(3) for block in range(2)]
    for each in sent:
        assert not await made.add(each)
    assert await made.add(END)
    request = DecodeRequest.FromString(made.request(decode_tail(pack_ids([5, 6]), 9, 0.5)))
    assert request.request_id == ID
    assert [(b.layer_idx, b.block_idx, b.k_data) for b in request.kv_blocks] == [
        (layer, block, bytes([layer]) * 300) for layer in range(3) for block in range(2)
    ]
    assert (list(request.token_ids), request.max_new_tokens, request.temperature) == ([5, 6], 9, 0.5)
    assert room.used_bytes == sum(map(len, sent))


async def test_the_end_may_come_with_the_last_block():
    made, _ = await buffer()
    assert await made.add(message(done=True))
    assert len(DecodeRequest.FromString(made.request(b"")).kv_blocks) == 1


async def test_workers_may_leave_the_id_out():
    made, _ = await buffer()
    await made.add(message(ident=""))
    assert await made.add(END)


@pytest.mark.parametrize(
    "messages",
    [
        [END],
        [message(done=True, k=b"", v=b"")],
        [message(1)],
        [message(0, 1)],
        [message(-1)],
        [message(0), message(0)],
        [message(0), message(2)],
        [message(0), message(1), message(0)],
        [message(0), message(0, 2)],
        [message(0), message(1, 1)],
        [message(0, ident="78")],
        [message(0), message(1, ident="7")],
        [message(k=b"abc")],
        [message(v=b"a")],
        [message(k=b"", v=b"")],
        [message()[:-1]],
        [b"\xff"],
    ],
    ids=[
        "done first", "done with nothing", "a layer missing in front", "a block missing in front", "a negative layer",
        "twice", "a layer missing", "out of order", "a block missing", "a layer that begins in the middle",
        "another request's", "another request's later on", "odd keys", "odd values", "no data", "cut", "no message",
    ],
)  # fmt: skip
async def test_what_is_refused(messages):
    made, _ = await buffer()
    for each in messages[:-1]:
        assert not await made.add(each)
    with pytest.raises(EngineFailed) as caught:
        await made.add(messages[-1])
    error = caught.value
    assert (error.side, error.instance_id, error.reason) == (Side.PREFILL, "p0", "bad_reply")
    assert error.retryable
    assert error.detail.startswith("KV: ")


async def test_more_than_one_request_may_have():
    made, room = await buffer(limit=1000)
    await made.add(message(0, k=b"ab" * 200))
    with pytest.raises(KvTooLarge):
        await made.add(message(1, k=b"ab" * 300))
    room.release()


async def test_more_than_a_message_can_hold(monkeypatch):
    monkeypatch.setattr(kv, "MAX_MESSAGE_BYTES", 10)
    made, _ = await buffer()
    await made.add(message())
    with pytest.raises(KvTooLarge):
        made.request(b"")


async def test_long_blocks_are_copied_in_steps(monkeypatch):
    monkeypatch.setattr(kv, "STEP_BYTES", 100)
    made, _ = await buffer()
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    data = bytes(range(250)) * 4
    await made.add(message(k=data, v=b""))
    counting.cancel()
    assert turns >= 10
    assert DecodeRequest.FromString(made.request(b"")).kv_blocks[0].k_data == data


async def test_the_buffer_becomes_the_request_without_a_copy():
    made, _ = await buffer(limit=1 << 26)
    tracemalloc.start()
    try:
        await made.add(message(k=bytes(1 << 25), v=b""))
        tracemalloc.reset_peak()
        held_bytes, _ = tracemalloc.get_traced_memory()
        request = made.request(b"tail")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(request) > 1 << 25
    assert peak_bytes - held_bytes < 1 << 20
    payload = Payload(request)
    assert payload() is request
    payload.drop()
    assert payload() == b""
    assert payload.size_bytes == len(request)


# --- layers


async def test_kv_that_ends_too_early():
    layers = LayerCounts()
    for number in (3, 2):
        made, _ = await buffer(layers=layers)
        for layer in range(number):
            await made.add(message(layer))
        if number == 3:
            assert await made.add(END)
        else:
            with pytest.raises(EngineFailed) as caught:
                await made.add(END)
            assert "2 layers" in caught.value.detail


def test_a_number_of_layers_that_comes_twice_is_believed():
    layers = LayerCounts()
    assert [layers.agree("m", count) for count in (32, 32, 31, 32, 31, 32)] == [True, True, False, True, False, True]
    assert [layers.agree("m", count) for count in (28, 28, 28, 32, 28)] == [False, True, True, False, True]
    assert layers.agree("another", 5)
    assert [layers.agree("m", count) for count in (30, 31, 31)] == [False, False, True]


def test_a_number_of_layers_that_is_known():
    layers = LayerCounts(32)
    assert [layers.agree("m", count) for count in (31, 31, 32, 33)] == [False, False, True, False]
