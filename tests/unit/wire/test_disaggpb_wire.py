"""The messages of disaggpb, held against the protobuf library."""

import struct
import sys
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from disagg_messages import (
    DecodeRequest,
    HealthCheckResponse,
    KVBlock,
    KVBlockStream,
    PreFillRequest,
    TokenStream,
)

from coordinator.wire import disaggpb as wire
from coordinator.wire.disaggpb import KvMessage, Token, WireError

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
IDS = st.lists(COUNT, max_size=40)
FLOAT = st.floats(min_value=0, width=32, allow_nan=False)
TEXT = st.text(max_size=20)
BLOCKS = st.builds(
    KVBlock, request_id=TEXT, layer_idx=INT32, block_idx=INT32, k_data=st.binary(max_size=300),
    v_data=st.binary(max_size=300),
)  # fmt: skip


def entry(data, block):
    """A block as an entry of decode's request."""
    return wire.BLOCK_ENTRY + data[block.start : block.end]


def varint(value, bytes_more=0):
    """A number, in more bytes than it needs."""
    digits = bytearray(wire.varint(value))
    for _ in range(bytes_more):
        digits[-1] |= 0x80
        digits.append(0)
    return bytes(digits)


# --- to the workers


@given(TEXT, IDS, COUNT, FLOAT)
def test_prefill_requests_are_protobufs(ident, ids, limit, temperature):
    ours = PreFillRequest.FromString(wire.prefill_request(ident, wire.pack_ids(ids), limit, temperature))
    assert ours == PreFillRequest(request_id=ident, token_ids=ids, max_new_tokens=limit, temperature=temperature)


@given(TEXT, IDS, COUNT, FLOAT, st.lists(BLOCKS, max_size=4))
def test_decode_requests_are_protobufs(ident, ids, limit, temperature, blocks):
    """Blocks are spliced in from the messages in which they came, and come out as they were."""
    made = wire.decode_head(ident)
    for block in blocks:
        data = KVBlockStream(block=block).SerializeToString()
        read = wire.read_kv(data)
        made += entry(data, read.block)
    made += wire.decode_tail(wire.pack_ids(ids), limit, temperature)
    wanted = DecodeRequest(
        request_id=ident, kv_blocks=blocks, token_ids=ids, max_new_tokens=limit, temperature=temperature
    )
    assert DecodeRequest.FromString(made) == wanted
    assert made == wanted.SerializeToString(), "byte for byte what protobuf writes"


def test_a_request_in_bytes():
    assert wire.prefill_request("r1", wire.pack_ids([1, 2, 300]), 10, 0.5) == (
        b"\x0a\x02r1\x12\x04\x01\x02\xac\x02\x18\x0a\x25" + struct.pack("<f", 0.5)
    )


@given(st.lists(COUNT), st.integers(0, 20))
def test_packs_can_be_joined(ids, at):
    assert wire.pack_ids(ids[:at]) + wire.pack_ids(ids[at:]) == wire.pack_ids(ids)


# --- KV


@given(BLOCKS, st.booleans())
def test_heads_of_blocks_are_read(block, done):
    data = KVBlockStream(block=block, done=done).SerializeToString()
    message = wire.read_kv(data)
    head = message.block
    assert message.done is done
    assert (head.request_id.decode(), head.layer_idx, head.block_idx) == (
        block.request_id, block.layer_idx, block.block_idx,
    )  # fmt: skip
    assert (head.k_bytes, head.v_bytes) == (len(block.k_data), len(block.v_data))


def test_the_end_marker():
    assert wire.read_kv(b"\x10\x01") == KvMessage(None, done=True)
    assert wire.read_kv(b"") == KvMessage(None, done=False)
    assert wire.read_kv(b"\x10\x01\x10\x00") == KvMessage(None, done=False), "of two the last counts"


@given(BLOCKS, st.integers(0, 3), st.booleans())
def test_unusual_ways_to_write_a_block(block, more, first):
    """`done` in front, and lengths in more bytes than they need."""
    inner = block.SerializeToString()
    data = b"\x0a" + varint(len(inner), more) + inner
    data = b"\x10\x01" + data if first else data + b"\x10\x01"
    message = wire.read_kv(data)
    assert message.done
    assert DecodeRequest.FromString(entry(data, message.block)) == DecodeRequest(kv_blocks=[block])


@given(BLOCKS)
def test_fields_of_later_versions_are_passed_on(block):
    inner = block.SerializeToString() + b"\x32\x03new" + b"\x3d1234" + b"\x4112345678" + b"\x48\x07"
    data = b"\x0a" + varint(len(inner)) + inner + b"\x1a\x01x"
    head = wire.read_kv(data).block
    assert head.k_bytes == len(block.k_data)
    assert data[head.start : head.end] == varint(len(inner)) + inner


