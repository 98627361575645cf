"""Certificates and keys for ports and engines: what is read, what is refused, what is exchanged."""

import logging
import ssl

import pytest
from certificates import Authority

from coordinator.config import ConfigError, EngineTls, ServerTls, Settings, instance_from_mapping, parse
from coordinator.config.errors import dotted
from coordinator.core.instance import Address
from coordinator.security.certificates import Certificates
from coordinator.security.checks import problems
from coordinator.security.files import FileWatch
from coordinator.security.outbound import OutboundReader
from coordinator.security.tls import TlsError, engine_context, server_context
from coordinator.transport.peers import Peer, Peers


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def issued(authority):
    return authority.issue("one")


def settings(text):
    return parse(text, "cluster.yaml")


def test_engines_are_checked_unless_somebody_says_otherwise(authority):
    context = engine_context(EngineTls(ca_file=str(authority.file)))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    careless = engine_context(EngineTls(verify=False))
    assert (careless.verify_mode, careless.check_hostname) == (ssl.CERT_NONE, False)


def test_each_file_that_is_no_good_is_named_by_its_key(authority, issued, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    other = authority.issue("other")
    cases = {
        "cert_file": ServerTls(cert_file=str(empty), key_file=str(issued.key)),
        "key_file": ServerTls(cert_file=str(issued.cert), key_file=str(other.key)),
        "client_ca_file": ServerTls(**issued.keys, client_ca_file=str(empty)),
    }
    for key, given in cases.items():
        with pytest.raises(TlsError) as caught:
            server_context(given)
        assert caught.value.key == key
    with pytest.raises(TlsError) as caught:
        engine_context(EngineTls(ca_file=str(tmp_path / "gone")))
    assert (caught.value.key, caught.value.reason) == ("ca_file", "cannot be read: no such file or directory")


def test_instances_have_what_is_theirs_and_the_rest_in_common(authority, issued, tmp_path, monkeypatch):
    monkeypatch.setenv("COMMON", "common-key")
    (tmp_path / "own").write_text("  own-key\n")
    read = settings(f"""
tls: {{engines: {{ca_file: {authority.file}, server_name: engines.example}}}}
auth: {{engine_key_env: COMMON}}
cluster:
  instances:
    - {{role: prefill, url: "https://10.0.0.1:1"}}
    - {{role: decode, url: "https://10.0.0.2:1", server_name: d.example, engine_key_file: {tmp_path}/own}}
    - {{role: decode, url: "https://10.0.0.3:1", cert_file: {issued.cert}, key_file: {issued.key}}}
""")
    reader = OutboundReader(read)
    default, of = reader.read()
    assert reader.problems == []
    assert (default.server_name, default.key) == ("engines.example", b"common-key")
    assert default.context is not None
    peers = Peers()
    peers.take(default, of)
    first, second, third = (peers.of(Address(f"10.0.0.{n}", 1, tls=True)) for n in (1, 2, 3))
    assert first == default
    assert (second.server_name, second.key, second.context) == ("d.example", b"own-key", default.context)
    assert (third.server_name, third.key) == ("engines.example", b"common-key")
    assert third.context not in (None, default.context)
    assert peers.of(Address("10.0.0.9", 1, tls=True)) == default  # added while it runs


def test_without_anything_nothing_is_built():
    default, of = OutboundReader(Settings()).read()
    assert default == Peer()
    assert of == {}


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("auth: {engine_key_env: NOT_THERE}", "auth.engine_key_env", "no variable NOT_THERE"),
        ("auth: {engine_key_env: EMPTY}", "auth.engine_key_env", "nothing in it"),
        ("auth: {engine_key_env: LINES}", "auth.engine_key_env", "characters that cannot stand in a header"),
        ("tls: {engines: {ca_file: {EMPTY_FILE}}}", "tls.engines.ca_file", "holds no certificate"),
        ("{ONE}, cert_file: {CERT}}]}", "cluster.instances[0].cert_file", "needs key_file"),
        ("{ONE}, ca_file: {EMPTY_FILE}}]}", "cluster.instances[0].ca_file", "holds no certificate"),
        ("{PLAIN}, ca_file: {CERT}}]}", "cluster.instances[0].url", "must begin with https://, since ca_file is set"),
        ("{ONE}, engine_key_env: A, engine_key_file: {CERT}}]}", "cluster.instances[0].engine_key_env", "exclude"),
        ("{ONE}}, {role: decode, url: 'https://a:1', server_name: b}]}", "cluster.instances[1]", "another key"),
    ],
)
def test_what_is_wrong_has_its_key_path_and_shows_no_secret(text, path, words, issued, tmp_path, monkeypatch):
    monkeypatch.setenv("EMPTY", " ")
    monkeypatch.setenv("LINES", "secret\r\nx: y")
    (tmp_path / "empty").write_text("")
    texts = {
        "{ONE}": "cluster: {instances: [{role: prefill, url: 'https://a:1'",
        "{PLAIN}": "cluster: {instances: [{role: prefill, url: 'http://a:1'",
        "{EMPTY_FILE}": str(tmp_path / "empty"),
        "{CERT}": str(issued.cert),
    }
    for name, value in texts.items():
        text = text.replace(name, value)
    found = [(dotted(at), why) for at, why in problems(settings(text))]
    assert any(at == path and words in why for at, why in found), found
    assert "secret" not in str(found)


