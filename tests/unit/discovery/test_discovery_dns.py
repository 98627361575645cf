"""DNS records, against a real DNS server on the loopback interface."""

import asyncio
import socket

import pytest
from dns_server import Dns

from coordinator.config import ConfigError, DnsSource, parse
from coordinator.discovery.dns_records import DnsRecords, Unanswered

NAME = "prefill.serving.test."


@pytest.fixture
def dns():
    with Dns() as server:
        yield server


@pytest.fixture
def source(dns, make):
    def build(**keys):
        given = {"name": NAME, "role": "prefill", "port": 8000, "nameservers": (dns.address,), "timeout_s": 20}
        given |= {"min_interval_s": 0.02, "max_interval_s": 0.05} | keys
        return DnsRecords(DnsSource(**given), make)

    return build


async def test_addresses_are_instances(dns, source, running):
    dns.set(NAME, "A", "10.0.0.2", "10.0.0.1")
    notebook = running(source(model="other", group="g", max_requests=7, options={"block_size": 16}))
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.ids == ["prefill-10.0.0.1:8000", "prefill-10.0.0.2:8000"]
    one = notebook.instances[0]
    assert (one.role, one.engine, one.model, one.group) == ("prefill", "vllm", "other", "g")
    assert (one.capacity.max_requests, one.options) == (7, {"block_size": 16})


async def test_records_come_and_go(dns, source, running):
    dns.set(NAME, "A", "10.0.0.1")
    notebook = running(source())
    await notebook.until(lambda n: n.urls == ["http://10.0.0.1:8000"])
    dns.set(NAME, "A", "10.0.0.1", "10.0.0.3")
    await notebook.until(lambda n: len(n.urls) == 2)
    dns.set(NAME, "A", "10.0.0.3")
    await notebook.until(lambda n: n.urls == ["http://10.0.0.3:8000"])


@pytest.mark.parametrize("empty", ["no such name", "no data"])
async def test_an_answer_that_says_there_is_nothing_counts(dns, source, running, empty):
    dns.set(NAME, "A", "10.0.0.1")
    notebook = running(source())
    await notebook.until(lambda n: n.urls)
    if empty == "no such name":
        dns.forget(NAME)
    else:
        dns.set(NAME, "A")
    await notebook.until(lambda n: n.urls == [])
    assert notebook.trouble == ""


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("servfail", "SERVFAIL"),
        ("refused", "REFUSED"),
        ("referral", "refers to others"),
        ("silent", "no answer within 0.2 s"),
    ],
)
async def test_what_is_no_answer_changes_nothing(dns, source, running, mode, told):
    dns.set(NAME, "A", "10.0.0.1")
    notebook = running(source(timeout_s=0.2 if mode == "silent" else 20))
    await notebook.until(lambda n: n.urls)
    dns.set(NAME, "A", "10.0.0.9")
    dns.mode = mode
    await notebook.until(lambda n: told in n.trouble)
    seen = notebook.told
    await notebook.until(lambda n: n.told >= seen + 2)  # it is tried again and again
    assert notebook.urls == ["http://10.0.0.1:8000"]
    dns.mode = "ok"
    await notebook.until(lambda n: n.urls == ["http://10.0.0.9:8000"] and not n.trouble)


async def test_no_server_at_all_is_told(source, dns, running):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        unused.connect(("127.0.0.1", 9))  # others are refused, and nobody else gets the port
        port = unused.getsockname()[1]
        notebook = running(source(nameservers=(f"127.0.0.1:{port}",), timeout_s=0.3))
        await notebook.until(lambda n: n.trouble != "not looked yet")
    assert notebook.instances is None
    assert notebook.trouble


async def test_another_server_is_asked_where_one_is_silent(dns, source):
    with Dns() as dead:
        dead.mode = "refused"
        dns.set(NAME, "A", "10.0.0.1")
        answer = await source(nameservers=(dead.address, dns.address)).ask()
    assert [one.address for one in answer.endpoints] == ["10.0.0.1"]
    assert dead.queries


async def test_services_have_ports_and_the_addresses_of_their_targets(dns, source):
    name = "_http._tcp.decode.serving.test."
    dns.set(name, "SRV", (0, 10, 8001, "d-0.serving.test."), (5, 0, 8002, "d-1.serving.test."), (0, 0, 9, "."))
    dns.set("d-0.serving.test.", "A", "10.0.0.1")
    dns.set("d-1.serving.test.", "AAAA", "fd00::1")
    records = source(name=name, type="SRV", port=None, role="decode")
    answer = await records.ask()
    assert [tuple(one) for one in answer.endpoints] == [
        ("10.0.0.1", 8001, "d-0.serving.test"),
        ("fd00::1", 8002, "d-1.serving.test"),
    ]
    instances, faults = records._made(answer)
    assert [one.url for one in instances] == ["http://10.0.0.1:8001", "http://[fd00::1]:8002"]
    assert faults == {}


async def test_addresses_that_came_along_are_not_asked_for(dns, source):
    dns.set(NAME, "SRV", (0, 0, 8001, "d-0.elsewhere.test."))
    dns.additional["d-0.elsewhere.test."] = ["10.0.0.5"]
    answer = await source(type="SRV", port=None).ask()
    assert [one.address for one in answer.endpoints] == ["10.0.0.5"]
    assert {kind for _, kind, _ in dns.queries} == {"SRV"}


