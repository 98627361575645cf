"""Every route on real ports: what operators, probes and scrapers call."""

import asyncio
import socket

import pytest
from aiohttp import web

P1 = {"id": "p1", "role": "prefill", "url": "http://10.0.0.1:8000"}
D1 = {"id": "d1", "role": "decode", "url": "http://10.0.0.2:8000"}


async def test_instances_come_and_go(serve, settled, loads):
    _, call = await serve()
    assert (await call("GET", "/v1/instances"))[:2] == (200, {"instances": []})
    status, row, _ = await call("POST", "/v1/instances", P1)
    assert status == 201
    assert {"id": "p1", "role": "prefill", "state": "joining", "in_flight": 0, "source": "api"}.items() <= row.items()
    assert row["url"] == "http://10.0.0.1:8000"
    await call("POST", "/v1/instances", D1)
    await settled(2)
    rows = (await call("GET", "/v1/instances"))[1]["instances"]
    assert [(r["id"], r["state"], r["engine"]) for r in rows] == [("p1", "ready", "mindie"), ("d1", "ready", "mindie")]
    status, row, _ = await call("POST", "/v1/instances/d1/drain")
    assert (status, row["state"]) == (200, "draining")
    status, row, _ = await call("POST", "/v1/instances/d1/resume")
    assert (status, row["state"]) == (200, "ready")
    loads.of["d1"] = (1, 0)
    status, row, _ = await call("DELETE", "/v1/instances/d1")
    assert (status, row["state"], row["in_flight"]) == (202, "draining", 1)
    status, row, _ = await call("POST", "/v1/instances", D1)
    assert (status, row["state"]) == (201, "ready"), "used again"
    loads.of["d1"] = (0, 0)
    assert (await call("DELETE", "/v1/instances/d1"))[:2] == (202, {"id": "d1", "state": None})
    assert [r["id"] for r in (await call("GET", "/v1/instances"))[1]["instances"]] == ["p1"]


async def test_ids_with_odd_characters(serve):
    _, call = await serve()
    await call("POST", "/v1/instances", {**P1, "id": "prefill-[::1]:80/a"})
    status, row, _ = await call("POST", "/v1/instances/prefill-%5B::1%5D:80%2Fa/drain")
    assert (status, row["id"]) == (200, "prefill-[::1]:80/a")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/instances", b"", 400, "the body is empty"),
        ("POST", "/v1/instances", b"{]", 400, "no valid JSON"),
        ("POST", "/v1/instances", b'{"a":"\xff"}', 400, "no valid JSON"),
        ("POST", "/v1/instances", b"[" * 100_000, 400, "nested too deeply"),
        ("POST", "/v1/instances", [], 400, "must be a JSON object"),
        ("POST", "/v1/instances", {**P1, "ulr": 1}, 400, "unknown key 'ulr', did you mean 'url'?"),
        ("POST", "/v1/instances", D1, 409, "id 'd1' is there already"),
        ("DELETE", "/v1/instances/nobody", None, 404, "no instance with the id 'nobody'"),
        ("POST", "/v1/instances/nobody/drain", None, 404, "no instance"),
        ("POST", "/v1/instances/nobody/resume", None, 404, "no instance"),
        ("GET", "/nowhere", None, 404, "there is nothing at /nowhere"),
        ("PUT", "/v1/instances", {}, 405, "/v1/instances does not take PUT, only GET, HEAD, POST"),
        ("POST", "/metrics", {}, 405, "does not take POST"),
        ("POST", "/v1/health", {}, 405, "does not take POST"),
        ("GET", "/v1/instances/refresh", None, 405, "does not take GET"),
        ("GET", "/v1/instances/d1/drain", None, 405, "only POST"),
        ("POST", "/v1/instances", b" " * (32 * 1024 * 1024 + 1), 413, "too large"),
    ],
)
async def test_errors_are_json_sentences(serve, method, path, body, status, words):
    _, call = await serve()
    await call("POST", "/v1/instances", D1)
    got, answer, headers = await call(method, path, body)
    assert got == status
    assert list(answer) == ["error"]
    assert words in answer["error"]
    assert ("Allow" in headers) == (status == 405)


async def test_a_fault_of_ours_is_a_500_without_details(serve, caplog):
    def broken(given):
        raise RuntimeError("secret")

    _, call = await serve(make_instance=broken)
    assert (await call("POST", "/v1/instances", P1))[:2] == (500, {"error": "internal error of the coordinator"})
    assert "secret" in caplog.text


async def test_a_body_that_cannot_be_expanded_is_a_400(serve):
    _, call = await serve()
    status, answer, _ = await call("POST", "/v1/instances", b"no gzip", headers={"Content-Encoding": "gzip"})
    assert status == 400
    assert "error" in answer


async def test_pages_of_other_sites_cannot_change_anything(serve):
    management, call = await serve()
    host, port = management.addresses["management"]
    strangers = (
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": f"http://{host}:{port}", "Sec-Fetch-Site": "cross-site"},
    )
    for headers in strangers:
        assert (await call("POST", "/v1/instances", P1, headers=headers))[0] == 403, headers
        assert (await call("DELETE", "/v1/instances/p1", headers=headers))[0] == 403, headers
        assert (await call("GET", "/v1/instances", headers=headers))[1] == {"instances": []}
    own = {"Origin": f"http://{host}:{port}", "Sec-Fetch-Site": "same-origin"}
    assert (await call("POST", "/v1/instances", P1, headers=own))[0] == 201


def at(host, site=None):
    """What a browser sends for a page that it has from there."""
    return {"Host": host, "Origin": f"http://{host}"} | ({} if site is None else {"Sec-Fetch-Site": site})


