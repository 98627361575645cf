"""The standing stream of results (MindIE protocol page §5)."""

import asyncio

import pytest
from mindie_client import (
    DEADLINE_S,
    MODEL,
    body_of,
    call,
    cluster,
    control,
    encode_request,
    get,
    linked,
    new_id,
    post,
    read_chunk,
    read_head,
    run,
    until,
)

from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

CLOSE = b"54\r\nreqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0\r\n"
SLOW = {"timing": Timing(decode_ms=20), "answer_tokens": (60, 60)}


async def test_the_head_of_the_stream():
    async with cluster() as (_, _prefill, _decode, link):
        status, _, headers = link.head
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["transfer-encoding"] == "chunked"


async def test_one_message_is_one_http_chunk():
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode, "1234567")
        await post(prefill, *body_of("vllm", "hi [[length:3]]", stream=True), headers)
        texts = [await link.wire_chunk() for _ in range(3)]
        assert [wire[:2] for wire in texts[:2]] == [b"%x" % (len(wire) - 6) for wire in texts[:2]]
        assert all(wire.startswith(b"reqId:1234567\0data:{", 4) and wire.endswith(b"}\0\0\r\n") for wire in texts[:2])
        assert texts[2] == b'26\r\nreqId:1234567\0lastData:{"text":[""]}\0\0\r\n'


async def test_heartbeats_come_when_nothing_else_does():
    async with cluster(decode={"settings": {"heartbeat_s": 0.05}}) as (_, _prefill, _decode, link):
        for _ in range(3):
            async with asyncio.timeout(DEADLINE_S):
                line, data = await read_chunk(link.reader)
            assert line + data + b"\r\n" == b"d\r\nka:heartbeat\0\r\n"


async def test_a_second_stream_replaces_the_first():
    async with cluster() as (_, prefill, decode, old), linked(decode) as new:
        assert await old.wire_chunk() == CLOSE
        async with asyncio.timeout(DEADLINE_S):
            assert await old.reader.readexactly(5) == b"0\r\n\r\n"
        _, events, text = await run(prefill, decode, new, "chat", "hi", stream=True)
        assert text
        assert events[-1][0] == "lastData"
        assert decode.engine.decode.dresult.opened == 2


async def test_requests_of_a_replaced_stream_are_lost_but_leave_no_kv():
    async with cluster(decode=SLOW) as (fleet, prefill, decode, old):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "hi", stream=True), headers)
        assert (await old.event())[1] == "data"
        async with linked(decode) as new:
            other = control(decode)
            await post(prefill, *body_of("vllm", "something else", stream=True, limit=3), other)
            seen = [await new.event() for _ in range(2)]
            assert {req_id for req_id, _, _ in seen} == {other["req-id"]}
            await until(lambda: not decode.engine.decode.live)
            assert decode.engine.decode.lost_messages > 0
            assert await fleet.kv_empty()


async def test_without_a_stream_the_output_is_lost():
    async with Fleet([Options(role="prefill"), Options(role="decode")]) as fleet:
        prefill, decode = fleet.prefill[0], fleet.decode[0]
        assert (await post(prefill, *body_of("chat", "hi"), control(decode))).status == 200
        assert await fleet.kv_empty()
        assert decode.engine.decode.lost_messages == 1


async def test_the_link_is_usable_again_after_its_coordinator_left():
    async with cluster() as (_, prefill, decode, link):
        link.writer.close()
        await until(lambda: not decode.engine.decode.dresult.current.alive)
        async with linked(decode) as again:
            _, _, text = await run(prefill, decode, again, "tgi", "hi")
            assert text


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("hybrid", "Non DMI does not support dresult request"),
        ("prefill", "Only the Decode node supports dresult but you send to prefill"),
    ],
)
async def test_only_decode_serves_the_stream(role, text):
    async with Fleet([Options(role=role)]) as fleet:
        answer = await get(fleet.instances[0], "/dresult")
        assert (answer.status, answer.json) == (400, {"error": text, "error_type": "Bad Request"})


