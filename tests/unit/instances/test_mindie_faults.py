"""Each fault does what its line in the menu says."""

import asyncio
import json
import time

import pytest
from mindie_client import (
    DEADLINE_S,
    body_of,
    cluster,
    connect,
    control,
    encode_request,
    linked,
    post,
    read_head,
    run,
    text_of_stream,
    until,
)

from instances.mindie.settings import MENU

PROMPT = "the light [[length:8]]"


def marked(fault, prompt=PROMPT):
    return f"{prompt} [[fault:{fault}]]"


async def started(prefill, decode, fault, *, stream=True, family="completions"):
    """A request with a fault: (answer of prefill, req-id)."""
    headers = control(decode)
    answer = await post(prefill, *body_of(family, marked(fault), stream=stream), headers)
    return answer, headers["req-id"]


async def envelope_with(fault, *, stream=True):
    async with cluster() as (fleet, prefill, decode, _link):
        answer, req_id = await started(prefill, decode, fault, stream=stream)
        assert await fleet.kv_empty()
        return answer, req_id


async def events_with(fault, *, stream=True, family="completions", last_data=None):
    """(events, text of the whole stream) of a request with a fault; no KV may be left."""
    async with cluster() as (fleet, prefill, decode, link):
        answer, req_id = await started(prefill, decode, fault, stream=stream, family=family)
        ends = last_data or (2 if stream and family == "completions" else 1)
        events = await link.events(req_id, ends)
        assert await fleet.kv_empty()
        return answer.json, events


# --- prefill


async def test_wrong_req_id():
    answer, req_id = await envelope_with("wrong_req_id")
    assert answer.json["reqId"] != req_id


@pytest.mark.parametrize(("fault", "key"), [("no_output", "output"), ("no_is_last", "isLastResp")])
async def test_missing_keys(fault, key):
    answer, _ = await envelope_with(fault)
    assert answer.status == 200
    assert key not in answer.json


async def test_empty_output():
    answer, _ = await envelope_with("empty_output")
    assert answer.json["output"] == ""


async def test_not_json():
    answer, _ = await envelope_with("not_json")
    assert answer.status == 200
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(answer.body)


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        ("fail_after_accept", 500, "Engine callback timeout."),
        ("enqueue_refused", 424, "Failed to enqueue inferRequest."),
        ("refuse_handover=no thanks", 500, "[P Node] Send D request failed:no thanks"),
    ],
)
async def test_failures_of_prefill(fault, status, text):
    answer, _ = await envelope_with(fault)
    assert (answer.status, answer.json["error"]) == (status, text)


async def test_decode_wins_the_race_when_the_envelope_is_delayed():
    async with cluster() as (_, prefill, decode, link):
        headers = control(decode)
        path, body = body_of("completions", marked("reply_delay=0.1"), stream=True)
        waiting = asyncio.create_task(post(prefill, path, body, headers))
        events = await link.events(headers["req-id"], 2)
        assert not waiting.done()
        envelope = (await waiting).json
        assert text_of_stream("completions", envelope["output"].encode() + b"".join(b for _, b in events))


async def test_decode_without_the_right_kv_writes_visibly_wrong_text():
    async with cluster() as (fleet, prefill, decode, link):
        _, _, text = await run(prefill, decode, link, "chat", marked("wrong_kv"), stream=True)
        assert "<KV-LOST>" in text
        assert decode.engine.decode.wrong_kv == 1
        assert await fleet.kv_empty()


async def test_instances_with_different_seeds_do_not_understand_each_other():
    async with cluster(decode={"seed": 1}) as (_, prefill, decode, link):
        _, _, text = await run(prefill, decode, link, "vllm", PROMPT, stream=True)
        assert "<KV-LOST>" in text


# --- decode: ends


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("decode_error", b"Failed forward in for infer engine."),
        ("decode_error=Failed to get token id", b"Failed to get token id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_events_before_any_output(fault, text, stream):
    _, events = await events_with(fault, stream=stream)
    assert events == [("error", text)]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("pull_failed", b"Pull kv failed irreversibly."),
        ("pull_failed=reversibly", b"Pull kv failed reversibly."),
    ],
)
async def test_kv_that_was_not_pulled_stays_pinned_on_prefill_until_it_is_stopped(fault, text):
    async with cluster() as (fleet, prefill, decode, link):
        _, req_id = await started(prefill, decode, fault)
        assert await link.events(req_id) == [("error", text)]
        assert (decode.ledger.used_blocks, prefill.ledger.count("pinned")) == (0, 1)
        assert (await post(prefill, "/v2/models/sim-model/stopInfer", {"id": req_id})).status == 200
        assert await fleet.kv_empty(0)


