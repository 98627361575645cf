"""Whose word about a client's address counts."""

import pytest

from coordinator.config import ConfigError, parse
from coordinator.security.proxies import TrustedProxies

PROXY, INNER, STRANGER = "10.0.0.1", "10.0.0.2", "203.0.113.9"
CLIENT = "198.51.100.7"


def told(*headers, peer=PROXY, networks=("10.0.0.0/8", "fd00::/8")):
    pairs = [(name, value.encode("latin-1")) for name, value in headers]
    return TrustedProxies(networks).client(peer, pairs)


def xff(value):
    return (b"x-forwarded-for", value)


def fwd(value):
    return (b"forwarded", value)


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([], PROXY),
        ([xff(CLIENT)], CLIENT),
        ([xff(f"{CLIENT}, {INNER}")], CLIENT),  # a second proxy of ours before the first
        ([xff(CLIENT), xff(INNER)], CLIENT),  # two headers are one list
        ([xff(f"{CLIENT}:51234")], CLIENT),
        ([xff("[2001:db8::1]:443")], "2001:db8::1"),
        ([xff("2001:DB8:0::1")], "2001:db8::1"),
        ([xff(f"::ffff:{CLIENT}")], CLIENT),
        ([fwd(f"for={CLIENT}")], CLIENT),
        ([fwd(f'For="{CLIENT}:80";proto=https;by=10.0.0.1')], CLIENT),
        ([fwd('proto=http;for="[2001:db8::1]:4711", for=10.0.0.2')], "2001:db8::1"),
        ([xff(CLIENT), fwd(f"for={CLIENT}")], CLIENT),
    ],
)
def test_what_trusted_proxies_say(headers, client):
    assert told(*headers) == client


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([xff(f"127.0.0.1, {CLIENT}")], CLIENT),  # the client has written the first itself
        ([xff(f"10.0.0.77, {CLIENT}")], CLIENT),  # and named a proxy of ours
        ([xff(f"unknown, {CLIENT}")], CLIENT),
        ([xff(f"{CLIENT}, unknown")], PROXY),
        ([xff(f"{CLIENT}, _hidden, {INNER}")], INNER),
        ([fwd(f'for="a, for=127.0.0.1", for={CLIENT}')], CLIENT),  # a comma in quotes parts nothing
        ([xff(CLIENT), fwd("for=127.0.0.1")], PROXY),  # one of the two is not the proxy's
        ([xff("127.0.0.1"), fwd(f"for={CLIENT}")], PROXY),
        ([xff("")], PROXY),
        ([xff("' OR 1=1 --\t\xff")], PROXY),
        ([xff(", ".join(["10.0.0.3"] * 5000))], "10.0.0.3"),
    ],
)
def test_nobody_can_make_an_address_up(headers, client):
    assert told(*headers) == client


@pytest.mark.parametrize("header", [xff(CLIENT), fwd(f"for={CLIENT}")])
def test_a_stranger_is_not_believed(header):
    assert told(header, peer=STRANGER) == STRANGER
    assert told(header, networks=()) == PROXY


def test_what_is_remembered_is_bounded():
    proxies = TrustedProxies(["10.0.0.0/8"])
    for number in range(10000):
        proxies.client(PROXY, [(b"x-forwarded-for", f"198.51.{number // 250}.{number % 250}".encode())])
    assert len(proxies._known) <= 4096


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/8", "proxy.local", ""])
def test_a_faulty_network_is_refused(network):
    with pytest.raises(ConfigError, match=r"server.trusted_proxies\[0\]: must be a network"):
        parse(f"server: {{trusted_proxies: ['{network}']}}\n")


def test_a_list_with_nothing_in_it_counts_as_left_out():
    assert parse("server:\n  trusted_proxies:\n").server.trusted_proxies == ()