async def test_the_close_message_leaves_the_connection_usable():
    async with cluster() as (_, _prefill, decode, old), linked(decode):
        await old.wire_chunk()
        async with asyncio.timeout(DEADLINE_S):
            await old.reader.readexactly(5)
            old.writer.write(encode_request("GET", "/v1/models"))
            assert (await read_head(old.reader))[0] == 200


# --- stopInfer


async def stop(instance, req_id, model=MODEL):
    return await post(instance, f"/v2/models/{model}/stopInfer", {"id": req_id})


async def test_stop_ends_a_request_and_frees_its_kv_after_a_late_event():
    async with cluster(decode=SLOW) as (fleet, prefill, decode, link):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "hi", stream=True), headers)
        await link.event()
        assert (await stop(prefill, headers["req-id"])).status == 404
        answer = await stop(decode, headers["req-id"])
        assert (answer.status, answer.json) == (200, {"id": headers["req-id"]})
        assert await fleet.kv_empty(0)
        assert (await link.event())[:2] == (headers["req-id"], "data")
        other = control(decode)
        await post(prefill, *body_of("vllm", "next", limit=2), other)
        assert (await link.event())[0] == other["req-id"]
        assert (await stop(decode, headers["req-id"])).status == 404


async def test_stop_during_the_transfer_frees_both_sides():
    timing = {"timing": Timing(transfer_ms=60_000)}
    async with cluster(decode=timing) as (fleet, prefill, decode, _link):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "hi", stream=True), headers)
        assert (prefill.ledger.count("pinned"), decode.ledger.count("allocated")) == (1, 1)
        assert (await stop(prefill, headers["req-id"])).status == 200
        assert (await stop(decode, headers["req-id"])).status == 200
        assert await fleet.kv_empty(0)


async def test_stop_on_prefill_alone_makes_decode_fail_its_pull():
    async with cluster(decode={"timing": Timing(transfer_ms=60)}) as (fleet, prefill, decode, link):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "hi", stream=True), headers)
        assert (await stop(prefill, headers["req-id"])).status == 200
        assert await link.events(headers["req-id"]) == [("error", b"Pull kv failed irreversibly.")]
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    ("model", "req_id", "status", "text"),
    [
        (MODEL, "77", 404, "RequestId is 77 not found."),
        ("other", "77", 404, "other"),
        (MODEL, "7/7", 422, "id must match"),
        (MODEL, "a" * 257, 422, "id must match"),
        (MODEL, 77, 422, "id must match"),
        (MODEL, None, 422, "id must match"),
    ],
)
async def test_refused_stops(model, req_id, status, text):
    async with Fleet([Options(role="decode")]) as fleet:
        answer = await stop(fleet.decode[0], req_id, model)
        assert answer.status == status
        assert text in answer.json["error"]


async def test_a_handover_is_never_taken_twice():
    async with cluster() as (fleet, prefill, decode, link):
        record = {
            "handover": "h1",
            "req_id": new_id(),
            "path": "/generate",
            "body": {"prompt": "hi"},
            "recompute": False,
            "sent": 1,
            "prefill": prefill.url,
            "prefill_ms": 0,
            "cached": 0,
        }
        first = await post(decode, "/sim/handover", record)
        assert first.json == {"accepted": True, "reason": None}
        assert (await link.events(record["req_id"]))[-1][0] == "error"  # prefill has no such KV
        second = await post(decode, "/sim/handover", record)
        assert second.json["reason"] == "this handover was taken already"
        to_prefill = await post(prefill, "/sim/handover", {**record, "handover": "h2"})
        assert to_prefill.json["reason"] == "this instance is prefill, not decode"
        assert (await call(prefill, "POST", "/sim/release", {"req_id": "1", "handover": "h1"})).status == 404
        assert await fleet.kv_empty()