async def test_an_error_event_after_some_tokens():
    _, events = await events_with("decode_error@4=: broke")
    assert [prefix for prefix, _ in events] == ["data", "data", "data", "error"]
    assert events[-1][1] == b": broke"


async def test_a_retry_event_after_some_tokens_and_its_refusal():
    _, events = await events_with("preempt@3")
    assert [prefix for prefix, _ in events] == ["data", "data", "retry"]
    _, events = await events_with("preempt@3]][[fault:recompute_unsupported")
    assert events[-1] == ("error", b"Try to do recompute but it is not supported.")


async def test_a_stalled_request_stays_alive_until_it_is_stopped():
    async with cluster() as (fleet, prefill, decode, link):
        _, req_id = await started(prefill, decode, "stall@3")
        assert [(await link.event())[1] for _ in range(2)] == ["data", "data"]
        assert not await fleet.kv_empty(0.05)
        assert (await post(decode, "/v2/models/sim-model/stopInfer", {"id": req_id})).status == 200
        assert await fleet.kv_empty(0)


async def test_stalled_requests_go_on_when_told():
    async with cluster() as (fleet, prefill, decode, link):
        _, stands = await started(prefill, decode, "stall@3")
        assert [(await link.event())[1] for _ in range(2)] == ["data", "data"]
        _, is_not_there_yet = await started(prefill, decode, "stall@7")
        await post(decode, "/sim/act", {"do": "go_on"})
        ends = 0
        while ends < 4:  # two of each
            req_id, prefix, _ = await link.event()
            assert req_id in (stands, is_not_there_yet)
            ends += prefix == "lastData"
        assert await fleet.kv_empty()
        _, later = await started(prefill, decode, "stall@3")
        assert [(await link.event())[1] for _ in range(2)] == ["data", "data"]
        assert not await fleet.kv_empty(0.05)
        assert (await post(decode, "/v2/models/sim-model/stopInfer", {"id": later})).status == 200


async def test_a_slow_request_holds_up_nobody_else():
    async with cluster() as (_, prefill, decode, link):
        _, slow = await started(prefill, decode, "slow=0.03")
        _, fast = await started(prefill, decode, "late_events=0")
        order = [(await link.event())[0] for _ in range(14)]
        assert order.index(fast) < order.index(slow)
        assert order[-1] == slow


async def test_the_instance_dies_and_comes_back():
    async with cluster() as (fleet, prefill, decode, link):
        await started(prefill, decode, "decode_crash@3=0.05")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await link.events("none")
        assert await fleet.kv_empty()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    _, writer = await connect(decode)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)
        writer.close()
        async with linked(decode) as again:
            assert (await run(prefill, decode, again, "tgi", PROMPT))[2]


@pytest.mark.parametrize(("fault", "count"), [("late_events=0", 0), ("late_events=2", 2)])
async def test_late_events(fault, count):
    async with cluster() as (_, prefill, decode, link):
        _, req_id = await started(prefill, decode, f"stall@3]][[fault:{fault}", family="vllm")
        for _ in range(2):
            await link.event()
        await post(decode, "/v2/models/sim-model/stopInfer", {"id": req_id})
        await asyncio.sleep(0.03)
        decode.engine.act("dresult_close", "")
        events = [await link.event() for _ in range(count + 1)]
        assert [prefix for _, prefix, _ in events] == ["data"] * count + ["close"]


# --- decode: shapes of events


async def chunks_with(fault, *, family="vllm", stream=True):
    """Raw payloads of a request's chunks, up to the last."""
    async with cluster() as (_, prefill, decode, link):
        _, req_id = await started(prefill, decode, fault, family=family, stream=stream)
        chunks = []
        while not chunks or b"lastData" not in chunks[-1]:
            chunks.append(await link.chunk())
        return req_id.encode(), chunks


async def test_merge_puts_a_heartbeat_into_the_same_chunk():
    _, chunks = await chunks_with("merge@3")
    assert [chunk.endswith(b"\0\0ka:heartbeat\0") for chunk in chunks[:3]] == [False, True, False]


async def test_join_puts_two_pieces_under_one_id():
    req_id, chunks = await chunks_with("join@2")
    assert chunks[0].count(b"reqId:") == 1
    assert chunks[0].count(b"\0data:{") == 2
    assert chunks[0].startswith(b"reqId:%b\0data:{" % req_id)


