"""Settings of the engine and keys of its instances."""

import pytest

from coordinator.config import ConfigError, notes, parse
from coordinator.config.errors import OptionError
from coordinator.engines.xllm import XllmEngine
from coordinator.engines.xllm.settings import KEYS, read_settings, settings_of
from coordinator.parts import load_settings


def test_defaults():
    made = settings_of(read_settings({}))
    assert (made.rpc_host, made.rpc_port, made.advertise, made.etcd_endpoints) == ("127.0.0.1", 8889, None, ())
    assert made.etcd_login is None


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"rpc_prot": 1}, "rpc_prot"),
        ({"rpc_port": "8889"}, "rpc_port"),
        ({"rpc_port": 70000}, "rpc_port"),
        ({"advertise": "10.0.0.1"}, "advertise"),
        ({"rpc_host": "0.0.0.0"}, "advertise"),
        ({"etcd_endpoints": "10.0.0.1:2379"}, "etcd_endpoints"),
        ({"etcd_endpoints": ["ftp://x"]}, "etcd_endpoints"),
        ({"etcd_namespace": 5}, "etcd_namespace"),
        ({"lease_ttl_s": 0}, "lease_ttl_s"),
        ({"order_wait_s": True}, "order_wait_s"),
        ({"order_wait_s": float("nan")}, "order_wait_s"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_told(given, key):
    with pytest.raises(OptionError) as caught:
        XllmEngine.settings(given)
    assert caught.value.key == key
    assert caught.value.valid == KEYS


def test_the_login_comes_from_the_environment_both_or_neither(monkeypatch):
    monkeypatch.setenv("ETCD_USERNAME", "me")
    with pytest.raises(OptionError, match="both be set"):
        read_settings({"etcd_endpoints": ["a:1"]})
    monkeypatch.setenv("ETCD_PASSWORD", "secret")
    made = settings_of(read_settings({"etcd_endpoints": ["a:1"]}))
    assert made.etcd_login == ("me", "secret")
    assert "secret" not in repr(made)
    assert settings_of(read_settings({})).etcd_login is None


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"rpc_adress": "a:1"}, "rpc_adress"),
        ({"rpc_address": "a"}, "rpc_address"),
        ({"rpc_address": 5}, "rpc_address"),
        ({"cluster_ids": [-1]}, "cluster_ids"),
        ({"cluster_ids": [2**64]}, "cluster_ids"),
        ({"cluster_ids": "1"}, "cluster_ids"),
        ({"cluster_ids": [1, 2, 3], "dp_size": 2}, "cluster_ids"),
        ({"addrs": [1]}, "addrs"),
        ({"ports": [70000]}, "ports"),
        ({"dp_size": 0}, "dp_size"),
        ({"mix": 1}, "mix"),
        ({"incarnation_id": 1}, "incarnation_id"),
        ({"ttft_profiling_data": [[1]]}, "ttft_profiling_data"),
        ({"tpot_profiling_data": [[1, 2, -3]]}, "tpot_profiling_data"),
    ],
    ids=str,
)
def test_keys_of_instances_that_cannot_be_used_are_told(given, key):
    with pytest.raises(OptionError) as caught:
        XllmEngine.options(given)
    assert caught.value.key == key


def test_large_cluster_ids_stay_whole():
    assert XllmEngine.options({"cluster_ids": [2**64 - 1]})["cluster_ids"] == (2**64 - 1,)


def test_a_file_whose_instances_register_themselves_needs_none():
    text = "cluster: {engine: xllm}\nengines: {xllm: {etcd_endpoints: ['a:1']}}\n"
    assert notes(parse(text)) == ()
    assert notes(parse("cluster: {engine: xllm}\n"))


FILE = "cluster:\n  engine: xllm\n  instances:\n"
TWO_OF_ONE_ADDRESS = """{role: decode, url: 'http://10.0.0.2:1', cluster_ids: [2], rpc_address: '1.1.1.1:7'}
    - {role: decode, url: 'http://10.0.0.3:1', cluster_ids: [3], rpc_address: '1.1.1.1:7'}"""
PREFILL = "    - {role: prefill, url: 'http://10.0.0.1:1', cluster_ids: [1]}\n"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{role: decode, url: 'http://10.0.0.2:1', cluster_ids: [2]}", "it needs rpc_address"),
        ("{role: prefill, url: 'http://10.0.0.2:1', cluster_ids: [2], mix: true}", "it needs rpc_address"),
        ("{role: decode, url: 'http://10.0.0.2:1', rpc_address: '10.0.0.2:7'}", "it needs cluster_ids"),
        ("{role: prefill, url: 'http://10.0.0.2:1'}", "it needs cluster_ids"),
        (TWO_OF_ONE_ADDRESS, "it has the rpc_address of decode-10.0.0.2:1"),
    ],
)
def test_instances_of_the_file_that_could_not_be_linked_are_told_with_their_line(tmp_path, entry, says):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{FILE}{PREFILL}    - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    last = 5 + entry.count("\n")
    assert str(caught.value).startswith(f"{path}:{last}: cluster.instances[{last - 4}]: {says}")


def test_instances_of_the_file_that_can_be_linked(tmp_path):
    path = tmp_path / "cluster.yaml"
    decode = "    - {role: decode, url: 'http://10.0.0.2:1', cluster_ids: [2], rpc_address: '10.0.0.2:7'}\n"
    alone = "    - {role: hybrid, url: 'http://10.0.0.3:1'}\n"
    path.write_text(FILE + PREFILL + decode + alone)
    assert len(load_settings(path).cluster.instances) == 3
