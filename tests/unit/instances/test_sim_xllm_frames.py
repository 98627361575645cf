"""baidu_std frames (xLLM protocol page §2.1)."""

import struct

import pytest

from instances.xllm import frames
from instances.xllm.frames import BadFrame, BadPayload, Frame, Reader
from instances.xllm.proto.meta_pb2 import RpcMeta
from instances.xllm.proto.service_pb2 import HeartbeatRequest, Status

HEARTBEAT = bytes.fromhex(
    "5052504300000051000000340a2e0a21786c6c6d5f736572766963652e70726f746f2e586c6c6d527063536572766963651209486561727462"
    "6561741800"
    "20010a0d31302e302e302e313a383031301a070802150000003f3203616263"
)
OK_REPLY = bytes.fromhex("5052504300000008000000061202080020010801")
SERVICE = "xllm_service.proto.XllmRpcService"


def heartbeat():
    beat = HeartbeatRequest(name="10.0.0.1:8010", incarnation_id="abc")
    beat.load_metrics.waiting_requests_num, beat.load_metrics.gpu_cache_usage_perc = 2, 0.5
    return beat


def test_golden_heartbeat():
    frame = frames.request(SERVICE, "Heartbeat", 1, heartbeat().SerializeToString())
    assert frame.encode() == HEARTBEAT
    (read,) = Reader().feed(HEARTBEAT)
    assert (read.meta.request.service_name, read.meta.request.method_name) == (SERVICE, "Heartbeat")
    assert read.meta.correlation_id == 1
    assert HeartbeatRequest.FromString(read.message()) == heartbeat()


def test_golden_reply():
    assert frames.reply(1, Status(ok=True).SerializeToString()).encode() == OK_REPLY
    (read,) = Reader().feed(OK_REPLY)
    assert read.meta.response.error_code == 0
    assert Status.FromString(read.message()).ok


def test_split_at_every_byte_and_several_at_once():
    one = frames.request("a.B", "C", 7, b"\x08\x01").encode()
    two = Frame(RpcMeta(correlation_id=8), b"payload", b"attached").encode()
    whole = one + two
    for cut in range(len(whole) + 1):
        reader = Reader()
        read = [*reader.feed(whole[:cut]), *reader.feed(whole[cut:])]
        assert [frame.meta.correlation_id for frame in read] == [7, 8]
        assert (read[1].payload, read[1].attachment) == (b"payload", b"attached")
    reader = Reader()
    byte_by_byte = [frame for byte in whole for frame in reader.feed(bytes([byte]))]
    assert [frame.encode() for frame in byte_by_byte] == [one, two]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PRPX", "PRPC"),
        (b"GET / HTTP/1.1", "PRPC"),
        (struct.pack(">4sII", b"PRPC", (64 << 20) + 1, 0), "at most"),
        (struct.pack(">4sII", b"PRPC", 4, 5), "meta is larger"),
        (struct.pack(">4sII", b"PRPC", 3, 3) + b"\xff\xff\xff", "cannot be read"),
        (struct.pack(">4sII", b"PRPC", 2, 2) + b"\x28\x05", "attachment"),
        (struct.pack(">4sII", b"PRPC", 11, 11) + b"\x28" + b"\xff" * 9 + b"\x01", "attachment"),
    ],
)
def test_what_cannot_be_a_frame(data, says):
    with pytest.raises(BadFrame, match=says):
        list(Reader().feed(data))


def test_the_header_is_enough_to_refuse():
    with pytest.raises(BadFrame):
        list(Reader(limit_bytes=100).feed(struct.pack(">4sII", b"PRPC", 101, 1)))
    assert list(Reader(limit_bytes=100).feed(struct.pack(">4sII", b"PRPC", 100, 1))) == []


def test_gzip():
    frame = frames.request("a.B", "C", 1, b"x" * 1000, gzip=True)
    (read,) = Reader().feed(frame.encode())
    assert len(read.payload) < 100
    assert read.message() == b"x" * 1000
    assert frames.reply(1, b"abc", gzip=True).message() == b"abc"
    for payload in (b"no gzip", frames.compressed(b"abc")[:-3], b""):
        with pytest.raises(BadPayload):
            Frame(RpcMeta(compress_type=2), payload).message()
    with pytest.raises(BadPayload, match="compress_type 1"):
        Frame(RpcMeta(compress_type=1), b"snappy").message()


def test_an_expanding_payload_is_bounded():
    bomb = frames.compressed(b"\0" * (65 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(BadPayload, match="too large"):
        Frame(RpcMeta(compress_type=2), bomb).message()


def test_frames_before_garbage_count():
    cut = Reader().feed(OK_REPLY + b"garbage")
    assert next(cut).meta.correlation_id == 1
    with pytest.raises(BadFrame):
        next(cut)