async def test_no_req_id():
    _, chunks = await chunks_with("no_req_id@3")
    assert chunks[1].startswith(b"data:{")


async def test_split_keeps_one_chunk_and_split_chunks_makes_two():
    _, whole = await chunks_with("late_events=0", stream=False)
    _, split = await chunks_with("split", stream=False)
    assert len(split) == len(whole) == 1
    async with cluster() as (_, prefill, decode, link):
        await started(prefill, decode, "split", family="vllm", stream=False)
        async with asyncio.timeout(DEADLINE_S):
            first = await link.reader.read(1 << 20)
            rest = await link.reader.read(1 << 20)
        assert first
        assert rest.endswith(b"\0\r\n")
    async with cluster() as (_, prefill, decode, link):
        await started(prefill, decode, "split_chunks", family="vllm", stream=False)
        first, second = await link.chunk(), await link.chunk()
        assert b"lastData:" in first
        assert not first.endswith(b"\0")
        assert second.endswith(b"}\0")


@pytest.mark.parametrize(
    ("fault", "extra"),
    [
        ("unknown_keyword@3", b"\0mystery:what is this\0"),
        ("unknown_req_id@3", b"reqId:99999999999999999999\0data:"),
        ("colons@3", b"\0data:: :a:b::c:\n\n\0"),
        ("nul@3", b"\0data:: before\0after\n\n\0"),
        ("huge@3=1", b"x" * (1 << 20)),
    ],
)
async def test_further_messages(fault, extra):
    _, chunks = await chunks_with(fault, family="tgi")
    assert [extra in chunk for chunk in chunks[:3]] == [False, True, False]
    assert b'"generated_text":"' in chunks[-1]


async def test_events_after_the_end():
    _, events = await events_with("after_last", last_data=3)
    assert [prefix for prefix, _ in events][-4:] == ["lastData", "lastData", "data", "lastData"]


async def test_no_done():
    _, events = await events_with("no_done", last_data=1)
    assert events[-1][0] == "lastData"
    async with cluster() as (_, prefill, decode, link):
        _, first = await started(prefill, decode, "no_done")
        await link.events(first)
        _, second = await started(prefill, decode, "no_done")
        assert (await link.event())[0] == second


# --- decode: the standing stream


@pytest.mark.parametrize("fault", ["dresult_end", "dresult_close"])
async def test_clean_ends_of_the_stream(fault):
    async with cluster() as (_, prefill, decode, link):
        await started(prefill, decode, f"{fault}@3", family="vllm")
        assert [(await link.event())[1] for _ in range(2)] == ["data", "data"]
        if fault == "dresult_close":
            assert (await link.event())[:2] == ("0xffffffffffffffff", "close")
        assert await link.chunk() == b""


@pytest.mark.parametrize(
    ("fault", "error"), [("dresult_fin", asyncio.IncompleteReadError), ("dresult_reset", ConnectionResetError)]
)
async def test_broken_ends_of_the_stream(fault, error):
    async with cluster() as (_, prefill, decode, link):
        await started(prefill, decode, "stall@2", family="vllm")
        await link.event()
        decode.engine.act(fault, "")
        with pytest.raises(error):
            await link.chunk()
        await started(prefill, decode, "late_events=0", family="vllm")
        await until(lambda: decode.engine.decode.lost_messages)


async def test_silence_stops_heartbeats_and_events_for_a_while():
    async with cluster(decode={"settings": {"heartbeat_s": 0.02}}) as (_, prefill, decode, link):
        await started(prefill, decode, "silence@2=0.25", family="vllm")
        await link.event()
        began_s = time.monotonic()
        await link.event()
        assert time.monotonic() - began_s > 0.2


async def test_the_stream_may_be_refused():
    async with cluster() as (_, _prefill, decode, _link):
        decode.faults.replace(["dresult_status=503"])
        reader, writer = await connect(decode)
        writer.write(encode_request("GET", "/dresult"))
        assert (await read_head(reader))[0] == 503
        writer.close()


def test_every_fault_of_the_menu_is_tested_here_or_with_the_hybrid_role():
    from pathlib import Path

    here = Path(__file__).parent
    text = "".join((here / name).read_text() for name in ("test_mindie_faults.py", "test_mindie_hybrid.py"))
    assert [name for name in MENU if f'"{name}' not in text and f":{name}" not in text] == []
