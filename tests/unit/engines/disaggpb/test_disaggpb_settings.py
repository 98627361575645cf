"""Keys: what is refused, what is told, and that the page has them all."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from coordinator.config import parse, to_instances
from coordinator.config.errors import ConfigError, OptionError
from coordinator.engines.disaggpb import DisaggpbEngine
from coordinator.engines.disaggpb.settings import (
    DEFAULTS,
    MISSING,
    OPTIONS,
    channel_settings,
    check_options,
    check_settings,
    kv_limits,
)

PAGE = (Path(__file__).parents[4] / "docs/engines/disaggpb.md").read_text().partition("## Choreography")[0]


def rows(heading):
    """Key to the rest of its row, in the table under a heading."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))


@pytest.fixture
def files(tmp_path):
    made = {}
    for name in ("ca_file", "cert_file", "key_file"):
        path = tmp_path / f"{name}.pem"
        path.write_text("PEM")
        made[name] = str(path)
    return made


def test_the_page_has_every_setting_with_its_default():
    told = {key: row.split(" | ")[0] for key, row in rows("key in `engines: disaggpb:`").items()}
    wanted = {key: f"`{yaml.safe_dump(value).split()[0]}`" for key, value in DEFAULTS.items()}
    wanted = {key: value.replace(".0`", "`") for key, value in wanted.items()}
    assert told == wanted


def test_the_page_has_every_key_of_an_instance():
    table = PAGE.partition("| key of an instance |")[2].partition("\n\n")[0]
    keys = [
        key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    ]
    assert sorted(keys) == sorted(OPTIONS)


def test_defaults_are_filled_in():
    assert check_settings({}) == DEFAULTS
    given = check_settings({"kv_wait_s": 5, "kv_bytes_per_token": 131072})
    assert (given["kv_wait_s"], given["kv_queue"]) == (5, 1000)
    limits = kv_limits(given)
    assert (limits.request_bytes, limits.total_bytes, limits.bytes_per_token) == (1 << 30, 1 << 32, 131072)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("max_kv_bytes", 0, "must be 1024 to"),
        ("max_kv_bytes", 2**31, "must be 1024 to"),
        ("max_kv_bytes", 1e9, "whole number"),
        ("max_kv_bytes", True, "number"),
        ("max_kv_bytes", "1 GiB", "number"),
        ("max_kv_bytes", None, "null"),
        ("max_total_kv_bytes", 4096, "max_kv_bytes"),
        ("max_kv_bytes", 2**31 - 2**20 - 1, None),
        ("kv_bytes_per_token", 0, "must be 1"),
        ("kv_queue", -1, "must be 0"),
        ("kv_wait_s", 0, "must be 0.001"),
        ("kv_wait_s", float("inf"), "number"),
        ("keepalive_idle", 1, "true or false"),
        ("unsupported", "drop", "refuse or ignore"),
        ("max_new_tokens", 0, "must be 1"),
        ("ca_file", 5, "text"),
        ("ca_file", "", "text"),
        ("ca_file", "/nowhere/ca.pem", "no such file"),
        ("server_name", 5, "text"),
        ("max_kv_byte", 5, "unknown key"),
    ],
)
def test_settings(key, value, word):
    if word is None:
        assert check_settings({key: value})[key] == value
        return
    with pytest.raises(OptionError) as caught:
        check_settings({key: value})
    assert word in caught.value.reason.lower()
    assert set(DEFAULTS) == set(caught.value.valid)


def test_a_certificate_needs_its_key(files):
    for one in ("cert_file", "key_file"):
        with pytest.raises(OptionError) as caught:
            check_settings({one: files[one]})
        assert caught.value.key == one


def test_options_of_an_instance():
    assert check_options({"max_message_bytes": 4194304}) == {"max_message_bytes": 4194304}
    for key in ("max_kv_bytes", "role_name"):
        with pytest.raises(OptionError) as caught:
            check_options({key: 1})
        assert caught.value.valid == OPTIONS


def test_without_grpc_the_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check_settings({}) == DEFAULTS, "settings alone need no gRPC"
    with pytest.raises(ValueError, match=re.escape("pip install 'pd-coordinator[rpc]'")) as caught:
        check_options({})
    assert str(caught.value) == MISSING


def test_an_instances_own_keys_go_first(files):
    settings = check_settings({"server_name": "all", "max_message_bytes": 9000, "max_kv_bytes": 5000, **files})
    common = channel_settings(settings, {})
    assert (common.tls.server_name, common.tls.ca_file, common.tls.key_file) == (
        "all", files["ca_file"], files["key_file"],
    )  # fmt: skip
    assert (common.receive_bytes, common.send_bytes) == (9000, 9000)
    own = channel_settings(settings, {"server_name": "d0", "max_message_bytes": 2**30})
    assert own.tls.server_name == "d0"
    assert (own.receive_bytes, own.send_bytes) == (5000 + (1 << 20), 2**30)


def test_problems_are_told_with_their_place():
    text = """
cluster:
  engine: disaggpb
  instances:
    - {role: prefill, url: "http://10.0.0.1:1", max_message_byte: 5}
"""
    with pytest.raises(ConfigError) as caught:
        to_instances(parse(text), lambda engine, given: DisaggpbEngine.options(given))
    assert "did you mean 'max_message_bytes'" in str(caught.value)
