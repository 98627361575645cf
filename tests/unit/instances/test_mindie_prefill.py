"""What a prefill instance refuses, and in which order (MindIE protocol page §4.4)."""

import asyncio

import pytest
from mindie_client import MODEL, body_of, cluster, control, get, post, until

from instances.mindie.control_headers import check
from instances.mindie.refusal import Refused
from instances.options import Options
from instances.run import Fleet
from instances.timing import Timing

GOOD = {"req-id": "12ab", "req-type": "prefill", "d-target": "10.0.0.21"}
HEX = "Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got "
TARGET = "Parameter d-target must be an IPv4 address"
MISSING = "DMI request must have req-type, req-id, d-target headers"
ROLE = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"


@pytest.mark.parametrize(
    ("role", "changed", "status", "text"),
    [
        (
            "none",
            {"req-id": None},
            503,
            "The server cannot process the inference request due to an unknown status. ",
        ),
        ("decode", {"req-id": None}, 400, ROLE),
        ("prefill", {"req-id": None}, 400, MISSING),
        ("prefill", {"req-type": None}, 400, MISSING),
        ("prefill", {"d-target": None, "req-id": "x"}, 400, MISSING),
        ("prefill", {"req-id": "12-3", "req-type": "decode"}, 400, HEX + "12-3"),
        ("prefill", {"req-id": ""}, 400, HEX),
        ("prefill", {"req-id": "a" * 1025}, 400, "The length of req-id cannot exceed 1024"),
        (
            "prefill",
            {"req-type": "decode", "d-target": "x"},
            400,
            "Parameter req-type must be prefill but got decode",
        ),
        ("prefill", {"d-target": "host.name", "is-recompute": "x"}, 400, TARGET),
        ("prefill", {"d-target": "0.0.0.0"}, 400, TARGET),
        ("prefill", {"d-target": "10.0.0.1:1025"}, 400, TARGET),
        ("prefill", {"d-target": "10.0.0.1;port"}, 400, TARGET),
        (
            "prefill",
            {"is-recompute": "yes"},
            400,
            "Parameter is-recompute is an optional parameter. When it is set, it must be true or false.",
        ),
    ],
)
def test_refused_headers(role, changed, status, text):
    headers = {key: value for key, value in {**GOOD, **changed}.items() if value is not None}
    with pytest.raises(Refused) as refused:
        check(role, headers)
    assert (refused.value.status, refused.value.text) == (status, text)


def test_accepted_headers():
    plain = check("prefill", {**GOOD, "d-port": "1025"})
    assert (plain.target_host, plain.target_port, plain.recompute) == ("10.0.0.21", 1025, False)
    inter = check("flex", {**GOOD, "d-target": "fe80::1;5000", "d-port": "1025", "is-recompute": "true"})
    assert (inter.target_host, inter.target_port, inter.recompute) == ("fe80::1", 5000, True)
    assert check("prefill", {**GOOD, "req-id": "f" * 1024}).req_id == "f" * 1024


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETIONS = {"model": MODEL, "prompt": "hi"}
BODIES = [
    ("/v1/chat/completions", b"{", 422, "valid JSON"),
    ("/v1/chat/completions", [1], 422, "JSON object"),
    ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "other"),
    ("/v1/chat/completions", {"messages": CHAT["messages"]}, 422, "model"),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 422, "messages"),
    ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}, 422, "messages"),
    ("/v1/chat/completions", {**CHAT, "stream": "yes"}, 422, "stream must be a boolean"),
    ("/v1/chat/completions", {**CHAT, "stream_options": {}}, 422, "stream_options"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 422, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "temperature": 3}, 422, "temperature"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}, 422, "logprobs is not supported in dmi mode"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 422, "top_logprobs is not supported in dmi mode"),
    ("/v1/chat/completions", {**CHAT, "use_beam_search": True}, 422, "use_beam_search is not supported in dmi mode"),
    ("/v1/chat/completions", {**CHAT, "n": 2}, 422, "n must be 1 in dmi mode"),
    ("/v1/completions", {**COMPLETIONS, "best_of": 2}, 422, "best_of must be 1 in dmi mode"),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}, 422, "prompt"),
    ("/generate", {"text": "hi"}, 422, "inputs or prompt"),
    ("/generate", {"prompt": "hi", "stop": ["x"]}, 422, "stop is not supported in dmi mode"),
    ("/generate", {"prompt": 5}, 422, "prompt"),
    ("/generate_stream", {"inputs": "hi", "parameters": {"stop": ["x"]}}, 422, "stop is not supported in dmi mode"),
    ("/", {"inputs": "hi", "parameters": 3}, 422, "parameters must be an object"),
    ("/infer", {"inputs": "hi", "input_id": [1]}, 422, "exactly one"),
    ("/infer", {}, 422, "exactly one"),
    ("/infer_token", {"inputs": "hi"}, 422, "input_id"),
    ("/infer_token", {"input_id": [-1]}, 422, "input_id"),
    ("/v2/models/other/generate", {"text_input": "hi"}, 404, "other"),
    (f"/v2/models/{MODEL}/generate", {"text_input": 5}, 422, "text_input"),
    (f"/v2/models/{MODEL}/infer", {"inputs": []}, 422, "inputs"),
    (f"/v2/models/{MODEL}/infer", {"inputs": [{"datatype": "BYTES", "data": ["x"]}]}, 422, "UINT32"),
]
TYPES = {404: "NotFoundError", 422: "Input Validation Error"}


