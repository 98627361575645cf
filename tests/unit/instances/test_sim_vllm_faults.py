"""Faults of simulated vLLM instances: each shows on the wire, and none leaves KV behind."""

import gzip
import json
import zlib

import pytest
from openai_client import CHAT, chat, clamped, decode_leg, get, opened, post, prefill_leg, stream, until

from instances.options import Options
from instances.run import Fleet

TEXT = "hello [[length:6]] "


def ordinary(*faults, **more):
    return Fleet([Options(engine="vllm", faults=faults, **more)])


def pair(prefill=(), decode=(), **settings):
    return Fleet(
        [
            Options(engine="vllm", role="prefill", faults=prefill, settings=settings),
            Options(engine="vllm", role="decode", faults=decode, settings=settings),
        ]
    )


async def right_text():
    async with ordinary() as fleet:
        return (await stream(fleet.hybrid[0], CHAT, chat(TEXT))).text()


# --- prefill


@pytest.mark.parametrize(("fault", "shows"), [("no_params", "absent"), ("null_params", None), ("empty_params", {})])
async def test_a_200_without_params_keeps_nothing(fault, shows):
    async with pair([fault]) as fleet:
        answer = await post(fleet.prefill[0], CHAT, clamped(chat(TEXT)))
        assert answer.status == 200
        assert answer.json.get("kv_transfer_params", "absent") == shows
        assert await fleet.kv_empty()


async def test_finish_stop():
    async with pair(["finish_stop"]) as fleet:
        answer = await post(fleet.prefill[0], CHAT, clamped(chat(TEXT)))
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert answer.json["kv_transfer_params"]
        assert (await decode_leg(fleet.decode[0], CHAT, chat(TEXT), answer.json["kv_transfer_params"])).status == 200
        assert await fleet.kv_empty()


async def test_stale_params():
    async with pair(["#1:stale_params"], kv_lease_s=0.05) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(TEXT))
        assert (await decode_leg(decode, CHAT, chat(TEXT), params)).status == 500
        assert decode.engine.load_failures == {"engine id": 1}
        assert await fleet.kv_empty()
        assert prefill.ledger.released[-1]["why"] == "expired"


async def test_wrong_kv():
    async with pair(["wrong_kv"]) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(TEXT))
        events = await stream(decode, CHAT, {**chat(TEXT), "kv_transfer_params": params})
        assert set(events.text().split()) == {"<KV-LOST>"}
        assert await fleet.kv_empty()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_transfer_failed(policy):
    async with pair(decode=["transfer_failed"], kv_load_failure_policy=policy, kv_lease_s=0.05) as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(TEXT))
        answer = await decode_leg(decode, CHAT, chat(TEXT), params)
        assert answer.status == (500 if policy == "fail" else 200)
        assert "vllm:nixl_num_failed_transfers_total{" in (await get(decode, "/metrics")).body.decode()
        assert await fleet.kv_empty()
        # nobody told prefill
        assert prefill.ledger.released[-1]["why"] == "expired"


# --- answers


async def test_an_error_after_tokens_and_before_them():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        events = await stream(hybrid, CHAT, chat(TEXT + "[[fault:answer_error@2=out of luck]]"))
        assert len([value for value in events.chunks if value["choices"][0]["delta"].get("content")]) == 2
        assert (events.error["message"], events.error["code"]) == ("out of luck", 500)
        assert (events.finish(), events.done, events.ended) == (None, 1, "terminator")
        events = await stream(hybrid, CHAT, chat(TEXT + "[[fault:answer_error]]"))
        assert (events.text(), events.error["type"]) == ("", "InternalServerError")
        answer = await post(hybrid, CHAT, chat(TEXT + "[[fault:answer_error@2]]"))
        assert (answer.status, answer.json["error"]["message"]) == (500, "Internal server error")
        assert hybrid.engine.meters.ended == {"error": 3}
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    ("fault", "ended"), [("stream_end", "terminator"), ("stream_close", "eof"), ("stream_reset", "reset")]
)
async def test_streams_that_break_off(fault, ended):
    async with ordinary() as fleet:
        events = await stream(fleet.hybrid[0], CHAT, chat(TEXT + f"[[fault:{fault}@3]]"))
        assert events.ended == ended
        assert (events.finish(), events.done, events.error) == (None, 0, None)
        if ended != "reset":
            assert len(events.chunks) == 4
        assert await fleet.kv_empty()


