"""Both protocols on one port (xLLM protocol page §2)."""

import asyncio
import json

import aiohttp
import pytest
from xllm_service import API, GUARD_S, PD, Cluster, cluster_info, pd_address, post, rpc

from instances.options import Options
from instances.run import Fleet, run_instance
from instances.xllm import frames
from instances.xllm.errors import ENOMETHOD, ENOSERVICE, EREQUEST, RpcError
from instances.xllm.proto.engine_pb2 import (
    CompletionRequest,
    InstanceClusterInfo,
    ModelListRequest,
    ModelListResponse,
    Status,
)

PROMPT = "hello there [[length:4]]"


def body_of(message):
    return {
        "model": message.model,
        "prompt": message.prompt,
        "stream": True,
        "service_request_id": message.service_request_id,
        "source_xservice_addr": message.source_xservice_addr,
        "token_ids": list(message.token_ids),
        "routing": {"prefill_name": message.routing.prefill_name, "decode_name": message.routing.decode_name},
    }


@pytest.mark.parametrize("path", [f"/{API}/Completions", "/XllmAPIService/Completions", "/v1/completions"])
async def test_json(path):
    async with Cluster() as cluster:
        ident, message = cluster.message(PROMPT)
        body = {**body_of(message), "unknown": 1, "maxTokens": 1, "stream_options": {"include_usage": True}}
        status, headers, data = await post(cluster.prefill, path, json.dumps(body))
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert data in (b"{}", b"")
        gens = await cluster.service.over(ident)
        # maxTokens is no field: keys are in snake case
        assert gens[-1].usage.num_generated_tokens == 5
        assert cluster.prefill.engine.state()["other_ids"] == 0


async def test_protobuf_over_http():
    async with Cluster() as cluster:
        ident, message = cluster.message(PROMPT)
        path = f"/{API}/Completions"
        given = message.SerializeToString()
        status, headers, data = await post(cluster.prefill, path, given, content_type="application/proto")
        assert (status, headers["Content-Type"], data) == (200, "application/proto", b"")
        assert (await cluster.service.over(ident))[-1].finished


async def test_chat_over_http_with_tools():
    async with Cluster() as cluster:
        ident, message = cluster.message("user: hi\nassistant:")
        body = body_of(message)
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1]}}}]
        body["chat_template_kwargs"] = {"enable_thinking": False}
        body["max_tokens"] = 3
        assert (await post(cluster.prefill, f"/{API}/ChatCompletions", json.dumps(body)))[0] == 200
        assert (await cluster.service.over(ident))[-1].usage.num_generated_tokens == 3


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "code"),
    [
        (f"/{API}/Nothing", b"{}", "application/json", 404, ENOMETHOD),
        (f"/{API}/CompletionsHttp", b"{}", "application/json", 404, ENOMETHOD),
        (f"/{PD}/LinkInstance", b"{}", "application/json", 404, ENOSERVICE),
        (f"/{API}/Completions", b"{", "application/json", 400, EREQUEST),
        (f"/{API}/Completions", b"[]", "application/json", 400, EREQUEST),
        (f"/{API}/Completions", b'{"n":"many"}', "application/json", 400, EREQUEST),
        (f"/{API}/Completions", b"\xff", "application/proto", 400, EREQUEST),
        (f"/{API}/Completions", b"{}", "text/plain", 400, EREQUEST),
        ("/v1/completions", b'{"model":"sim-model","prompt":"x"}', "application/json", 400, EREQUEST),
    ],
)
async def test_errors_over_http(path, body, kind, status, code):
    async with Cluster() as cluster:
        answer = await post(cluster.prefill, path, body, content_type=kind)
        assert (answer[0], answer[1]["x-bd-error-code"]) == (status, str(code))
        assert answer[2]


async def test_the_services_have_ports_of_their_own():
    async with Cluster() as cluster:
        decode = cluster.decode
        info = cluster_info(cluster.prefill)
        body = json.dumps({"instance_name": info.instance_name, "cluster_ids": list(info.cluster_ids), "dp_size": 1})
        port = decode.engine.pd_port
        for path in (f"/{PD}/LinkInstance", "/DisaggPDService/LinkInstance"):
            status, _, data = await post(decode, path, body, port=port)
            assert (status, json.loads(data)) == (200, {"ok": True})
        assert (await post(decode, f"/{API}/Models", b"{}", port=port))[0] == 404
        for address, service, method in (
            (decode.engine.name, PD, "LinkInstance"),
            (pd_address(decode), API, "Models"),
            (decode.engine.name, "XllmAPIService", "Models"),
        ):
            with pytest.raises(RpcError) as error:
                await rpc(address, service, method, InstanceClusterInfo())
            assert error.value.code == ENOSERVICE
        with pytest.raises(RpcError) as error:
            await rpc(decode.engine.name, API, "Nothing", InstanceClusterInfo())
        assert error.value.code == ENOMETHOD


