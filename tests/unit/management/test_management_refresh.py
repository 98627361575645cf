"""The controller's refresh: what is read, what is skipped, and what becomes of the cluster. No sockets."""

import json
import logging

import pytest

from coordinator.core.instance import Capacity, Role
from coordinator.management.flex import DECODE_PART_ID
from coordinator.management.refresh_body import BadRefresh, parse_refresh


def body(entries, ids=None):
    return json.dumps({"ids": [e["id"] for e in entries] if ids is None else ids, "instances": entries}).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "truncated"),
        (b"{]", "malformed"),
        (b"[]", "Expected `object`"),
        (b'{"instances":[]}', "missing required field `ids`"),
        (b'{"ids":[]}', "missing required field `instances`"),
        (b'{"ids":["1"],"instances":[]}', "Expected `int`"),
        (b'{"ids":[-1],"instances":[]}', ">= 0"),
        (b'{"ids":[18446744073709551616],"instances":[]}', "64-bit"),
        (b'{"ids":[1],"instances":[{"ip":"1.2.3.4"}]}', "missing required field `id`"),
        (b'{"ids":[1],"instances":[7]}', "Expected `object`"),
        (b'{"ids":[1],"instances":[' + b"[" * 100_000, "nested too deeply"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply"),
        (json.dumps({"ids": list(range(4097)), "instances": []}).encode(), "at most 4096"),
        (json.dumps({"ids": [], "instances": [{"id": 1}] * 4097}).encode(), "at most 4096"),
    ],
)
def test_a_body_that_cannot_be_used(text, words, controller, cluster):
    with pytest.raises(BadRefresh, match=words):
        parse_refresh(text)
    with pytest.raises(BadRefresh):
        controller.take(text)
    assert cluster.describe() == []


BROKEN = [
    ({"ip": "10.0.0.300"}, "no IPv4 or IPv6 address"),
    ({"ip": "host.name"}, "no IPv4 or IPv6 address"),
    ({"port": "80"}, "port '80' is no port"),
    ({"port": "65536"}, "port '65536' is no port"),
    ({"port": ""}, "port '' is no port"),
    ({"port": "1o25"}, "is no port"),
    ({"port": None}, "missing required field `port`"),
    ({"metric_port": "x"}, "metric_port 'x' is no port"),
    ({"inter_comm_port": "1"}, "inter_comm_port '1' is no port"),
    ({"max_seq_len": 0}, "max_seq_len"),
    ({"max_output_len": 0}, "max_output_len"),
    ({"max_output_len": 4097}, "max_output_len is above max_seq_len"),
    ({"total_slots_num": 0}, "total_slots_num"),
    ({"total_slots_num": 5001}, "total_slots_num"),
    ({"total_block_num": 0}, "total_block_num"),
    ({"block_size": 129}, "block_size"),
    ({"role": 81}, "role 81 is none of"),
    ({"role": "P"}, "role"),
    ({"label": 0}, "label 0 does not fit"),
    ({"label": 5}, "label 5 does not fit"),
    ({"virtual_id": None}, "missing required field `virtual_id`"),
    ({"group_id": None}, "missing required field `group_id`"),
    ({"p_percentage": None}, "missing required field `p_percentage`"),
    ({"model_name": "odd"}, "model must not be odd"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(BROKEN)])
def test_a_broken_member_is_skipped_alone(change, words, entry, controller, cluster, caplog):
    controller.take(body([entry(1, 80), entry(2, **{"role": 80, **change})]))
    assert [row["id"] for row in cluster.describe()] == ["1"]
    assert controller.skipped == 1
    [line] = [r.getMessage() for r in caplog.records if r.name == "pd_coordinator.management"]
    assert line.startswith("instance 2 of the controller's list is left out: ")
    assert words in line


def test_a_skipped_member_is_logged_once_per_reason(entry, controller, caplog):
    for port in ("80", "80", "80", "81", "81"):
        controller.take(body([entry(1, 80, port=port)]))
    controller.take(body([entry(1, 80)]))
    controller.take(body([entry(1, 80, port="81")]))
    assert len([r for r in caplog.records if "left out" in r.getMessage()]) == 3
    assert controller.skipped == 6