async def test_a_target_without_an_address_is_told(dns, source, running):
    dns.set(NAME, "SRV", (0, 0, 8001, "d-0.serving.test."), (0, 0, 8001, "d-1.serving.test."))
    dns.set("d-0.serving.test.", "A", "10.0.0.1")
    notebook = running(source(type="SRV", port=None))
    await notebook.until(lambda n: n.instances is not None)
    assert (notebook.urls, notebook.faults) == (["http://10.0.0.1:8001"], {"d-1.serving.test": "it has no address"})


async def test_a_target_that_cannot_be_asked_for_leaves_everything_as_it_was(dns, source, monkeypatch):
    dns.set(NAME, "SRV", (0, 0, 8001, "d-0.serving.test."))
    answer = dns._answer

    def fail_for_addresses(reply, name, kind):
        if kind != "SRV":
            reply.header.rcode = 2
        else:
            answer(reply, name, kind)

    monkeypatch.setattr(dns, "_answer", fail_for_addresses)
    with pytest.raises(Unanswered, match="SERVFAIL"):
        await source(type="SRV", port=None).ask()


async def test_https_services_are_known_by_their_target(dns, source, monkeypatch):
    dns.set(NAME, "SRV", (0, 0, 8001, "d-0.serving.test."))
    dns.set("d-0.serving.test.", "A", "10.0.0.1")
    records = source(type="SRV", port=None, scheme="https")
    (one,), _ = records._made(await records.ask())
    assert (one.url, one.options["server_name"]) == ("https://10.0.0.1:8001", "d-0.serving.test")


async def test_ipv6_addresses(dns, source):
    dns.set(NAME, "AAAA", "fd00::2", "fd00::1")
    records = source(type="AAAA")
    instances, _ = records._made(await records.ask())
    assert [one.url for one in instances] == ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]


async def test_an_alias_is_followed_and_its_ttl_counts(dns, source):
    dns.set(NAME, "CNAME", "real.serving.test.")
    dns.set("real.serving.test.", "A", "10.0.0.1")
    dns.ttl_s = 17
    answer = await source().ask()
    assert ([one.address for one in answer.endpoints], answer.ttl_s) == (["10.0.0.1"], 17)


async def test_the_ttl_of_an_empty_answer_is_that_of_its_authority(dns, source):
    dns.negative_ttl_s = 9
    assert (await source().ask()).ttl_s == 9
    dns.set(NAME, "A")
    assert (await source().ask()).ttl_s == 9


async def test_long_answers_come_over_tcp(dns, source):
    dns.set(NAME, "A", *(f"10.0.{number // 250}.{number % 250 + 1}" for number in range(500)))
    answer = await source().ask()
    assert len(answer.endpoints) == 500
    protocols = [protocol for _, _, protocol in dns.queries]
    assert list(dict.fromkeys(protocols)) == ["udp", "tcp"]  # after 2 s without an answer it is asked again


@pytest.mark.parametrize(("ttl_s", "bounds", "waits_s"), [(30, (1, 60), 30), (0, (2, 60), 2), (3600, (1, 60), 60)])
async def test_the_next_look_is_due_by_the_ttl_within_bounds(dns, source, monkeypatch, ttl_s, bounds, waits_s):
    dns.set(NAME, "A", "10.0.0.1")
    dns.ttl_s = ttl_s
    slept = []

    async def sleep(delay_s):
        slept.append(delay_s)
        raise asyncio.CancelledError

    records = source(min_interval_s=bounds[0], max_interval_s=bounds[1])
    answer = await records.ask()
    monkeypatch.setattr(records, "ask", lambda: asyncio.sleep(0, answer))
    real_sleep = asyncio.sleep
    monkeypatch.setattr(
        "asyncio.sleep", lambda delay_s, result=None: sleep(delay_s) if delay_s else real_sleep(0, result)
    )
    with pytest.raises(asyncio.CancelledError):
        await records.run(type("Report", (), {"found": lambda *_: None, "lost": lambda *_: None})())
    assert slept == [waits_s]


async def test_an_instance_that_cannot_be_made_is_told(dns, source, running):
    dns.set(NAME, "A", "10.0.0.1")
    notebook = running(source(options={"bad": 1}))
    await notebook.until(lambda n: n.faults)
    assert (notebook.instances, list(notebook.faults)) == ([], ["10.0.0.1:8000"])
    assert "this engine has no such key" in notebook.faults["10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{name: a.test, role: prefill}", "port is missing"),
        ("{name: a.test, role: prefill, type: SRV, port: 1}", "SRV records have ports: leave port out"),
        ("{name: a.test, port: 1}", "role: missing"),
        ("{name: a.test, role: prefill, port: 1, nameservers: [ns.test]}", "must be an IP address"),
        ("{name: a.test, role: prefill, port: 1, nameservers: ['10.0.0.1:0']}", "must be an IP address"),
        ("{name: a.test, role: prefill, port: 1, min_interval_s: 9, max_interval_s: 3}", "min_interval_s is above"),
        ("{name: a b, role: prefill, port: 1}", "is not a host name"),
        ("{name: a.test, role: prefill, prot: 1}", "did you mean 'port'?"),
    ],
)
def test_faulty_settings(text, told):
    with pytest.raises(ConfigError) as caught:
        parse(f"discovery:\n  dns:\n    - {text}\n")
    assert told in str(caught.value)
    assert "cluster.yaml:3: discovery.dns[0]" in str(caught.value)


@pytest.mark.parametrize("server", ["10.0.0.1", "10.0.0.1:5353", "::1", "[::1]:53", "[fd00::1]"])
def test_name_servers(server):
    text = f"discovery:\n  dns:\n    - {{name: a.test, role: prefill, port: 1, nameservers: ['{server}']}}\n"
    assert parse(text).discovery.dns[0].nameservers == (server,)
