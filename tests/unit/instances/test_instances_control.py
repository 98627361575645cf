"""The door: record, control routes, faults that strike before the engine, and the pages around inference."""

import asyncio
import gzip
import json
import socket

import pytest
from mindie_client import (
    DEADLINE_S,
    MODEL,
    body_of,
    call,
    cluster,
    connect,
    control,
    encode_request,
    get,
    new_id,
    post,
    read_head,
    run,
)

from instances.faults import COMMON_MENU
from instances.options import Options
from instances.run import Fleet, run_fleet, run_instance


def chat(fault=""):
    return body_of("chat", f"hi [[fault:{fault}]]" if fault else "hi")


# --- record and control routes


async def test_the_record_shows_every_request():
    async with run_instance(Options(record_requests=3)) as hybrid:
        await post(hybrid, *chat(), {"X-Mine": "Yes"})
        await post(hybrid, "/v1/nothing", {})
        record = (await get(hybrid, "/sim/requests")).json
        assert record["total"] == 2
        first, second = record["requests"]
        assert (first["method"], first["path"], first["role"], first["outcome"]) == (
            "POST",
            "/v1/chat/completions",
            "hybrid",
            "200",
        )
        assert ["X-Mine", "Yes"] in first["headers"]
        assert json.loads(first["body"])["model"] == MODEL
        assert first["body_bytes"] == len(first["body"])
        assert second["outcome"] == "404"
        assert first["connection"] != second["connection"]
        for _ in range(5):
            await get(hybrid, "/v1/models?x=1")
        shown = (await get(hybrid, "/sim/requests?path=/v1/models&last=2")).json
        assert [entry["path"] for entry in shown["requests"]] == ["/v1/models?x=1"] * 2
        assert shown["total"] == 7
        assert len(hybrid.records) == 3
        assert hybrid.records.of("/v1/models")[0].header("HOST") == "test"


async def test_the_state_shows_kv_requests_and_connections():
    async with cluster(decode={"name": "d0"}) as (_, prefill, decode, link):
        await run(prefill, decode, link, "chat", "hi")
        state = (await get(decode, "/sim/state")).json
        assert (state["name"], state["role"], state["engine"]) == ("d0", "decode", "mindie")
        assert (state["kv"]["allocated"], state["kv"]["pinned"], state["kv"]["released_requests"]) == (0, 0, 1)
        assert state["kv"]["released"][0]["why"] == "end of decode"
        assert state["dresult"] == {"open": True, "opened": 1}
        assert (state["live_requests"], state["decoding"]) == (1, [])
        assert state["connections"] >= 2
        assert (await get(prefill, "/sim/state")).json["kv"]["released"][0]["why"] == "pulled by decode"


async def test_faults_can_be_set_added_and_reset_while_it_runs():
    async with run_instance(Options(faults=("status=503",))) as hybrid:
        assert (await post(hybrid, *chat())).status == 503
        assert (await post(hybrid, "/sim/faults", {"set": []})).json == {"faults": []}
        assert (await post(hybrid, *chat())).status == 200
        assert (await post(hybrid, "/sim/faults", {"add": ["#3:status=418"]})).status == 200
        assert (await post(hybrid, *chat())).status == 418
        shown = (await get(hybrid, "/sim/faults")).json
        assert shown["faults"] == ["#3:status=418"]
        assert {"hang", "preempt"} <= set(shown["menu"])
        assert (await post(hybrid, "/sim/reset")).json == {"reset": True}
        assert (await post(hybrid, *chat())).status == 503
        assert hybrid.ordinal == 1
        assert len(hybrid.records) == 1


@pytest.mark.parametrize("body", [{}, {"set": ["nonsense"]}, {"other": []}, [1], {"set": 5}])
async def test_wrong_control_calls(body):
    async with run_instance(Options(faults=("hang",))) as hybrid:
        assert (await post(hybrid, "/sim/faults", body)).status == 400
        assert hybrid.faults.texts() == ["hang"]


async def test_acts():
    async with cluster() as (_, _prefill, decode, link):
        assert (await post(decode, "/sim/act", {"do": "silence", "value": "0.01"})).status == 200
        assert (await post(decode, "/sim/act", {"do": "dresult_end"})).json == {"done": "dresult_end"}
        assert await link.chunk() == b""
        for body in ({"do": "fly"}, {}, {"do": "crash", "value": "soon"}):
            assert (await post(decode, "/sim/act", body)).status == 400
    async with Fleet([Options(role="decode")]) as fleet:
        answer = await post(fleet.decode[0], "/sim/act", {"do": "dresult_end"})
        assert "no /dresult stream" in answer.json["error"]