async def test_a_page_whose_name_resolves_to_our_address_cannot_change_anything(serve):
    """DNS rebinding: for the browser it is the same origin, so the name has to be one of ours."""
    management, call = await serve()
    management.screen.names = frozenset({"ops.example"})
    for host in (
        "evil.test:1026",
        "evil.test",
        "ops.example.evil.test",
        "127.0.0.1.evil.test",
        "localhost.evil.test",
        "[",
    ):
        for headers in (at(host), at(host, "same-origin"), {"Host": host, "Sec-Fetch-Site": "same-origin"}):
            status, answer, _ = await call("POST", "/v1/instances", P1, headers=headers)
            assert status == 403, headers
            assert "server.management_names" in answer["error"]
    assert (await call("GET", "/v1/instances", headers=at("evil.test")))[1] == {"instances": []}
    ours = ("127.0.0.1:1026", "[::1]:1026", "10.0.0.1", "localhost:1026", "LOCALHOST", "Ops.Example:8443")
    for number, host in enumerate(ours):
        given = {"id": f"p{number}", "role": "prefill", "url": f"http://10.0.0.1:{8000 + number}"}
        assert (await call("POST", "/v1/instances", given, headers=at(host, "same-origin")))[0] == 201, host


async def test_what_is_no_browser_may_use_any_name(serve):
    _, call = await serve()
    assert (await call("POST", "/v1/instances", P1, headers={"Host": "coordinator.pd.svc"}))[0] == 201


READY_PATHS = ("/v1/readiness", "/v2/health/ready")


async def test_probes_follow_the_cluster(serve, settled):
    management, call = await serve()

    async def all_say(status, words):
        for path in READY_PATHS:
            got, answer, _ = await call("GET", path)
            assert (got, answer["ready"]) == (status, status == 200)
            assert words in answer["reason"]
        for path in ("/v1/startup", "/v1/health", "/v2/health/live"):
            got, answer, _ = await call("GET", path)
            assert got == 200
            assert answer["status"]

    await all_say(503, "no instance is known")
    await call("POST", "/v1/instances", P1)
    await settled(1)
    await all_say(503, "no decode instance takes requests")
    await call("POST", "/v1/instances", D1)
    await settled(2)
    await all_say(200, "take requests")
    await call("POST", "/v1/instances/d1/drain")
    await all_say(503, "d1 is draining")
    await call("POST", "/v1/instances/d1/resume")
    await all_say(200, "take requests")
    management.draining = True
    assert management.draining
    await all_say(503, "shutting down")


async def test_nothing_is_ready_before_the_data_plane_listens(serve, settled):
    management, call = await serve()
    management.serving = False
    for instance in (P1, D1):
        await call("POST", "/v1/instances", instance)
    await settled(2)
    for path in (*READY_PATHS, "/v2/models/m/ready"):
        status, answer, _ = await call("GET", path)
        assert status == 503
        assert answer["reason"] == "the data plane does not listen yet"
    assert (await call("GET", "/v1/startup"))[:2] == (503, {"status": "starting"})
    assert (await call("GET", "/v1/health"))[0] == 200
    management.serving = True
    assert management.serving
    assert (await call("GET", "/v1/startup"))[0] == 200
    assert (await call("GET", "/v1/readiness"))[0] == 200


async def test_models_are_ready_one_by_one(serve, settled):
    _, call = await serve()
    for i, model in enumerate(("m", "a/b")):
        await call("POST", "/v1/instances", {**P1, "id": f"p{i}", "url": f"http://10.0.1.{i}:8000", "model": model})
    await call("POST", "/v1/instances", {**D1, "model": "m"})
    await settled(3)
    for path, status in (("m", 200), ("m/versions/1", 200), ("a/b", 503), ("a%2Fb", 503), ("x", 503)):
        got, answer, _ = await call("GET", f"/v2/models/{path}/ready")
        assert (got, answer["ready"]) == (status, status == 200), path
    assert "serves the model 'x'" in answer["reason"]


async def test_metrics(serve):
    _, call = await serve()
    status, text, headers = await call("GET", "/metrics")
    assert (status, text) == (200, b"up 1\n")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_metrics_may_have_to_be_awaited(serve):
    async def gather():
        return b"sum 2\n"

    _, call = await serve(metrics=gather)
    assert (await call("GET", "/metrics"))[1] == b"sum 2\n"


async def test_ports_of_their_own(serve):
    management, call = await serve(metrics_port=0, status_port=0)
    assert set(management.addresses) == {"management", "metrics", "status"}
    assert (await call("GET", "/metrics"))[0] == 404
    assert (await call("GET", "/metrics", port="metrics"))[0] == 200
    for port in ("management", "status"):
        assert (await call("GET", "/v1/readiness", port=port))[0] == 503
        assert (await call("GET", "/v1/health", port=port))[0] == 200
    management.draining = True
    assert "shutting down" in (await call("GET", "/v2/health/ready", port="status"))[1]["reason"]
    for port in ("metrics", "status"):
        assert (await call("GET", "/v1/instances", port=port))[0] == 404


async def test_further_routes_can_be_added_and_the_controller_left_out(serve):
    async def page(_request):
        return web.Response(text="hello")

    _, call = await serve(controller=None, extra=[web.get("/", page)])
    assert (await call("GET", "/"))[1] == b"hello"
    assert (await call("GET", "/v1/coordinator_info"))[0] == 404


async def test_a_taken_port_leaves_nothing_open(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="address already in use"):
        await serve(metrics_port=taken.getsockname()[1])


async def test_closing_cuts_idle_connections_at_once(serve):
    management, _ = await serve()
    host, port = management.addresses["management"]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(5):
        assert b"200" in await reader.readline()
        await management.aclose()
        await reader.read()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, port)
