"""Frames of baidu_std: golden vectors, every split, lies about lengths."""

import gzip
import struct
import tracemalloc

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from coordinator.wire.protobuf.brpc_pb2 import RpcMeta
from coordinator.wire.protobuf.xllm_pb2 import HeartbeatRequest, Status
from coordinator.wire.prpc import (
    BAD_REQUEST,
    GZIP,
    HEAD,
    NO_METHOD,
    PayloadError,
    PrpcError,
    PrpcParser,
    encode_error,
    encode_frame,
    encode_reply,
)

# xLLM protocol page §2.1
HEARTBEAT = bytes.fromhex(
    "5052504300000051000000340a2e0a21786c6c6d5f736572766963652e70726f746f2e586c6c6d52706353657276696365120948656172746265"
    "6174180020010a0d31302e302e302e313a383031301a070802150000003f3203616263"
)
OK = bytes.fromhex("5052504300000008000000061202080020010801")


def call(method="Heartbeat", payload=b"", correlation_id=1, **more):
    meta = RpcMeta(correlation_id=correlation_id, **more)
    meta.request.service_name = "xllm_service.proto.XllmRpcService"
    meta.request.method_name = method
    return encode_frame(meta, payload)


def raw(body_bytes, meta_bytes, rest=b"", magic=b"PRPC"):
    return HEAD.pack(magic, body_bytes, meta_bytes) + rest


def parts(data, cuts):
    at = 0
    for cut in (*sorted(cuts), len(data)):
        yield data[at:cut]
        at = cut


def read(data, *cuts, **more):
    parser = PrpcParser(**more)
    frames = [frame for part in parts(data, cuts) for frame in parser.feed(part)]
    return frames, parser


def told(frame):
    return frame.meta.request.method_name, frame.meta.correlation_id, frame.payload


def test_golden_heartbeat_is_read():
    (frame,), parser = read(HEARTBEAT)
    assert len(HEARTBEAT) == 93
    assert frame.meta.request.service_name == "xllm_service.proto.XllmRpcService"
    assert frame.meta.request.method_name == "Heartbeat"
    assert frame.meta.correlation_id == 1
    beat = HeartbeatRequest.FromString(frame.expanded(1000))
    assert (beat.name, beat.incarnation_id) == ("10.0.0.1:8010", "abc")
    assert (beat.load_metrics.waiting_requests_num, beat.load_metrics.gpu_cache_usage_perc) == (2, 0.5)
    assert parser.idle


def test_golden_heartbeat_is_written():
    beat = HeartbeatRequest(name="10.0.0.1:8010", incarnation_id="abc")
    beat.load_metrics.waiting_requests_num = 2
    beat.load_metrics.gpu_cache_usage_perc = 0.5
    assert call(payload=beat.SerializeToString(), compress_type=0) == HEARTBEAT


def test_golden_reply_is_written_and_read():
    assert encode_reply(1, Status(ok=True).SerializeToString()) == OK
    (frame,), _ = read(OK)
    assert Status.FromString(frame.payload).ok
    assert frame.meta.response.error_code == 0


def test_error_replies_carry_code_and_text():
    (frame,), _ = read(encode_error(7, NO_METHOD, "no such method"))
    assert (frame.meta.response.error_code, frame.meta.response.error_text) == (1002, "no such method")
    assert (frame.meta.correlation_id, frame.payload) == (7, b"")


def test_every_split_gives_the_same_frames():
    data = HEARTBEAT + call("Generations", b"x" * 40, 2) + OK
    whole = [told(frame) for frame in read(data)[0]]
    assert len(whole) == 3
    for cut in range(len(data) + 1):
        frames, parser = read(data, cut)
        assert [told(frame) for frame in frames] == whole, cut
        assert parser.idle
    frames, _ = read(data, *range(len(data)))
    assert [told(frame) for frame in frames] == whole


def test_unfinished_frames_are_held():
    frames, parser = read(HEARTBEAT + HEARTBEAT[:-1])
    assert len(frames) == 1
    assert not parser.idle
    assert len(parser.feed(HEARTBEAT[-1:])) == 1