def test_what_an_entry_becomes(entry, controller, cluster):
    controller.take(
        body(
            [
                entry(1, 80, group_id=3, peers=[2], port="1030"),
                entry(2, 68, group_id=3, peers=[1], ip="fd00::2", inter_comm_port="1040", avail_block_num=24),
                entry(3, 85, label=0, model_name=""),
                entry(4, 68, peers=None, avail_block_num=None),
            ]
        )
    )
    one, two, three, four = cluster.instances("controller").values()
    assert one.key == ("1", Role.PREFILL, one.address)
    assert (one.url, one.engine, one.model, one.group, one.peers) == (
        "http://10.0.0.1:1030",
        "mindie",
        "m",
        "3",
        None,
    )
    assert two.url == "http://[fd00::2]:1025"
    assert two.options == {"inter_comm_port": 1040}
    assert two.peers == frozenset({"1"})
    assert two.capacity == Capacity(200, 1024, 1000, 128)
    assert (three.role, three.engine, three.model) == (Role.HYBRID, "hybrid", None)
    assert four.peers is None
    assert four.capacity.reported_used_blocks == 0


def test_ids_decide_and_descriptions_update(entry, controller, cluster):
    controller.take(body([entry(1, 80), entry(2, 68, peers=[1]), entry(3, 68)]))
    first = cluster.instances("controller")
    controller.take(body([entry(2, 68, peers=[1], avail_block_num=0), entry(9, 80)], ids=[1, 2]))
    later = cluster.instances("controller")
    assert list(later) == ["1", "2"]
    assert later["1"] is first["1"], "known and not described: as it was"
    assert later["2"].capacity.reported_used_blocks == 1024
    controller.take(body([entry(2, 68, port="bad")], ids=[1, 2]))
    assert cluster.instances("controller") == later, "known and badly described: as it was"
    controller.take(body([], ids=[]))
    assert cluster.instances("controller") == {}


def test_the_same_refresh_again_keeps_the_very_objects(entry, controller, cluster, caplog):
    caplog.set_level(logging.INFO)
    text = body([entry(1, 80, peers=[2]), entry(2, 68, peers=[1])])
    controller.take(text)
    first = cluster.instances("controller")
    lines = len(caplog.records)
    for _ in range(20):
        controller.take(text)
    again = cluster.instances("controller")
    assert all(again[ident] is first[ident] for ident in first)
    assert len(caplog.records) == lines


def test_a_role_change_is_another_instance(entry, controller, cluster, loads):
    controller.take(body([entry(1, 80), entry(2, 68)]))
    loads.of["1"] = (1, 10)
    controller.take(body([entry(1, 68), entry(2, 68)]))
    rows = [(row["id"], row["role"], row["state"]) for row in cluster.describe()]
    assert rows == [("1", "decode", "joining"), ("2", "decode", "joining"), ("1", "prefill", "draining")]


def test_a_taken_place_is_reported(entry, controller, cluster, caplog):
    controller.take(body([entry(1, 80), entry(2, 80, ip="10.0.0.1")]))
    assert [row["id"] for row in cluster.describe()] == ["1"]
    assert "instance 2 of the controller's list is left out: the prefill instance at" in caplog.text


def test_a_flex_instance_comes_and_goes_as_two(entry, controller, cluster):
    flex = entry(7, 70, label=4, p_percentage=25, peers=[1, 2])
    others = [entry(1, 80, peers=[7, 2]), entry(2, 68, peers=[1, 7])]
    controller.take(body([*others, flex]))
    now = cluster.instances("controller")
    assert list(now) == ["1", "2", "7", str(DECODE_PART_ID)]
    assert now["2"].peers == frozenset({"1", "7"})
    assert now[str(DECODE_PART_ID)].peers == frozenset({"1", "2", "7"})
    assert now["7"].capacity.max_requests == 50
    assert now[str(DECODE_PART_ID)].capacity.max_requests == 150
    controller.take(body(others, ids=[1, 2, 7]))
    assert list(cluster.instances("controller")) == list(now), "not described: as it was"
    controller.take(body([*others, entry(7, 70, label=4, p_percentage=100)]))
    assert list(cluster.instances("controller")) == ["1", "2", "7"]
    controller.take(body([*others, entry(7, 70, label=4, p_percentage=0)]))
    assert list(cluster.instances("controller")) == ["1", "2", str(DECODE_PART_ID)]
    controller.take(body(others))
    assert list(cluster.instances("controller")) == ["1", "2"]


@pytest.mark.parametrize(
    "flexes",
    [[(7, 50), (8, 50)], [(7, 101)], [(7, -1)]],
    ids=["two", "above", "below"],
)
def test_a_flex_instance_that_cannot_be_split_spoils_the_refresh(entry, controller, cluster, flexes):
    controller.take(body([entry(1, 80)]))
    with pytest.raises(BadRefresh):
        controller.take(body([entry(2, 80), *(entry(i, 70, label=4, p_percentage=p) for i, p in flexes)]))
    assert list(cluster.instances("controller")) == ["1"]