async def test_preempting_everything():
    async with cluster() as (fleet, prefill, decode, link):
        headers = control(decode)
        await post(prefill, *body_of("vllm", "hi [[fault:stall@2]]", stream=True), headers)
        assert (await link.event())[1] == "data"
        await post(decode, "/sim/act", {"do": "preempt"})
        assert (await link.event())[1] == "retry"
        assert await fleet.kv_empty()


async def test_a_crash_on_demand_closes_everything_and_loses_the_kv():
    async with cluster() as (fleet, prefill, decode, link):
        await post(prefill, *body_of("vllm", "hi [[fault:stall@2]]", stream=True), control(decode))
        await link.event()
        assert decode.ledger.used_blocks
        decode.crash()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await link.chunk()
        assert await fleet.kv_empty(0)
        await asyncio.sleep(0)
        with pytest.raises(OSError):  # noqa: PT011 - refused
            await connect(decode)


# --- faults at the door


async def test_an_error_for_one_request_by_header():
    async with run_instance(Options()) as hybrid:
        answer = await post(hybrid, *chat(), {"X-Return-Error": "429"})
        assert (answer.status, set(answer.json)) == (429, {"error", "error_type"})
        assert (await post(hybrid, *chat())).status == 200


async def test_an_unknown_fault_in_a_prompt_is_an_error_not_a_silence():
    async with run_instance(Options()) as hybrid:
        answer = await post(hybrid, *chat("hnag"))
        assert answer.status == 400
        assert "did you mean 'hang'" in answer.json["error"]


async def test_status_body_and_key():
    async with run_instance(Options()) as hybrid:
        answer = await post(hybrid, *chat("status=503]][[fault:body={}"))
        assert (answer.status, answer.body) == (503, b"{}")
        assert (await post(hybrid, *chat("status"))).status == 500
        assert (await post(hybrid, *chat("max_payload=10"))).status == 413
        assert (await post(hybrid, *chat("api_key=k1"))).status == 401
        assert (await post(hybrid, *chat("api_key=k1"), {"Authorization": "Bearer k1"})).status == 200


async def raw(hybrid, fault):
    """(everything that arrived, how it ended)."""
    path, body = chat(fault)
    reader, writer = await connect(hybrid)
    data, end = b"", "fin"
    try:
        writer.write(encode_request("POST", path, json.dumps(body).encode()))
        async with asyncio.timeout(0.3):
            while piece := await reader.read(65536):
                data += piece
    except ConnectionResetError:
        end = "reset"
    except TimeoutError:
        end = "open"
    writer.close()
    return data, end


async def test_connections_that_are_cut():
    async with run_instance(Options()) as hybrid:
        assert await raw(hybrid, "close") == (b"", "fin")
        assert await raw(hybrid, "reset") == (b"", "reset")
        assert await raw(hybrid, "hang") == (b"", "open")
        outcomes = [record.outcome for record in hybrid.records]
        assert outcomes == ["close", "reset", "running"]


async def test_bodies_that_are_cut():
    async with run_instance(Options()) as hybrid:
        whole, end = await raw(hybrid, "content_type=text/odd")
        assert end == "open"
        assert b"Content-Type: text/odd" in whole
        data, end = await raw(hybrid, "cut_after=10")
        assert (len(data.partition(b"\r\n\r\n")[2]), end) == (10, "fin")
        _, end = await raw(hybrid, "reset_after=10")
        assert end == "reset"
        data, end = await raw(hybrid, "split_bytes")
        assert end == "open"
        assert json.loads(data.partition(b"\r\n\r\n")[2])["object"] == "chat.completion"