def test_frames_may_be_empty():
    (frame,), _ = read(raw(0, 0))
    assert told(frame) == ("", 0, b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (raw(8, 6, magic=b"HTTP"), "begins with PRPC"),
        (b"G", "begins with PRPC"),
        (b"PRX", "begins with PRPC"),
        (raw(6, 7), "meta part of 7 bytes in a body of 6"),
        (raw(0xFFFFFFFF, 0), "above the limit"),
        (raw(1001, 6), "above the limit of 1000"),
        (raw(3, 3, b"\xff\xff\xff"), "meta part of a frame cannot be read"),
        (call(payload=b"abc", attachment_size=4), "attachment of 4 bytes where 3 are left"),
        (call(payload=b"abc", attachment_size=-1), "attachment of -1 bytes"),
    ],
)
def test_what_cannot_be_read_is_told_at_once(data, words):
    with pytest.raises(PrpcError, match=words):
        read(data, max_body_bytes=1000)
    with pytest.raises(PrpcError):
        read(data, *range(len(data)), max_body_bytes=1000)


def test_a_frame_of_just_the_limit_is_read():
    data = call(payload=b"abc")
    size = len(data) - HEAD.size
    assert len(read(data, max_body_bytes=size)[0]) == 1
    with pytest.raises(PrpcError):
        read(data, max_body_bytes=size - 1)


def test_attachments_are_left_out():
    (frame,), _ = read(call(payload=b"payload" + b"attached", attachment_size=8))
    assert frame.payload == b"payload"


def test_gzip_payloads_are_expanded_within_bounds():
    (frame,), _ = read(call(payload=gzip.compress(b"x" * 1000), compress_type=GZIP))
    assert frame.expanded(1000) == b"x" * 1000
    with pytest.raises(PayloadError, match="more than 999 bytes") as caught:
        frame.expanded(999)
    assert caught.value.code == BAD_REQUEST


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b"no gzip at all", GZIP, "no gzip data"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-4], GZIP, "ends early"),
        (b"", GZIP, "ends early"),
        (b"abc", 1, "compress_type 1 is not supported"),
        (b"abc", 77, "compress_type 77 is not supported"),
    ],
)
def test_payloads_that_cannot_be_expanded(payload, kind, words):
    (frame,), _ = read(call(payload=payload, compress_type=kind))
    with pytest.raises(PayloadError, match=words):
        frame.expanded(10_000)


def test_a_gzip_bomb_costs_no_more_than_its_bound():
    bomb = gzip.compress(bytes(50_000_000))
    (frame,), _ = read(call(payload=bomb, compress_type=GZIP))
    tracemalloc.start()
    with pytest.raises(PayloadError):
        frame.expanded(100_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_any_bytes_end_in_frames_or_a_clear_error(data, cuts):
    try:
        frames, parser = read(data, *(cut for cut in cuts if cut <= len(data)), max_body_bytes=200)
    except PrpcError as error:
        note(str(error))
        return
    assert sum(len(frame.payload) for frame in frames) <= len(data)
    assert len(parser._buffer) <= 200 + HEAD.size


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 2**32 - 1) | st.integers(0, 80),
    st.integers(0, 2**32 - 1) | st.integers(0, 80),
    st.binary(max_size=120),
    st.lists(st.integers(0, 140), max_size=6),
)
def test_lies_about_lengths_end_in_frames_or_a_clear_error(body_bytes, meta_bytes, rest, cuts):
    data = raw(body_bytes, meta_bytes, rest)
    try:
        _, parser = read(data, *(cut for cut in cuts if cut <= len(data)), max_body_bytes=64)
    except PrpcError as error:
        note(str(error))
        return
    assert body_bytes <= 64
    assert len(parser._buffer) <= 64 + HEAD.size


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 200))
def test_a_broken_call_never_costs_more_than_its_connection(payload, body_off, meta_off, flip):
    data = bytearray(call(payload=payload, compress_type=GZIP))
    magic, body_bytes, meta_bytes = struct.unpack_from(">4sII", data)
    struct.pack_into(">4sII", data, 0, magic, max(0, body_bytes + body_off), max(0, meta_bytes + meta_off))
    data[flip % len(data)] ^= 1 << flip % 8
    try:
        frames, _ = read(bytes(data), max_body_bytes=1000)
        for frame in frames:
            str(frame.meta.request.method_name)
            frame.expanded(1000)
    except (PrpcError, PayloadError) as error:
        note(str(error))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=50)), max_size=5), st.lists(st.integers(0, 700)))
def test_what_is_written_is_read_again(calls, cuts):
    data = b"".join(call(method, payload, number) for number, (method, payload) in enumerate(calls))
    frames, parser = read(data, *(cut for cut in cuts if cut <= len(data)))
    assert [told(frame) for frame in frames] == [
        (method, number, payload) for number, (method, payload) in enumerate(calls)
    ]
    assert parser.idle