async def test_refused_bodies():
    async with cluster() as (_, prefill, decode, _link):
        for path, body, status, text in BODIES:
            answer = await post(prefill, path, body, control(decode))
            assert answer.status == status, (path, body, answer.body)
            assert text in answer.json["error"]
            assert answer.json["error_type"] == TYPES[status]
        assert prefill.ledger.used_blocks == decode.ledger.used_blocks == 0


async def test_versioned_triton_paths_and_unknown_ones_are_not_found():
    async with cluster() as (_, prefill, decode, _link):
        for path in (f"/v2/models/{MODEL}/versions/1/generate", "/v1/embeddings"):
            answer = await post(prefill, path, {"text_input": "hi"}, control(decode))
            assert (answer.status, answer.json["error_type"]) == (404, "NotFoundError")


async def test_explicit_nulls_unknown_fields_and_queries_pass():
    async with cluster() as (_, prefill, decode, _link):
        body = {**CHAT, "stop": None, "logprobs": None, "n": None, "seed": None, "tools": None, "ignore_eos": False}
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        answer = await post(prefill, "/v1/chat/completions?x=1", {**body, "strange": 1}, control(decode))
        assert answer.status == 200


async def test_a_body_above_the_limit():
    async with cluster(prefill={"max_body_bytes": 2 << 20}) as (_, prefill, decode, _link):
        answer = await post(prefill, "/generate", b"x" * (3 << 20), control(decode))
        assert answer.status == 413
        assert answer.json == {"message": "Request body too large. Maximum allowed size is 2MB."}


async def test_a_request_without_control_headers_or_to_the_wrong_role():
    async with cluster() as (_, prefill, decode, _link):
        path, body = body_of("chat", "hi")
        plain = await post(prefill, path, body)
        assert (plain.status, plain.json) == (400, {"error": MISSING, "error_type": "Bad Request"})
        wrong = await post(decode, path, body, control(decode))
        assert (wrong.status, wrong.json) == (400, {"error": ROLE, "error_type": "Bad Request"})


async def test_an_instance_that_starts_has_an_unknown_role():
    async with cluster(prefill={"startup_s": 60}) as (_, prefill, decode, _link):
        answer = await post(prefill, *body_of("chat", "hi"), control(decode))
        assert (answer.status, answer.json["error_type"]) == (503, "Service Unavailable")
    async with Fleet([Options(startup_s=60), Options(role="decode", startup_s=60)]) as fleet:
        assert (await post(fleet.hybrid[0], *body_of("chat", "hi"))).status == 503
        refused = await get(fleet.decode[0], "/dresult")
        assert (refused.status, refused.json["error"][-5:]) == (400, " none")


async def test_the_envelope_says_close_and_keeps_the_connection_open():
    async with cluster() as (_, prefill, decode, _link):
        answer = await post(prefill, *body_of("chat", "hi"), control(decode))
        assert answer.headers["connection"] == "close"
        assert answer.connection_open
        assert answer.body == b'{"reqId":"%b","isStream":false}' % answer.json["reqId"].encode()


async def test_a_live_id_is_refused_until_its_kv_is_gone():
    async with cluster(prefill={"timing": Timing(prefill_ms=60_000)}) as (_, prefill, decode, _link):
        headers = control(decode)
        first = asyncio.create_task(post(prefill, *body_of("chat", "hi"), headers))
        await until(lambda: prefill.engine.prefill.live)
        second = await post(prefill, *body_of("chat", "hi"), headers)
        assert second.status == 424
        assert second.json["error"] == "Failed to enqueue inferRequest. Runtime request has been used before."
        assert second.json["error_type"] == "Generation Error"
        stopped = await post(prefill, f"/v2/models/{MODEL}/stopInfer", {"id": headers["req-id"]})
        assert stopped.status == 200
        assert (await first).status == 424
        assert prefill.ledger.used_blocks == 0


async def test_decode_that_cannot_be_reached_fails_the_request_and_frees_the_kv():
    async with cluster() as (_, prefill, decode, _link):
        answer = await post(prefill, *body_of("chat", "hi"), {**control(decode), "d-port": "1"})
        assert (answer.status, answer.json["error_type"]) == (500, "Incomplete Generation")
        assert answer.json["error"].startswith("[P Node] Send D request failed:")
        assert prefill.ledger.used_blocks == 0


async def test_decode_without_free_blocks_refuses_the_handover():
    async with cluster(decode={"blocks": 1, "block_tokens": 1}) as (_, prefill, decode, _link):
        answer = await post(prefill, *body_of("chat", "a few words"), control(decode))
        assert answer.status == 500
        assert "KV blocks wanted, 1 free" in answer.json["error"]
        assert prefill.ledger.used_blocks == decode.ledger.used_blocks == 0


async def test_decode_is_found_by_its_inter_comm_port():
    settings = {"settings": {"inter_comm_port": 0}}
    async with cluster(decode=settings) as (fleet, prefill, decode, link):
        port = decode.engine.inter_comm_port
        headers = {**control(decode), "d-target": f"{decode.host};{port}", "d-port": "1"}
        answer = await post(prefill, *body_of("chat", "hi"), headers)
        assert answer.status == 200
        assert (await link.events(headers["req-id"]))[-1][0] == "lastData"
        assert await fleet.kv_empty()
