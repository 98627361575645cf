"""The controller's other calls, over HTTP."""

import pytest

from coordinator.management import Traffic


@pytest.fixture
async def call(serve, entry, settled):
    """A client; two instances and a flex one have been pushed."""
    _, client = await serve()
    rows = [
        entry(1, 80, peers=[2, 7]),
        entry(2, 68, peers=[1, 7]),
        entry(7, 70, label=4, p_percentage=50, peers=[1, 2]),
    ]
    status, answer, _ = await client("POST", "/v1/instances/refresh", {"ids": [1, 2, 7], "instances": rows})
    assert (status, answer) == (200, b"")
    await settled(4)
    return client


async def test_before_the_first_list(serve, entry):
    _, client = await serve()
    for method, path, body in (
        ("GET", "/v1/coordinator_info", None),
        ("POST", "/v1/instances/offline", {"ids": [1]}),
        ("POST", "/v1/instances/online", {"ids": [1]}),
        ("POST", "/backup_info", {"is_master": True, "is_abnormal": False}),
    ):
        assert (await client(method, path, body))[0] == 503, path
        assert (await client("POST", "/v1/instances/refresh", {"ids": [], "instances": []}))[0] == 200
        assert (await client(method, path, body))[0] == 503, "an empty list is none"
    assert (await client("GET", "/v1/instances/tasks?id=1"))[1] == {"tasks": [-1]}
    assert (await client("GET", "/recvs_info"))[0] == 200
    assert (await client("POST", "/v1/instances/refresh", {"ids": [1], "instances": [entry(1, 80)]}))[0] == 200
    assert (await client("GET", "/v1/coordinator_info"))[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"ids":[1]}', b'{"ids":1,"instances":[]}'])
async def test_bad_refresh(call, body):
    status, answer, _ = await call("POST", "/v1/instances/refresh", body)
    assert status == 400
    assert "cannot be used" in answer["error"]
    assert len((await call("GET", "/v1/instances"))[1]["instances"]) == 4


async def test_offline_and_online(call, cluster):
    def states():
        return [row["state"] for row in cluster.describe()]

    assert (await call("POST", "/v1/instances/offline", {"ids": [2, 99]}))[:2] == (200, b"")
    assert states() == ["ready", "draining", "ready", "ready"]
    assert (await call("POST", "/v1/instances/offline", {"ids": [7]}))[0] == 200
    assert states() == ["ready", "draining", "draining", "draining"], "both parts of the flex instance"
    assert (await call("POST", "/v1/instances/online", {"ids": [2, 7]}))[0] == 200
    assert states() == ["ready"] * 4


@pytest.mark.parametrize("path", ["/v1/instances/offline", "/v1/instances/online"])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"ids":["1"]}', b"[" * 100_000, {"ids": list(range(4097))}])
async def test_bad_ids(call, path, body):
    assert (await call("POST", path, body))[0] == 400


async def test_tasks(call, loads):
    loads.of |= {"1": (4, 0), "7": (2, 0), "18446744073709551614": (3, 0)}
    query = "id=1&x=5&id=99&id=7&id=-1&id=abc&id=&id=%D9%A1&id=2&id=1" + "&id=" + "9" * 5000
    status, answer, _ = await call("GET", f"/v1/instances/tasks?{query}")
    assert status == 200
    assert answer == {"tasks": [4, -1, 5, -1, -1, -1, -1, 0, 4, -1]}
    assert (await call("GET", "/v1/instances/tasks"))[1] == {"tasks": []}
    assert (await call("GET", "/v1/instances/tasks?" + "&".join(["id=1"] * 100)))[1] == {"tasks": [4] * 100}
    assert (await call("GET", "/v1/instances/tasks?" + "&".join(["id=1"] * 101)))[0] == 400


async def test_query_tasks(call, loads):
    async def is_end(p_id, d_id):
        query = {"p_id": p_id, "d_id": d_id, "role_change_type": 0}
        return (await call("POST", "/v1/instances/query_tasks", query))[1]["is_end"]

    loads.pairs |= {("1", "2"): 1, ("1", "18446744073709551614"): 1}
    assert not await is_end(1, 2)
    assert not await is_end(1, 7), "the decode part of the flex instance"
    assert await is_end(7, 2)
    assert await is_end(98, 99)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {"p_id": 1},
        {"p_id": 1, "d_id": 2},
        {"p_id": 1, "d_id": "2", "role_change_type": 0},
        {"p_id": 1, "d_id": 2, "role_change_type": 2},
    ],
)
async def test_bad_query(call, body):
    assert (await call("POST", "/v1/instances/query_tasks", body))[0] == 400


async def test_coordinator_info(call, loads, traffic):
    loads.of |= {"1": (3, 17), "7": (1, 2), "18446744073709551614": (2, 5)}
    traffic.note(804, 10)
    traffic.note(1206, 20)
    status, answer, _ = await call("GET", "/v1/coordinator_info")
    assert status == 200
    assert answer == {
        "schedule_info": [
            {"id": 1, "allocated_slots": 3, "allocated_blocks": 17},
            {"id": 2, "allocated_slots": 0, "allocated_blocks": 0},
            {"id": 7, "allocated_slots": 3, "allocated_blocks": 7},
        ],
        "request_num": 6,
        "request_length_info": {"input_len": 250, "output_len": 15},
    }
    await call("POST", "/v1/instances/refresh", {"ids": [], "instances": []})
    _, answer, _ = await call("GET", "/v1/coordinator_info")
    assert answer["schedule_info"] == []
    assert "request_num" not in answer
    assert answer["request_length_info"] == {"input_len": 250, "output_len": 15}, "no data: the last ones again"


async def test_recvs_info_counts_since_the_last_call(call, traffic):
    traffic.note(1, 1)
    traffic.note(1, 1)
    assert (await call("GET", "/recvs_info"))[1] == {"is_master": True, "recv_flow": 2}
    assert (await call("GET", "/recvs_info"))[1] == {"is_master": True, "recv_flow": 0}


async def test_backup_info(call):
    good = {"is_master": True, "is_abnormal": False, "is_random_pick": True}
    assert (await call("POST", "/backup_info", good))[:2] == (200, {"update_successfully": True})
    assert (await call("POST", "/backup_info", {"is_master": 1}))[:2] == (400, {"update_successfully": False})


def test_traffic_keeps_the_two_readings_apart():
    traffic = Traffic(bytes_per_token=2.0)
    assert traffic.lengths() == (0, 0)
    traffic.note(100, 5)
    assert traffic.arrivals() == 1
    assert traffic.lengths() == (50, 5)
    traffic.note(20, 0)
    assert traffic.lengths() == (10, 5), "a window without output repeats the last value"
    assert traffic.arrivals() == 1