@given(BLOCKS, st.data())
def test_a_message_that_is_cut_is_no_message(block, data):
    whole = KVBlockStream(block=block).SerializeToString()
    at = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(WireError):
        wire.read_kv(whole[:at])


LIES = {
    "a block longer than its message": b"\x0a\x7f\x0a\x01r",
    "a block of 4 GiB": b"\x0a\xff\xff\xff\xff\x0f\x0a\x01r",
    "data longer than its block": b"\x0a\x04\x22\x7fab",
    "data that reaches from its block into the next field": b"\x0a\x03\x22\x02a\x10\x01",
    "a length without end": b"\x0a" + b"\xff" * 12,
    "a length of six bytes": b"\x0a\x80\x80\x80\x80\x80\x00",
    "a number without end": b"\x10" + b"\x80" * 11,
    "an id longer than any": b"\x0a\x82\x10\x0a\xff\x0f" + b"x" * 2047,
    "field 0": b"\x02\x00",
    "a field number out of range": b"\xf8\xff\xff\xff\x7f\x00",
    "a group": b"\x0b\x0c",
    "wire type 7": b"\x0f",
    "a block that is a number": b"\x08\x01",
    "done that is text": b"\x12\x01\x01",
    "a layer that is text": b"\x0a\x03\x12\x01a",
    "k_data that is a number": b"\x0a\x02\x20\x01",
    "an id that is a number": b"\x0a\x02\x08\x01",
    "two blocks": b"\x0a\x00\x0a\x00",
    "a fixed number that is cut": b"\x1d\x00\x00",
    "more fields than any message has": b"\x10\x01" * 65,
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_lies_are_refused(data):
    with pytest.raises(WireError) as caught:
        wire.read_kv(data)
    assert len(str(caught.value)) < 80


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_protobuf_does(data):
    try:
        ours = wire.read_kv(data)
    except WireError:
        return
    try:
        theirs = KVBlockStream.FromString(data)
    except DecodeError:
        assert ours.block is not None, "protobuf refuses ids that are no UTF-8"
        with pytest.raises(UnicodeDecodeError):
            ours.block.request_id.decode()
        return
    assert ours.done == theirs.done
    assert (ours.block is not None) == theirs.HasField("block")
    if ours.block is not None:
        assert ours.block.layer_idx == theirs.block.layer_idx
        assert ours.block.block_idx == theirs.block.block_idx
        assert ours.block.k_bytes == len(theirs.block.k_data)
        assert ours.block.v_bytes == len(theirs.block.v_data)
        assert DecodeRequest.FromString(entry(data, ours.block)).kv_blocks[0] == theirs.block


@given(BLOCKS, st.data())
def test_damaged_messages_are_refused_or_read_as_protobuf_does(block, data):
    damaged = bytearray(KVBlockStream(block=block).SerializeToString())
    at = data.draw(st.integers(0, min(len(damaged) - 1, 40)))
    damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        ours = wire.read_kv(bytes(damaged))
        theirs = KVBlockStream.FromString(bytes(damaged))
    except (WireError, DecodeError):
        return
    if ours.block is not None:
        assert (ours.block.k_bytes, ours.block.layer_idx) == (len(theirs.block.k_data), theirs.block.layer_idx)


# --- tokens and health


@given(TEXT, INT32, st.booleans(), TEXT)
def test_tokens_are_read(ident, number, done, reason):
    data = TokenStream(request_id=ident, token_id=number, done=done, finish_reason=reason).SerializeToString()
    assert wire.read_token(data) == Token(ident.encode(), number, done, reason)


def test_token_0_is_a_token_though_it_is_not_on_the_wire():
    assert wire.read_token(b"\x0a\x011") == Token(b"1", 0, done=False, finish_reason="")


@given(st.binary(max_size=40))
def test_any_token_is_refused_or_read_as_protobuf_does(data):
    try:
        ours = wire.read_token(data)
    except WireError:
        return
    try:
        theirs = TokenStream.FromString(data)
    except DecodeError:
        with pytest.raises(UnicodeDecodeError):
            ours.request_id.decode()
        return
    assert (ours.token_id, ours.done, ours.finish_reason) == (theirs.token_id, theirs.done, theirs.finish_reason)


@pytest.mark.parametrize(
    "data", [b"\x12\x01a", b"\x10", b"\x18", b"\x22\x02\xff\xfe", b"\x22\x01", b"\x22\x81\x10" + b"x" * 2049]
)
def test_broken_tokens_are_refused(data):
    with pytest.raises(WireError):
        wire.read_token(data)


@given(COUNT)
def test_health_is_read(status):
    assert wire.read_health(HealthCheckResponse(status=status).SerializeToString()) == status