async def test_an_end_without_done():
    async with ordinary() as fleet:
        events = await stream(fleet.hybrid[0], CHAT, chat(TEXT + "[[fault:no_done]]"))
        assert (events.finish(), events.done, events.ended) == ("stop", 0, "terminator")


async def test_a_first_event_without_choices():
    async with ordinary() as fleet:
        events = await stream(fleet.hybrid[0], CHAT, chat(TEXT + "[[fault:empty_first]]"))
        assert events.values[0]["choices"] == []
        assert events.finish() == "stop"


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("comments", b": ping\n\nevent: message\nid: 1\nretry: 1000\ndata: {"),
        ("no_space", b"data:{"),
        ("multi_line", b",\ndata: "),
        ("crlf", b"}\r\n\r\n"),
        ("join", b""),
        ("split", b""),
        ("split_chunks", b""),
        ("split_bytes", b""),
        ("huge@3", b"x" * (1 << 20)),
    ],
)
async def test_shapes_that_change_nothing(fault, shows):
    right = await right_text()
    async with ordinary(fault) as fleet:
        events = await stream(fleet.hybrid[0], CHAT, chat(TEXT))
        assert events.text() == right
        assert (events.finish(), events.done, events.ended) == ("stop", 1, "terminator")
        assert shows in events.raw


async def chunk_sizes(request):
    sizes = []
    while size := int(await request.reader.readuntil(b"\r\n"), 16):
        data = await request.reader.readexactly(size + 2)
        sizes.append(data.count(b"\n\n"))
    return sizes


@pytest.mark.parametrize(
    ("fault", "expected"), [("join@2", [1, 1, 2, 1, 1, 1, 1, 1]), ("split_chunks@2", [1, 1, 0, 1, *[1] * 6])]
)
async def test_events_and_chunks(fault, expected):
    async with ordinary(fault) as fleet, opened(fleet.hybrid[0], CHAT, {**chat(TEXT), "stream": True}) as request:
        await request.head()
        assert await chunk_sizes(request) == expected


