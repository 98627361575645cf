"""What real clients need beyond the plain calls, seen on the wire; by row:

1 retrieve a model             test_a_model_can_be_retrieved
2 h2c upgrade offer            test_an_upgrade_offer_on_a_post_is_ignored
3 content types                test_any_content_type_will_do
4 placeholder model names      test_placeholder_model_names_are_served
5 health                       test_health_on_the_data_port
6 info                         test_info_names_the_model
7 metrics on the data port     test_metrics_on_the_data_port_is_a_cheap_404
8 tokenize                     test_tokenize_is_404
9 unknown stream options       test_unknown_stream_options_pass
10 explicit nulls              test_null_counts_as_absent
11 unknown fields and headers  test_unknown_headers_and_fields_pass
12 POST /                      test_the_root_answers_a_list_or_a_stream
13 TGI errors                  test_tgi_errors_have_an_error_type
14 Triton errors               test_triton_errors_are_a_string
15 Triton metadata             test_triton_metadata
16 binary tensors              test_binary_tensors_are_refused_in_clear_words
17 binary output               test_binary_data_output_is_no_error
18 Triton limits               test_triton_limits_in_three_places
19 stream events               test_every_event_has_text_and_the_last_one_all_of_it
20 reason phrases              test_errors_have_a_reason_phrase
21 Retry-After                 test_retry_after_is_short
22 no repetition               test_a_deadline_must_not_be_repeated
23 cheap 503                   test_503_is_cheap
24 HTTP/1.0                    test_http_1_0_gets_no_chunks
25 Expect and large bodies     test_expect_is_answered_at_once_and_bodies_may_be_large
26 chunked uploads             test_chunked_uploads
"""

import json
import time

import pytest
from dialects import BY_NAME, CHAT, CHAT_STREAM, DIALECTS, MODEL, Dialect, events
from processes import call, call_json
from raw_client import Client, ask

STREAMS = [dialect for dialect in DIALECTS if dialect.stream]
STORY = "Tell me a story about a ship"


def test_a_model_can_be_retrieved(cluster):
    assert call_json(cluster.port, f"/v1/models/{MODEL}")["id"] == MODEL
    status, _, body = call(cluster.port, "/v1/models/nobody")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "model_not_found"


async def test_an_upgrade_offer_on_a_post_is_ignored(cluster):
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with await Client.connect(cluster.port) as client:
        for _ in range(3):  # the offer comes with every request of a connection
            await client.ask(CHAT.path, CHAT.body(STORY), offer)
            assert CHAT.text(await client.rest(), STORY)
            assert (client.status, client.version) == (200, "HTTP/1.1")


@pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("name", ["chat", "tgi", "vllm", "triton-infer", "mindie"])
async def test_any_content_type_will_do(cluster, kind: str | None, name: str):
    dialect = BY_NAME[name]
    reply = await ask(cluster.port, dialect.path, dialect.body(STORY), {"Content-Type": kind} if kind else {})
    assert reply.status == 200, reply.body
    assert dialect.text(reply.body, STORY)


@pytest.mark.parametrize("name", ["dummy", "tgi", "http://127.0.0.1:1025"])
async def test_placeholder_model_names_are_served(cluster, name: str):
    reply = await ask(cluster.port, CHAT.path, CHAT.body(STORY) | {"model": name})
    named = await ask(cluster.port, CHAT.path, CHAT.body(STORY))
    assert CHAT.text(reply.body, STORY) == CHAT.text(named.body, STORY)
    assert (await ask(cluster.port, CHAT.path, CHAT.body(STORY) | {"model": "nobody"})).status == 404


def test_health_on_the_data_port(cluster, lonely):
    assert call(cluster.port, "/health")[0] == 200
    assert call(lonely.port, "/health")[0] == 503


def test_info_names_the_model(cluster):
    assert call_json(cluster.port, "/info")["model_id"] == MODEL


def test_metrics_on_the_data_port_is_a_cheap_404(cluster):
    def lines_up_to(ident: str) -> int:
        """Lines about requests up to the one that is made here: they are written in order, a little later."""
        assert call(cluster.port, CHAT.path, CHAT.body(STORY), headers={"X-Request-Id": ident})[0] == 200
        cluster.coordinator.said(f" request id={ident} ")
        return cluster.coordinator.log().count(" request id=")

    lines = lines_up_to("before-metrics")
    before = cluster.coordinator.metric("pd_coordinator_requests_total")
    assert call(cluster.port, "/metrics")[0] == 404
    status, _, body = call(cluster.port, "/metrics", method="HEAD")
    assert (status, body) == (404, b"")
    assert cluster.coordinator.metric("pd_coordinator_requests_total") == before
    assert lines_up_to("after-metrics") == lines + 1


def test_tokenize_is_404(cluster):
    status, headers, body = call(cluster.port, "/tokenize", {"prompt": "Hello"})
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)


