"""Defaults, and what settings tell about themselves."""

import math

import pytest
import yaml
from pydantic import ValidationError

from coordinator.config import Settings, Timeouts, notes, parse, restart_keys

PUBLIC_DEFAULTS = """
server:
  host: 127.0.0.1
  port: 1025
  management_host: 127.0.0.1
  management_port: 1026
  management_names: []
  metrics_port: null
  status_port: null
  workers: 1
  route_headers: false
  trusted_proxies: []
cluster:
  engine: mindie
  model: null
  model_aliases: []
  tokenizer: null
  instances: []
discovery: {files: [], dns: [], kubernetes: []}
scheduling:
  policy: load_balance
  fallback: hybrid
  load_balance:
    bytes_to_tokens: 0.22
    count_blocks: true
    respect_capacity: true
    block_limit_rate: 1.1
    order: fcfs
    sequence_cost: 0
    output_tokens: 1024
    batch_size: 24
    small_batch: 6
    busiest_cost: 0
    reported_cost: 1
    request_cost: 0
    block_cost: 1
  policy_options: {}
limits:
  max_requests: 10000
  max_queue: 1000
  max_body_bytes: 33554432
  max_header_bytes: 32768
  stream_buffer_bytes: 4194304
timeouts:
  connect_s: 5
  schedule_s: 60
  first_token_s: 600
  inter_token_s: 120
  request_s: 3600
  drain_s: 30
retry:
  max_attempts: 3
  max_recomputes: 16
health:
  interval_s: 5
  timeout_s: 3
  fail_after: 3
  recover_after: 2
  path: null
auth:
  keys: []
  keys_file: null
  management_keys: []
  management_keys_file: null
  open_metrics: true
  engine_key_env: null
  engine_key_file: null
  reread_s: 10.0
tls:
  data:
    cert_file: null
    key_file: null
    client_ca_file: null
  management:
    cert_file: null
    key_file: null
    client_ca_file: null
  engines:
    ca_file: null
    cert_file: null
    key_file: null
    server_name: null
    verify: true
  reread_s: 10.0
logging:
  level: info
  levels: {}
  format: text
metrics:
  engines:
    scrape: false
    interval_s: 15.0
    timeout_s: 5.0
    max_bytes: 1048576
    allow: ["*"]
tracing:
  endpoint: null
  sample_ratio: 1.0
  service_name: pd-coordinator
  headers_env: null
engines: {}
"""


def test_defaults_are_the_public_ones():
    assert Settings().model_dump(mode="json") == yaml.safe_load(PUBLIC_DEFAULTS)


def test_writing_the_defaults_out_changes_nothing():
    assert parse(PUBLIC_DEFAULTS) == Settings()
    assert parse("{}") == Settings()


def test_sections_with_nothing_in_them_count_as_left_out():
    text = "server:\nlimits:\ncluster:\n  instances:\n  model_aliases:\nscheduling:\n  load_balance:\n"
    assert parse(text) == Settings()


def test_settings_do_not_change():
    with pytest.raises(ValidationError):
        Settings().server.port = 3


def test_a_zero_deadline_is_infinite():
    effective = Timeouts(connect_s=0, drain_s=0.5).effective
    assert (effective.connect_s, effective.drain_s, effective.schedule_s) == (math.inf, 0.5, 60)


@pytest.mark.parametrize(
    ("given", "policies"),
    [
        ("round_robin", ("round_robin", "round_robin")),
        ("{prefill: a, decode: b}", ("a", "b")),
        ("my.module:Policy", ("my.module:Policy", "my.module:Policy")),
        ("policies/mine.py:Policy", ("policies/mine.py:Policy", "policies/mine.py:Policy")),
    ],
)
def test_policies(given, policies):
    assert parse(f"scheduling:\n  policy: {given}\n").scheduling.policies == policies


@pytest.mark.parametrize("engine", ["vllm", "my_engine:Engine", "a.b.c:Engine", "/etc/engines/mine.py:Engine"])
def test_engines(engine):
    assert parse(f"cluster: {{engine: '{engine}'}}").cluster.engine == engine


@pytest.mark.parametrize(
    ("given", "host"), [("'::1'", "::1"), ("'[::1]'", "::1"), ("'::'", "::"), ("0.0.0.0", "0.0.0.0"), ("A-b", "a-b")]
)
def test_hosts_to_listen_on(given, host):
    assert parse(f"server:\n  host: {given}\n").server.host == host


def test_free_ports_may_all_be_zero():
    server = parse("server: {port: 0, management_port: 0, metrics_port: 0, status_port: 0}").server
    assert (server.port, server.management_port, server.metrics_port, server.status_port) == (0, 0, 0, 0)


def test_scalars_are_read_as_yaml_has_them():
    cluster = parse("cluster:\n  model: 2026-01-01\n  model_aliases: ['on', !!str 7, \"x\\ty\"]\n").cluster
    assert (cluster.model, cluster.model_aliases) == ("2026-01-01", ("on", "7", "x\ty"))


def test_wanted_files_grow_with_the_live_requests():
    assert parse("limits: {max_requests: 1000}").limits.wanted_files == 3256


def cluster(*entries: str, more: str = "") -> Settings:
    return parse("cluster:\n  instances: [" + ", ".join(f"{{{entry}}}" for entry in entries) + "]\n" + more)


P = "role: prefill, url: 'http://a:1'"
D = "role: decode, url: 'http://10.0.0.2:1'"
H = "role: hybrid, url: 'http://c:1'"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), ["cluster.instances is empty"]),
        (cluster(P), ["no decode instance"]),
        (cluster(D), ["no prefill instance"]),
        (cluster(P, D), []),
        (cluster(H), []),
        (cluster(H, more="scheduling: {fallback: none}"), ["only hybrid instances"]),
        (cluster(H, P), []),
        (cluster(P, D, "role: decode, url: 'http://10.0.0.3:1'", "role: hybrid, url: 'http://10.0.0.3:1'"),
         ["10.0.0.3:1 is listed as decode and as hybrid"]),
        (cluster(P, "role: decode, url: 'http://d-0.example:1'"), ["http://d-0.example:1 has a host name"]),
        (cluster(P, "role: decode, url: 'http://[::1]:1'"), []),
        (cluster(P, "role: decode, url: 'http://d-0.example:1', engine: vllm"), []),
        (cluster(P, "role: decode, url: 'http://d-0.example:1'", more="  engine: vllm"), []),
        (cluster(P, "role: decode, url: 'http://d-0.example:1', engine: mindie", more="  engine: vllm"),
         ["http://d-0.example:1 has a host name"]),
        (cluster(P, D, more="  model_aliases: [m]"), ["model_aliases has no effect"]),
        (cluster(P, D, more="  model_aliases: [m]\n  model: n"), []),
    ],
)  # fmt: skip
def test_notes(settings, words):
    found = notes(settings)
    assert len(found) == len(words)
    assert all(word in note for word, note in zip(words, found, strict=True))


def test_keys_that_need_a_restart():
    old = parse("server: {port: 1, workers: 1, route_headers: false}")
    new = parse("server: {port: 2, workers: 3, route_headers: true}\nlimits: {max_queue: 0}")
    assert restart_keys(old, new) == ("server.port", "server.workers")
    assert restart_keys(old, old) == ()