@pytest.mark.parametrize("key", ["ca_file", "cert_file", "key_file", "engine_key_env", "engine_key_file"])
def test_whoever_manages_names_no_files(key, issued):
    given = {"role": "decode", "url": "https://attacker.example", key: str(issued.key)}
    with pytest.raises(ValueError, match=f"{key}: can be set in the configuration file alone"):
        instance_from_mapping(given, Settings(), lambda _, options: options)


def test_something_else_than_an_engine_gets_no_engines_key(authority):
    peers, etcd = Peers(), Address("etcd", 2379, tls=True)
    peers.no_engine(etcd)
    context = engine_context(EngineTls(ca_file=str(authority.file)))
    peers.take(Peer(context, None, b"engine-key"), {})
    assert peers.of(etcd) == Peer(context)
    late = Address("late", 1)
    peers.no_engine(late)
    assert peers.of(late) == Peer(context)


def test_what_is_exchanged_when_files_change_and_when_they_are_broken(authority, issued, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "key").write_text("first")
    text = f"""
tls: {{data: {{cert_file: {issued.cert}, key_file: {issued.key}}}, engines: {{ca_file: {authority.file}}}}}
auth: {{engine_key_file: {tmp_path}/key}}
"""
    peers = Peers()
    certificates = Certificates(settings(text), peers, "data")
    watch = FileWatch("watch", certificates.files, certificates.reread, lambda: 1.0)
    watch.look()
    address = Address("e", 1, tls=True)
    before = peers.of(address)
    (tmp_path / "key").write_text("second")
    watch.look()
    after = peers.of(address)
    assert (before.key, after.key) == (b"first", b"second")
    assert after.context is not before.context
    port = certificates.context("data")
    (tmp_path / "key").write_text("a b")
    caplog.clear()
    watch.look()
    watch.look()
    assert peers.of(address) == after
    assert caplog.text.count("not read again, those before stay in use") == 1  # once for each change
    assert "a b" not in caplog.text
    assert certificates.context("data") is port


def test_a_reload_with_a_broken_part_changes_no_part(authority, issued, tmp_path):
    (tmp_path / "key").write_text("first")
    base = f"tls: {{data: {{cert_file: {issued.cert}, key_file: {issued.key}}}}}\n"
    peers = Peers()
    certificates = Certificates(settings(base), peers, "data")
    (tmp_path / "bad.pem").write_text("")
    bad = f"""
tls: {{data: {{cert_file: {tmp_path}/bad.pem, key_file: {issued.key}}}}}
auth: {{engine_key_file: {tmp_path}/key}}
"""
    with pytest.raises(ConfigError, match=r"tls\.data\.cert_file"):
        certificates.apply(settings(bad))
    assert peers.of(Address("e", 1)) == Peer()


def test_whether_a_port_has_tls_is_decided_at_the_start(issued, caplog):
    certificates = Certificates(Settings(), Peers(), "data")
    assert certificates.context("data") is None
    certificates.apply(settings(f"tls: {{data: {{cert_file: {issued.cert}, key_file: {issued.key}}}}}\n"))
    assert certificates.context("data") is None
    assert "decided at the start" in caplog.text
    given = settings(f"tls: {{data: {{cert_file: {issued.cert}, key_file: {issued.key}}}}}\n")
    opened = Certificates(given, Peers(), "data")
    context = opened.context("data")
    opened.apply(Settings())
    assert opened.context("data") is context  # never plain text
