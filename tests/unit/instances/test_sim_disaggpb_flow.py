"""Prefill and decode workers as they should go (disaggpb protocol page §1, §2, §4), over real gRPC."""

import asyncio
import os
import struct
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from disaggpb_client import (
    DEADLINE_S,
    DECODE,
    PREFILL,
    PROMPT,
    blocks_of,
    channel_to,
    decode_call,
    decoded,
    ids_of,
    kv_of,
    messages,
    pair,
    prefill_call,
    prefilled,
)
from openai_client import get, post, until

from instances.disaggpb import vocabulary
from instances.disaggpb.proto import disagg_pb2
from instances.disaggpb.proto.disagg_pb2 import DecodeRequest
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

ROOT = Path(__file__).parents[3]
LLAMA = {"layers": 32, "kv_heads": 8, "head_dim": 128}
OK = grpc.StatusCode.OK


async def test_prefill_gives_one_block_for_each_layer_and_then_done():
    async with pair() as fleet:
        got, code, _ = await prefilled(fleet.prefill[0])
        assert code is OK
        blocks = blocks_of(got)
        assert [(block.request_id, block.layer_idx, block.block_idx) for block in blocks] == [
            ("r1", layer, 0) for layer in range(4)
        ]
        size = len(PROMPT) * 2 * 8 * 2
        assert {(len(block.k_data), len(block.v_data)) for block in blocks} == {(size, size)}
        assert len({block.k_data for block in blocks} | {block.v_data for block in blocks}) == 8
        assert [message.done for message in got] == [False] * 4 + [True]
        assert not got[-1].HasField("block")
        # numbers that are finite halves, little endian
        assert all(abs(number) < 2 for number in struct.unpack(f"<{size // 2}e", blocks[0].k_data))
        assert await fleet.kv_empty()


async def test_decode_gives_the_answer_of_the_prompt():
    async with pair() as fleet:
        kv = await kv_of(fleet.prefill[0])
        got, code, _ = await decoded(fleet.decode[0], kv)
        assert code is OK
        assert [(message.done, message.finish_reason) for message in got] == [(False, "")] * 9 + [(True, "stop")]
        assert {message.request_id for message in got} == {"r1"}
        ids = ids_of(got)
        assert (ids[-1], ids.count(vocabulary.EOS)) == (2, 1)
        # greedy: temperature changes nothing, nor does the id of the request or which worker it is
        for temperature in (0.0, 1.9):
            assert ids_of((await decoded(fleet.decode[0], kv, temperature=temperature))[0]) == ids
        again = await kv_of(fleet.prefill[0], "r2")
        assert ids_of((await decoded(fleet.decode[0], again, "r2"))[0]) == ids
        assert fleet.decode[0].engine.wrong_kv == {}
        other = [*PROMPT, 9]
        kv = await kv_of(fleet.prefill[0], prompt=other)
        assert ids_of((await decoded(fleet.decode[0], kv, prompt=other))[0]) != ids


@pytest.mark.parametrize(
    ("limit", "count", "finish"),
    [(4, 4, "length"), (1, 1, "length"), (0, 1, "length"), (-1, 1, "length"), (10, 10, "stop")],
)
async def test_the_limit(limit, count, finish):
    async with pair() as fleet:
        kv = await kv_of(fleet.prefill[0])
        got, _, _ = await decoded(fleet.decode[0], kv, max_new_tokens=limit)
        assert (len(got), got[-1].done, got[-1].finish_reason) == (count, True, finish)


async def test_no_ids_and_odd_lengths_are_unknown_errors():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        got, code, details = await prefilled(prefill, prompt=[])
        assert (got, code, details) == ([], grpc.StatusCode.UNKNOWN, "prefill: token_ids is empty")
        kv = await kv_of(prefill)
        got, code, details = await decoded(decode, kv, prompt=[])
        assert (got, code, details) == ([], grpc.StatusCode.UNKNOWN, "decode: token_ids is empty")
        for part in ("k_data", "v_data"):
            kv = await kv_of(prefill)
            setattr(kv[2], part, getattr(kv[2], part)[:-1])
            got, code, details = await decoded(decode, kv)
            assert (got, code, details) == ([], grpc.StatusCode.UNKNOWN, "decode: odd length of fp16 data")
        assert await fleet.kv_empty()


def _spoilt(kv, how):
    if how == "layers":
        return kv[:-1]
    if how == "order":
        return [kv[1], kv[0], *kv[2:]]
    if how == "request_id":
        kv[3].request_id = "r2"
    elif how == "length":
        kv[0].v_data = kv[0].v_data[:-2]
    elif how == "content":
        kv[1].k_data, kv[1].v_data = kv[1].v_data, kv[1].k_data
    return kv