async def test_unknown_stream_options_pass(cluster):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await ask(cluster.port, CHAT.path, CHAT_STREAM.body(STORY) | {"stream_options": options})
    assert reply.status == 200
    assert CHAT_STREAM.text(reply.body, STORY)
    assert events(reply.body)[-2]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("name", ["chat", "chat-stream", "completions", "tgi-root", "tgi-root-stream"])
async def test_null_counts_as_absent(cluster, name: str):
    dialect = BY_NAME[name]
    body = dialect.body(STORY)
    nulls = dict.fromkeys(("seed", "stop", "temperature", "top_p", "tools", "logprobs", "stream_options"))
    if "parameters" in body:
        body["parameters"] |= nulls
    reply = await ask(cluster.port, dialect.path, nulls | body)
    assert reply.status == 200, reply.body
    assert dialect.text(reply.body, STORY)
    if not dialect.stream:
        again = await ask(cluster.port, dialect.path, body | {"stream": None})
        assert dialect.text(again.body, STORY) == dialect.text(reply.body, STORY)


async def test_unknown_headers_and_fields_pass(cluster):
    headers = {
        "X-Session-Affinity": "a", "X-Correlation-ID": "b", "X-Stainless-Lang": "python", "X-Request-ID": "bench-7",
    }  # fmt: skip
    extra = {"ignore_eos": True, "min_tokens": 5, "repetition_penalty": 1.1, "of_tomorrow": {"a": [1]}}
    prompt = "Short [[length:3]] answer"
    reply = await ask(cluster.port, CHAT.path, CHAT.body(prompt, 20) | extra, headers)
    assert json.loads(reply.body)["usage"]["completion_tokens"] == 20  # ignore_eos came through
    assert reply.header("x-request-id") == "bench-7"


async def test_the_root_answers_a_list_or_a_stream(cluster):
    whole, stream = BY_NAME["tgi-root"], BY_NAME["tgi-root-stream"]
    reply = await ask(cluster.port, "/", whole.body(STORY))
    (answer,) = json.loads(reply.body)
    streamed = await ask(cluster.port, "/", stream.body(STORY))
    assert streamed.header("content-type").startswith("text/event-stream")
    assert stream.text(streamed.body, STORY) == answer["generated_text"]


async def test_tgi_errors_have_an_error_type(cluster, lonely):
    for status, kind in ((429, "overloaded"), (400, "validation"), (422, "validation")):
        prompt = f"{STORY} [[fault:status={status}]]"
        for path in ("/", "/generate", "/generate_stream"):
            reply = await ask(cluster.port, path, {"inputs": prompt})
            error = json.loads(reply.body)
            assert (reply.status, error["error_type"]) == (status, kind)
            assert isinstance(error["error"], str)
    reply = await ask(cluster.port, "/generate", {"inputs": f"{STORY} [[fault:decode_error@3]]"})
    assert (reply.status, json.loads(reply.body)["error_type"]) == (502, "generation")
    reply = await ask(lonely.port, "/", {"inputs": STORY})
    assert (reply.status, json.loads(reply.body)["error_type"]) == (503, "overloaded")


async def test_triton_errors_are_a_string(cluster, lonely):
    path = f"/v2/models/{MODEL}/generate"
    cases = [
        (cluster.port, path, {"text": "no input"}, 400),
        (cluster.port, path, {"text_input": f"{STORY} [[fault:status=422]]"}, 422),
        (cluster.port, "/v2/models/nobody/generate", {"text_input": STORY}, 404),
        (cluster.port, "/v2/models/nobody/config", None, 404),
        (cluster.port, "/v2/repository/index", {}, 404),
        (lonely.port, path, {"text_input": STORY}, 503),
    ]
    for port, where, body, status in cases:
        reply = await ask(port, where, body)
        assert reply.status == status, (where, reply.body)
        assert isinstance(json.loads(reply.body)["error"], str)


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_triton_metadata(cluster, version: str):
    assert call_json(cluster.port, "/v2")["name"]
    model = f"/v2/models/{MODEL}{version}"
    assert call_json(cluster.port, model)["inputs"][0]["datatype"] == "UINT32"
    assert call_json(cluster.port, f"{model}/config")["input"][0]["data_type"] == "TYPE_UINT32"
    assert call(cluster.port, f"{model}/ready")[0] == 200
    infer = BY_NAME["triton-infer"]
    reply = await ask(cluster.port, f"{model}/infer", infer.body(STORY) | {"id": "mine"})
    assert json.loads(reply.body)["id"] == "mine"
    assert infer.text(reply.body, STORY)