async def test_gzip_that_nobody_asked_for():
    right = await right_text()
    async with ordinary("gzip") as fleet:
        hybrid = fleet.hybrid[0]
        answer = await post(hybrid, CHAT, chat(TEXT))
        assert answer.headers["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(answer.body))["choices"][0]["message"]["content"] == right
        async with opened(hybrid, CHAT, {**chat(TEXT), "stream": True}) as request:
            _, _, headers = await request.head()
            assert headers["content-encoding"] == "gzip"
            raw, ended = await request.body()
        unpacked = zlib.decompress(raw, wbits=31)
        assert unpacked.endswith(b"data: [DONE]\n\n")
        assert ended == "terminator"


async def test_empty_and_not_json():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        answer = await post(hybrid, CHAT, chat(TEXT + "[[fault:empty]]"))
        assert (answer.status, answer.body) == (200, b"")
        events = await stream(hybrid, CHAT, chat(TEXT + "[[fault:empty]]"))
        assert (events.raw, events.ended) == (b"", "terminator")
        answer = await post(hybrid, CHAT, chat(TEXT + "[[fault:not_json]]"))
        assert answer.headers["content-type"].startswith("application/json")
        with pytest.raises(ValueError, match="Expecting value"):
            _ = answer.json


async def test_stall_slow_and_crash():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        async with opened(hybrid, CHAT, chat(TEXT + "[[fault:stall@2]]")) as request:
            await until(lambda: hybrid.engine.meters.generated_tokens == 2)
            request.leave()
        assert await fleet.kv_empty()
        events = await stream(hybrid, CHAT, chat(TEXT + "[[fault:slow=0.001]]"))
        assert events.finish() == "stop"
        events = await stream(hybrid, CHAT, chat(TEXT + "[[fault:answer_crash@2=0]]"))
        assert (events.ended, events.finish()) == ("reset", None)
        assert await fleet.kv_empty()


async def test_a_stalled_request_goes_on_when_told():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        async with opened(hybrid, CHAT, chat(TEXT + "[[fault:stall@2]]")) as request:
            await until(lambda: hybrid.engine.meters.generated_tokens == 2)
            hybrid.engine.act("go_on", "")
            assert (await request.head())[0] == 200
        assert await fleet.kv_empty()


@pytest.mark.parametrize(
    ("fault", "status"), [("status=502", 502), ("status", 500), ("api_key=secret", 401), ("max_payload=10", 413)]
)
async def test_refusals_have_the_shape_of_vllm(fault, status):
    async with ordinary(fault) as fleet:
        answer = await post(fleet.hybrid[0], CHAT, chat(TEXT))
        assert (answer.status, answer.json["error"]["code"]) == (status, status)
        assert (await post(fleet.hybrid[0], CHAT, chat(TEXT), {"X-Return-Error": "429"})).status == 429


@pytest.mark.parametrize("fault", ["close", "reset", "crash"])
async def test_connections_that_break(fault):
    async with ordinary(f"first=1:{fault}") as fleet:
        with pytest.raises((EOFError, ConnectionResetError)):
            await post(fleet.hybrid[0], CHAT, chat(TEXT))
        if fault != "crash":
            assert (await post(fleet.hybrid[0], CHAT, chat(TEXT))).status == 200


@pytest.mark.parametrize(("fault", "ended"), [("cut_after=100", "eof"), ("reset_after=100", "reset")])
async def test_bodies_that_break(fault, ended):
    async with ordinary(fault) as fleet:
        async with opened(fleet.hybrid[0], CHAT, {**chat(TEXT), "stream": True}) as request:
            await request.head()
            assert (await request.body())[1] == ended
        assert await fleet.kv_empty()


async def test_health_and_work_fail_apart():
    async with ordinary("hang") as fleet:
        assert (await get(fleet.hybrid[0], "/health")).status == 200
    async with ordinary("health_status") as fleet:
        assert (await get(fleet.hybrid[0], "/health")).status == 503
        assert (await post(fleet.hybrid[0], CHAT, chat(TEXT))).status == 200


async def test_what_is_not_on_the_menu():
    async with ordinary() as fleet:
        answer = await post(fleet.hybrid[0], CHAT, chat("[[fault:stroll]]"))
        assert (answer.status, "did you mean 'stall'" in answer.json["error"]["message"]) == (400, True)
        with pytest.raises(ValueError, match="cannot do"):
            fleet.hybrid[0].engine.act("dance", "")
    with pytest.raises(ValueError, match="shape must be one of"):
        await ordinary(settings={"shape": "round"}).__aenter__()


async def test_control_calls():
    async with pair() as fleet:
        prefill, decode = fleet.instances
        params = await prefill_leg(prefill, CHAT, chat(TEXT))
        state = (await get(prefill, "/sim/state")).json
        assert (state["handoffs"]["offered"], state["kv"]["pinned"], state["engine"]) == (1, 1, "vllm")
        assert (await post(prefill, "/sim/act", {"do": "restart"})).json == {"done": "restart"}
        state = (await get(prefill, "/sim/state")).json
        assert (state["handoffs"]["offered"], state["kv"]["pinned"]) == (0, 0)
        await decode_leg(decode, CHAT, chat(TEXT), params)
        assert (await get(decode, "/sim/state")).json["load_failures"] == {"engine id": 1}
        record = (await get(decode, "/sim/requests")).json["requests"][-1]
        assert (record["outcome"], record["note"]) == ("500", "decode: 0 tokens, no KV: engine id")


async def test_reset_fails_what_runs():
    async with ordinary() as fleet:
        hybrid = fleet.hybrid[0]
        async with opened(hybrid, CHAT, chat(TEXT + "[[fault:stall]]")) as request:
            await until(lambda: len(hybrid.engine.serving.live) == 1)
            hybrid.reset()
            assert (await request.head())[0] == 500
        assert await fleet.kv_empty()