async def test_odd_bodies():
    async with run_instance(Options()) as hybrid:
        packed = await post(hybrid, *chat("gzip"))
        assert packed.headers["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(packed.body))["object"] == "chat.completion"
        empty = await post(hybrid, *chat("empty"))
        assert (empty.status, empty.body) == (200, b"")


async def test_streams_with_body_faults():
    async with run_instance(Options()) as hybrid:
        path, body = body_of("chat", "hi [[fault:split_bytes]]", stream=True)
        assert b"[DONE]" in (await post(hybrid, path, body)).body
        path, body = body_of("chat", "hi [[fault:cut_after=300]]", stream=True)
        with pytest.raises(asyncio.IncompleteReadError):
            await post(hybrid, path, body)
        assert await hybrid.ledger.wait_empty(1)


async def test_delay():
    async with run_instance(Options()) as hybrid:
        began = asyncio.get_running_loop().time()
        await post(hybrid, *chat("delay=0.05"))
        assert asyncio.get_running_loop().time() - began > 0.045


async def test_crash_on_request_and_return():
    async with run_instance(Options()) as hybrid:
        assert (await raw(hybrid, "crash=0.02"))[1] == "reset"
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    answer = await post(hybrid, *chat())
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.005)
        assert answer.status == 200


async def reachable(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def becomes(wanted, *ports):
    """Wait until connections to all these ports are taken, or all refused."""
    async with asyncio.timeout(DEADLINE_S):
        while [await reachable(port) for port in ports] != [wanted] * len(ports):  # noqa: ASYNC110  # of another side
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("gap_s", [0.0, 0.005, 0.02, 0.0201])
async def test_crashes_on_top_of_each_other_end_in_one_return(gap_s):
    """A fault may strike several requests at once, and while the instance is down or just coming back."""
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with run_instance(Options()) as hybrid:
        further = await hybrid.listen_too(0)
        for _ in range(10):
            for back_after_s in (0.02, 0.02, 0.0):
                hybrid.crash(back_after_s)
                await asyncio.sleep(gap_s)
            await becomes(True, hybrid.port, further)
    assert told == []


async def test_the_last_crash_counts():
    async with run_instance(Options()) as hybrid:
        further = await hybrid.listen_too(0)
        hybrid.crash(0.01)
        hybrid.crash()
        await asyncio.sleep(0.05)
        assert not await reachable(hybrid.port)
        assert not await reachable(further)
        hybrid.crash(0.0)
        await becomes(True, hybrid.port, further)


async def test_ports_of_an_instance_that_comes_back_go_to_nobody_else():
    async with run_instance(Options()) as hybrid:
        hybrid.crash(60)
        await becomes(False, hybrid.port)
        await asyncio.sleep(0.05)
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", hybrid.port))
        assert not await reachable(hybrid.port)


async def test_health():
    async with run_instance(Options(startup_s=60)) as hybrid:
        assert [(await get(hybrid, path)).status for path in ("/health", "/v2/health/ready")] == [503, 503]
    async with run_instance(Options(faults=("health_status=500",))) as hybrid:
        assert (await get(hybrid, "/v2/health/live")).status == 500
        assert (await post(hybrid, *chat())).status == 200
        hybrid.faults.replace(["health_fail_after=0"])
        assert (await get(hybrid, "/health")).status == 503
        hybrid.faults.replace(["health_fail_after=60000", "hang"])
        assert (await get(hybrid, "/health")).status == 200
        hybrid.faults.replace(["health_hang"])
        reader, writer = await connect(hybrid)
        writer.write(encode_request("GET", "/health"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await read_head(reader)
        writer.close()


async def test_an_instance_that_listens_late():
    async with run_instance(Options(listen_after_s=0.05)) as hybrid:
        with pytest.raises(ConnectionRefusedError):
            await connect(hybrid)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    assert (await get(hybrid, "/health")).status == 200
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.005)


def test_every_common_fault_is_tested():
    from pathlib import Path

    text = Path(__file__).read_text()
    assert [name for name in COMMON_MENU if f'"{name}' not in text and f"fault:{name}" not in text] == []


# --- fleets


async def test_a_fleet_groups_its_instances_and_stops_them():
    fleet = run_fleet([Options(role="prefill"), Options(role="decode"), Options(role="decode"), Options()])
    async with fleet:
        assert [len(group) for group in (fleet.prefill, fleet.decode, fleet.hybrid)] == [1, 2, 1]
        assert len({instance.port for instance in fleet.instances}) == 4
    with pytest.raises(ConnectionRefusedError):
        await connect(fleet.decode[0])


async def test_a_port_in_use_stops_the_fleet_that_had_begun():
    async with run_instance(Options()) as hybrid:
        fleet = Fleet([Options(), Options(port=hybrid.port)])
        with pytest.raises(OSError, match="in use"):
            await fleet.__aenter__()
        with pytest.raises(ConnectionRefusedError):
            await connect(fleet.instances[0])


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="role"):
        Options(role="worker")
    with pytest.raises(ValueError, match="no simulated engine"):
        run_instance(Options(engine="none"))
    with pytest.raises(ValueError, match="no setting 'heartbeet_s'"):
        run_instance(Options(settings={"heartbeet_s": 1}))


# --- pages


async def test_pages():
    async with run_instance(Options(role="prefill")) as prefill:
        for path in ("/health", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready", "/health/timed-3"):
            assert (await get(prefill, path)).status == 200
        assert (await get(prefill, "/v1/models")).json["data"][0]["id"] == MODEL
        assert (await get(prefill, f"/v1/models/{MODEL}")).json["object"] == "model"
        assert (await get(prefill, "/v1/models/other")).status == 404
        assert (await get(prefill, "/info")).json["model_id"] == MODEL
        assert {"name", "version", "extensions"} <= set((await get(prefill, "/v2")).json)
        model = (await get(prefill, f"/v2/models/{MODEL}")).json
        assert model["inputs"][0]["datatype"] == "UINT32"
        assert (await get(prefill, "/v2/models/other")).status == 404
        assert (await get(prefill, f"/v2/models/{MODEL}/config")).json == (await get(prefill, "/v1/config")).json
        assert (await call(prefill, "PUT", "/v1/models")).status == 405


async def test_tokenizer():
    async with run_instance(Options(role="decode")) as decode:
        ids = (await post(decode, "/v1/tokenizer", {"inputs": "the light"})).json
        assert ids["token_number"] == len(ids["tokens"]) == 2
        words = (await post(decode, "/v1/tokenizer", {"inputs": "the light", "do_decode": True})).json
        assert words["tokens"] == ["the", " light"]
        for body in ({"inputs": 5}, [1], b"{"):
            assert (await post(decode, "/v1/tokenizer", body)).status == 422


METRICS = """
    request_received_total request_success_total request_failed_total failed_request_perc
    num_requests_running num_requests_waiting num_requests_swapped num_preemptions_total prompt_tokens_total
    generation_tokens_total avg_prompt_throughput_toks_per_s avg_generation_throughput_toks_per_s
    npu_cache_usage_perc cpu_cache_usage_perc npu_prefix_cache_hit_rate all_radix_match_num
    npu_radix_match_hit_num time_to_first_token_seconds time_per_output_token_seconds
    e2e_request_latency_seconds request_prompt_tokens request_generation_tokens
"""


async def test_metrics_have_the_engines_names():
    names = METRICS.split()
    async with cluster() as (_, prefill, decode, link):
        await run(prefill, decode, link, "chat", "hi", limit=5)
        pages = [(await get(instance, "/metrics")).body.decode() for instance in (prefill, decode)]
    for page in pages:
        assert [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")] == names
        assert all('model_name="sim-model"' in line for line in page.splitlines() if not line.startswith("#"))
    assert 'request_received_total{model_name="sim-model"} 1' in pages[0]
    assert 'generation_tokens_total{model_name="sim-model"} 4' in pages[1]
    assert 'time_per_output_token_seconds_bucket{le="+Inf",model_name="sim-model"} 4' in pages[1]
    assert 'request_success_total{model_name="sim-model"} 1' in pages[1]


async def test_management_pages_and_roles():
    async with run_instance(Options(role="decode", settings={"start_role": "none"})) as instance:
        status = (await get(instance, "/v1/status")).json
        assert status["service"] == {"roleStatus": "RoleUnknown", "currentRole": "none"}
        assert set(status) == {"service", "resource", "linkStatus"}
        assert "dpInstMap" in (await get(instance, "/v2/status")).json["resource"]
        refused = await post(instance, *chat(), {"req-id": new_id(), "req-type": "prefill", "d-target": "10.0.0.1"})
        assert refused.status == 503
        body = {"local": {"id": 1}, "peers": [{"id": 2, "host_ip": "10.0.0.2", "server_ip": "10.0.0.2"}]}
        assert (await post(instance, "/v1/role/decode", body)).json == {"result": "ok"}
        status = (await get(instance, "/v1/status")).json
        assert status["service"] == {"roleStatus": "RoleReady", "currentRole": "decode"}
        assert status["linkStatus"]["peers"] == [{"target": "10.0.0.2", "link": "ok"}]
        assert (await post(instance, "/v2/role/flex", body)).status == 404
        assert (await post(instance, "/v1/role/prefill", b"{")).status == 422