async def test_models_and_health():
    async with Cluster() as cluster:
        listed = await rpc(cluster.prefill.engine.name, API, "Models", ModelListRequest(), ModelListResponse)
        assert [card.id for card in listed.data] == ["sim-model"]
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{cluster.prefill.url}/health") as answer:
                assert answer.status == 200
            async with client.get(f"{cluster.prefill.url}/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "sim-model"
            async with client.get(f"{cluster.prefill.url}/sim/state") as answer:
                assert (await answer.json())["type"] == "PREFILL"


async def _talk(instance, data):
    """Send bytes; gives everything that comes until the peer closes."""
    reader, writer = await asyncio.open_connection(instance.host, instance.port)
    async with asyncio.timeout(GUARD_S):
        writer.write(data)
        read = await reader.read()
    writer.close()
    return read


@pytest.mark.parametrize(
    "data",
    [
        b"PRPCxxxxyyyyzzzz",
        b"PRPC\xff\xff\xff\xff\x00\x00\x00\x01",
        b"PRPC\x00\x00\x00\x01\x00\x00\x00\x02",
        frames.reply(1, b"").encode(),
        frames.request(API, "Models", 1, b"").encode() + b"garbage",
    ],
)
async def test_bad_frames_close_the_connection(data):
    async with run_instance(Options(engine="xllm", role="prefill")) as instance:
        await _talk(instance, data)
        assert instance.engine.connections.bad_frames == 1


async def test_bytes_one_by_one_and_many_calls_at_once():
    async with run_instance(Options(engine="xllm", role="prefill")) as instance:
        reader, writer = await asyncio.open_connection(instance.host, instance.port)
        one = frames.request(API, "Models", 1, b"").encode()
        for byte in one:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        more = [frames.request(API, "Models", number, b"", gzip=number % 2 == 0) for number in range(2, 10)]
        writer.write(b"".join(frame.encode() for frame in more))
        cut, read = frames.Reader(), []
        async with asyncio.timeout(GUARD_S):
            while len(read) < 9:
                read += cut.feed(await reader.read(1000))
        assert {frame.meta.correlation_id for frame in read} == set(range(1, 10))
        assert all(ModelListResponse.FromString(frame.message()).data for frame in read)
        writer.close()


async def test_payloads_that_cannot_be_read():
    async with run_instance(Options(engine="xllm", role="prefill")) as instance:
        reader, writer = await asyncio.open_connection(instance.host, instance.port)
        bad = frames.request(API, "Models", 1, b"x", gzip=True)
        bad = frames.Frame(bad.meta, b"no gzip")
        writer.write(bad.encode() + frames.request(API, "Completions", 2, b"\xff").encode())
        cut, read = frames.Reader(), []
        async with asyncio.timeout(GUARD_S):
            while len(read) < 2:
                read += cut.feed(await reader.read(1000))
        assert [frame.meta.response.error_code for frame in read] == [EREQUEST, EREQUEST]
        writer.close()


async def test_late_answers_are_overtaken():
    async with run_instance(Options(engine="xllm", role="hybrid", faults=("#1:reply_delay=0.2",))) as instance:
        reader, writer = await asyncio.open_connection(instance.host, instance.port)
        given = CompletionRequest(model="sim-model", prompt="x").SerializeToString()
        writer.write(b"".join(frames.request(API, "Completions", number, given).encode() for number in (1, 2)))
        cut, read = frames.Reader(), []
        async with asyncio.timeout(GUARD_S):
            while len(read) < 2:
                read += cut.feed(await reader.read(1000))
        assert [frame.meta.correlation_id for frame in read] == [2, 1]
        writer.close()


async def test_an_ordinary_server():
    async with Fleet([Options(engine="xllm")]) as fleet:
        one = fleet.hybrid[0]
        body = {"model": "sim-model", "prompt": PROMPT, "max_tokens": 20}
        status, _, data = await post(one, "/v1/completions", json.dumps(body))
        assert status == 200
        text = json.loads(data)["choices"][0]["text"]
        chat = {"model": "sim-model", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
        status, _, data = await post(one, "/v1/chat/completions", json.dumps(chat))
        assert (status, data.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert (await post(one, "/v1/completions", json.dumps({**body, "model": "other"})))[0] == 404
        assert text
        assert await fleet.kv_empty()


async def test_default_for_the_service():
    async with (
        Cluster() as cluster,
        Fleet([Options(engine="xllm", settings={"service": cluster.service.address})]) as fleet,
    ):
        one = fleet.hybrid[0]
        for stream in (True, False):
            ident, message = cluster.message(PROMPT, stream=stream)
            message.routing.prefill_name, message.routing.decode_name = one.engine.name, ""
            await rpc(one.engine.name, API, "Completions", message)
            gens = await cluster.service.over(ident)
            assert gens[-1].usage.num_generated_tokens == 5
            assert not any(gen.finished_on_prefill_instance for gen in gens)
            assert cluster.service.text(ident)
            assert len(gens) == (6 if stream else 1)
        assert await fleet.kv_empty()


async def test_calls_are_recorded():
    async with Cluster() as cluster:
        await cluster.run(PROMPT)
        (record,) = cluster.prefill.records.of(f"/{API}/Completions")
        assert (record.method, record.outcome, record.role) == ("PRPC", "0", "prefill")
        assert json.loads(record.body)["prompt"] == PROMPT
        paths = [record.path for record in cluster.decode.records]
        assert paths[-2:] == [f"/{PD}/AddNewRequests", f"/{PD}/FirstGeneration"]
        assert json.loads(cluster.decode.records.of(f"/{PD}/AddNewRequests")[0].body)["reqs"][0]["prompt"] == PROMPT


async def test_unlink_of_nobody():
    async with Cluster() as cluster:
        answer = await rpc(
            pd_address(cluster.decode), PD, "UnlinkInstance", InstanceClusterInfo(instance_name="x"), Status
        )
        assert not answer.ok