@pytest.mark.parametrize("how", ["layers", "order", "request_id", "length", "content"])
async def test_kv_that_is_not_right_gives_visibly_wrong_tokens(how):
    async with pair() as fleet:
        kv = _spoilt(await kv_of(fleet.prefill[0]), how)
        got, code, _ = await decoded(fleet.decode[0], kv)
        assert (code, set(ids_of(got)), got[-1].finish_reason) == (OK, {vocabulary.LOST}, "length")
        assert set(vocabulary.decode(ids_of(got)).split()) == {"<KV-LOST>"}
        assert fleet.decode[0].engine.wrong_kv == {how: 1}


async def test_the_kv_of_another_prompt_is_not_right():
    async with pair() as fleet:
        kv = await kv_of(fleet.prefill[0], prompt=[*PROMPT[:-1], 7])
        got, _, _ = await decoded(fleet.decode[0], kv)
        assert set(ids_of(got)) == {vocabulary.LOST}


async def test_field_numbers_on_the_wire():
    """Requests and answers as bytes, by hand (protocol page §1)."""
    async with pair(layers=2, kv_heads=1, head_dim=1) as fleet:
        prefill, decode = fleet.instances
        async with channel_to(prefill) as channel:
            call = channel.unary_stream(PREFILL)(b"\x0a\x01x\x12\x03\x05\x06\x07\x18\x02", timeout=DEADLINE_S)
            first, second, last = [message async for message in call]
        # request_id 1, layer_idx 2 (0 is not sent), k_data 4, v_data 5
        assert first == b"\x0a\x13\x0a\x01x\x22\x06" + first[7:13] + b"\x2a\x06" + first[15:21]
        assert second == b"\x0a\x15\x0a\x01x\x10\x01\x22\x06" + second[9:15] + b"\x2a\x06" + second[17:23]
        assert last == b"\x10\x01"
        blocks = b"".join(b"\x12" + message[1:] for message in (first, second))
        request = b"\x0a\x01x" + blocks + b"\x1a\x03\x05\x06\x07\x20\x02"
        async with channel_to(decode) as channel:
            call = channel.unary_stream(DECODE)(request, timeout=DEADLINE_S)
            tokens = [message async for message in call]
        assert (len(tokens), decode.engine.wrong_kv) == (2, {})
        assert tokens[0].startswith(b"\x0a\x01x\x10")
        assert tokens[1].endswith(b"\x18\x01\x22\x06length")


async def test_blocks_can_be_passed_on_without_being_read():
    """A block of the stream, appended to a serialized request, is one of its blocks (protocol page §4)."""
    async with pair() as fleet:
        prefill, decode = fleet.instances
        async with channel_to(prefill) as channel:
            request = disagg_pb2.PreFillRequest(request_id="r1", token_ids=PROMPT).SerializeToString()
            raw = [message async for message in channel.unary_stream(PREFILL)(request, timeout=DEADLINE_S)]
        spliced = DecodeRequest(request_id="r1", token_ids=PROMPT, max_new_tokens=30).SerializeToString()
        spliced += b"".join(b"\x12" + message[1:] for message in raw[:-1])
        async with channel_to(decode) as channel:
            call = channel.unary_stream(DECODE)(spliced, timeout=DEADLINE_S)
            tokens = [message async for message in call]
        assert (len(tokens), decode.engine.wrong_kv) == (10, {})


def _sized(count):
    return [5] * count


@pytest.mark.parametrize(("count", "fits"), [(1023, True), (1024, False)])
async def test_a_prefill_message_of_llama_size(count, fits):
    async with pair(**LLAMA) as fleet, channel_to(fleet.prefill[0], options=None) as channel:
        call = prefill_call(channel, prompt=_sized(count))
        async with asyncio.timeout(DEADLINE_S):
            if fits:
                first = await anext(aiter(call))
                assert len(first.block.k_data) == count * 2048
                call.cancel()
            else:
                got, code, details = await messages(call)
                assert (got, code) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert "larger than max" in details
        assert await fleet.kv_empty()


@pytest.mark.parametrize("limit", [4_194_304, -1])
async def test_a_decode_request_of_llama_size(limit):
    async with pair(**LLAMA, max_message_bytes=limit) as fleet:
        for count, fits in ((31, True), (32, False)):
            kv = await kv_of(fleet.prefill[0], prompt=_sized(count))
            got, code, details = await decoded(fleet.decode[0], kv, prompt=_sized(count), max_new_tokens=2)
            if fits or limit < 0:
                assert (len(got), code) == (2, OK)
            else:
                assert (got, code) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert "larger than max (4194" in details
        assert fleet.decode[0].engine.wrong_kv == {}


