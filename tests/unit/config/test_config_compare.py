"""Two configurations side by side, and one as it may be shown."""

import json

import pytest

from coordinator import config
from coordinator.config import MASK, Settings

HASH = "sha256:" + "0" * 64
OTHER = "sha256:" + "1" * 64


def parsed(**sections):
    return config.parse(json.dumps({"cluster": {"engine": "hybrid"}} | sections), "f")


def test_nothing_differs_from_itself():
    given = parsed(limits={"max_requests": 5})
    assert config.changes(given, given) == ()
    assert config.as_running(given, given) == (given, ())


def test_each_key_that_differs_is_named_with_both_values():
    old = parsed(limits={"max_requests": 5}, engines={"vllm": {"a": 1, "b": 2}})
    new = parsed(limits={"max_requests": 6}, engines={"vllm": {"b": 2, "c": {"d": 3}}}, timeouts={"drain_s": 1})
    assert [tuple(change) for change in config.changes(old, new)] == [
        ("limits.max_requests", 5, 6),
        ("timeouts.drain_s", 30.0, 1.0),
        ("engines.vllm.c", None, {"d": 3}),
        ("engines.vllm.a", 1, None),
    ]


def test_instances_are_not_compared():
    old, new = parsed(), parsed(cluster={"engine": "hybrid", "instances": [{"role": "hybrid", "url": "http://a:1"}]})
    assert config.changes(old, new) == ()


def test_a_policy_by_role_in_place_of_a_name():
    old, new = parsed(), parsed(scheduling={"policy": {"prefill": "round_robin", "decode": "load_balance"}})
    (change,) = config.changes(old, new)
    assert change == ("scheduling.policy", "load_balance", {"prefill": "round_robin", "decode": "load_balance"})


def test_secrets_differ_without_being_shown():
    old = parsed(auth={"keys": [{"name": "a", "hash": HASH}]})
    new = parsed(auth={"keys": [{"name": "a", "hash": OTHER}]}, engines={"vllm": {"api_key": "hunter2"}})
    shown = repr(config.changes(old, new))
    assert "auth.keys" in shown
    assert "engines.vllm.api_key" in shown
    assert not any(secret in shown for secret in (HASH, OTHER, "hunter2"))


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "api_key",
        "key",
        "token",
        "client_secret",
        "Authorization",
        "headers",
        "header",
        "credential",
        "hash",
    ],
)
def test_secrets_are_masked_wherever_they_stand(name):
    given = parsed(
        engines={"vllm": {"deep": [{name: {"x-a": "hunter2", "n": 7, "list": ["hunter2"]}}], name: "hunter2"}}
    )
    shown = config.shown_settings(given)
    assert "hunter2" not in json.dumps(shown)
    assert shown["engines"]["vllm"] == {"deep": [{name: {"x-a": MASK, "n": MASK, "list": [MASK]}}], name: MASK}


def test_names_of_files_and_variables_and_numbers_are_shown():
    own = {"key_file": "/k", "engine_key_env": "K", "bytes_to_tokens": 0.5, "tokens": 3, "keys": "abc"}
    shown = config.shown_settings(parsed(engines={"vllm": own}))
    assert shown["engines"]["vllm"] == own


def test_a_login_in_an_address_is_masked():
    shown = config.shown_settings(parsed(engines={"vllm": {"etcd": ["http://joe:hunter2@a:1/x", "http://b:2"]}}))
    assert shown["engines"]["vllm"]["etcd"] == [f"http://{MASK}@a:1/x", "http://b:2"]


def test_every_default_is_filled_in_and_is_json():
    shown = json.loads(json.dumps(config.shown_settings(Settings())))
    assert shown["limits"]["max_requests"] == 10000
    assert shown["auth"]["engine_key_env"] is None
    assert shown["timeouts"]["request_s"] == 3600


def test_addresses_ports_and_processes_stay_as_they_run():
    old = parsed(server={"port": 1, "management_port": 2})
    new = parsed(server={"port": 3, "management_port": 4, "workers": 5, "route_headers": True}, limits={"max_queue": 9})
    running, waiting = config.as_running(old, new)
    assert waiting == ("server.port", "server.management_port", "server.workers")
    assert (running.server.port, running.server.management_port, running.server.workers) == (1, 2, 1)
    assert running.server.route_headers
    assert running.limits.max_queue == 9


def test_whether_a_port_has_tls_stays_as_it_runs(tmp_path):
    for name in ("c.pem", "k.pem"):
        (tmp_path / name).write_text("x")
    files = {"cert_file": str(tmp_path / "c.pem"), "key_file": str(tmp_path / "k.pem")}
    plain, tls = parsed(), parsed(tls={"data": files, "reread_s": 7})
    running, waiting = config.as_running(plain, tls)
    assert waiting == ("tls.data",)
    assert running.tls.data.cert_file is None
    assert running.tls.reread_s == 7
    assert config.as_running(tls, tls) == (tls, ())