async def test_binary_tensors_are_refused_in_clear_words(cluster):
    head = json.dumps({"inputs": [{"name": "input0", "shape": [1, 2], "datatype": "UINT32"}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    reply = await ask(cluster.port, f"/v2/models/{MODEL}/infer", head + b"\1\0\0\0\2\0\0\0", headers)
    assert reply.status == 400
    assert "binary tensor data is not supported" in json.loads(reply.body)["error"]


async def test_binary_data_output_is_no_error(cluster):
    infer = BY_NAME["triton-infer"]
    body = infer.body(STORY)
    body["parameters"]["binary_data_output"] = True
    reply = await ask(cluster.port, infer.path, body)
    assert infer.text(reply.body, STORY)


@pytest.mark.parametrize("where", ["max_new_tokens", "max_tokens", "top"])
async def test_triton_limits_in_three_places(cluster, where: str):
    limit = {"max_new_tokens": 7} if where == "top" else {"parameters": {where: 7}}
    body = {"text_input": f"{STORY} [[length:40]]", "stream": False} | limit
    reply = await ask(cluster.port, f"/v2/models/{MODEL}/generate", body)
    assert json.loads(reply.body)["details"]["generated_tokens"] == 7


@pytest.mark.parametrize("dialect", STREAMS, ids=lambda dialect: dialect.name)
async def test_every_event_has_text_and_the_last_one_all_of_it(cluster, dialect: Dialect):
    whole = next(d for d in DIALECTS if not d.stream and d.api == dialect.api and d.path.split("_")[0] in dialect.path)
    reply = await ask(cluster.port, dialect.path, dialect.body(STORY, 30))
    answer = await ask(cluster.port, whole.path, whole.body(STORY, 30))
    assert dialect.text(reply.body, STORY) == whole.text(answer.body, STORY)
    assert reply.complete


async def test_errors_have_a_reason_phrase(cluster, lonely):
    assert (await ask(lonely.port, CHAT.path, CHAT.body(STORY))).reason == "Service Unavailable"
    assert (await ask(cluster.port, "/nowhere")).reason == "Not Found"
    assert (await ask(cluster.port, CHAT.path, b"{")).reason == "Bad Request"


async def test_retry_after_is_short(cluster, lonely):
    reply = await ask(lonely.port, CHAT.path, CHAT.body(STORY))
    assert reply.status == 503
    assert 1 <= int(reply.header("retry-after")) <= 120


async def test_a_deadline_must_not_be_repeated(start):
    cluster = start.cluster(timeouts={"request_s": 0.3})
    reply = await ask(cluster.port, CHAT.path, CHAT.body(f"{STORY} [[fault:stall@1]]"))
    assert reply.status == 504
    assert reply.header("x-should-retry") == "false"
    assert json.loads(reply.body)["error"]["code"] == "deadline_exceeded"
    cluster.wait_idle()


async def test_503_is_cheap(lonely):
    body = CHAT.body("x" * 2000)
    before_s = lonely.metric("process_cpu_seconds_total")
    async with await Client.connect(lonely.port) as client:
        for _ in range(300):  # what a client does that asks again without a pause
            await client.ask(CHAT.path, body)
            await client.rest()
            assert client.status == 503
    assert lonely.metric("process_cpu_seconds_total") - before_s < 0.6


@pytest.mark.parametrize("dialect", [CHAT, CHAT_STREAM, BY_NAME["vllm-stream"]], ids=lambda dialect: dialect.name)
async def test_http_1_0_gets_no_chunks(cluster, dialect: Dialect):
    async with await Client.connect(cluster.port) as client:
        await client.ask(dialect.path, dialect.body(STORY), version="1.0")
        body = await client.rest()
        assert client.header("transfer-encoding") is None
        assert client.header("connection") == "close"
        assert dialect.text(body, STORY)
        assert await client.closed()


async def test_expect_is_answered_at_once_and_bodies_may_be_large(cluster):
    body = json.dumps(CHAT.body(STORY + " water" * 360_000)).encode()
    assert len(body) > 2 << 20
    head = f"POST {CHAT.path} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    waited_s = []
    for _ in range(5):
        async with await Client.connect(cluster.port) as client:
            began_s = time.monotonic()
            await client.send(head.encode())
            assert await client.head(interim=True) == 100
            waited_s.append(time.monotonic() - began_s)
            await client.send(body)
            assert CHAT.text(await client.rest(), "")
        if waited_s[-1] < 0.9:
            break
    assert min(waited_s) < 0.9  # curl waits a second for it; a machine that stands still does so once


async def test_chunked_uploads(cluster):
    body = json.dumps(CHAT.body(STORY)).encode()
    async with await Client.connect(cluster.port) as client:
        await client.send(f"POST {CHAT.path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(body), 10):
            part = body[start : start + 10]
            await client.send(b"%x\r\n%b\r\n" % (len(part), part))
        await client.send(b"0\r\n\r\n")
        assert CHAT.text(await client.rest(), STORY)