async def test_roles_bind_and_a_hybrid_has_both():
    async with pair() as fleet:
        for wrong in (decoded(fleet.prefill[0], []), prefilled(fleet.decode[0])):
            assert (await wrong)[1] is grpc.StatusCode.UNIMPLEMENTED
    async with Fleet([Options(engine="disaggpb")]) as fleet:
        kv = await kv_of(fleet.hybrid[0])
        assert (await decoded(fleet.hybrid[0], kv))[1] is OK


async def test_cancelled_calls_give_their_kv_back():
    async with pair(prefill=["prefill_stall@2"], decode=["decode_stall@2"]) as fleet:
        prefill, decode = fleet.instances
        async with channel_to(prefill) as channel:
            call = prefill_call(channel)
            assert (await anext(aiter(call))).block.layer_idx == 0
            assert prefill.ledger.count("allocated") == 1
            call.cancel()
            assert await fleet.kv_empty()
        async with Fleet([Options(engine="disaggpb", role="prefill")]) as other:
            kv = await kv_of(other.prefill[0])
        async with channel_to(decode) as channel:
            call = decode_call(channel, kv)
            await anext(aiter(call))
            assert decode.ledger.count("allocated") == 1
            call.cancel()
        assert await fleet.kv_empty()
        assert decode.engine.batch.running == decode.engine.batch.waiting == 0
        assert decode.ledger.released[-1]["why"] == "CANCELLED"
        await until(lambda: decode.live == 0)


async def test_requests_run_side_by_side():
    async with pair(more={"timing": Timing(prefill_ms=1, decode_ms=1, transfer_ms=1)}) as fleet:
        prefill, decode = fleet.instances

        async def one(number):
            prompt = [*PROMPT, number + 10]
            kv = await kv_of(prefill, f"r{number}", prompt)
            return (await decoded(decode, kv, f"r{number}", prompt))[0]

        answers = await asyncio.gather(*(one(number) for number in range(10)))
        assert all(answer[-1].done for answer in answers)
        assert len({tuple(ids_of(answer)) for answer in answers}) == 10
        assert decode.engine.wrong_kv == {}
        assert await fleet.kv_empty()


async def test_the_record_and_the_state():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        kv = await kv_of(prefill)
        await decoded(decode, kv)
        record = (await get(decode, "/sim/requests")).json["requests"][-1]
        assert (record["method"], record["path"], record["outcome"]) == ("GRPC", DECODE, "OK")
        assert (record["note"], record["role"]) == ("10 tokens", "decode")
        assert f'"kv_blocks": [["r1", 0, 0, {len(kv[0].k_data)}' in record["body"]
        assert record["connection"].startswith("127.0.0.1:")
        state = (await get(decode, "/sim/state")).json
        assert state["kv_bytes_received"] == sum(len(block.k_data) + len(block.v_data) for block in kv)
        assert (state["generated_tokens"], state["kv"]["allocated"], state["inference_requests"]) == (10, 0, 1)
        assert (await get(prefill, "/sim/state")).json["kv_bytes_sent"] == state["kv_bytes_received"]
        assert (await get(decode, "/v1/models")).status == 404
        assert (await post(decode, "/sim/reset", {})).status == 200
        assert (await get(decode, "/sim/state")).json["inference_requests"] == 0


async def test_ids_are_those_of_the_tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary.write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "The quiet river, under 東京. ok"
    assert tokenizer.encode(text).ids == vocabulary.encode(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert tokenizer.token_to_id("<|end|>") == vocabulary.EOS == 2
    assert tokenizer.id_to_token(0) not in (None, "<|end|>")
    assert all(vocabulary.to_wire(vocabulary.from_wire(wire)) == wire for wire in (0, 1, 2, 3, 500, 10**9))
    async with pair() as fleet:
        prompt = tokenizer.encode("go on [[length:20]]").ids
        kv = await kv_of(fleet.prefill[0], prompt=prompt)
        ids = ids_of((await decoded(fleet.decode[0], kv, prompt=prompt))[0])
        assert len(ids) == 21
        assert tokenizer.decode(ids[:-1]) == vocabulary.decode(ids)


def test_compiling_again_gives_the_same(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", str(ROOT), f"--python_out={tmp_path}",
               f"--mypy_out={tmp_path}", "instances/disaggpb/proto/disagg.proto"]  # fmt: skip
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    made = sorted(tmp_path.rglob("*_pb2.py*"))
    assert [file.name for file in made] == ["disagg_pb2.py", "disagg_pb2.pyi"]
    for file in made:
        wanted = file.read_text().replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
        assert (ROOT / file.relative_to(tmp_path)).read_text() == wanted


def test_the_messages_are_in_a_pool_of_their_own():
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto()
    disagg_pb2.DESCRIPTOR.CopyToProto(file)
    assert (file.package, [service.name for service in file.service]) == ("disagg", ["PrefillWorker", "DecodeWorker"])
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("instances/disaggpb/proto/disagg.proto")
