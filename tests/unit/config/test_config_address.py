"""URLs of instances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config.address import host_of, parse_url
from coordinator.config.errors import Refusal
from coordinator.core.instance import Address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:9001", Address("10.0.0.1", 9001)),
        ("http://10.0.0.1:9001/", Address("10.0.0.1", 9001)),
        ("HTTPS://Engine-1.Example:1", Address("engine-1.example", 1, tls=True)),
        ("http://host", Address("host", 80)),
        ("https://host", Address("host", 443, tls=True)),
        ("http://[::1]:9001", Address("::1", 9001)),
        ("http://[::1]", Address("::1", 80)),
        ("http://[2001:DB8:0:0::1]:65535", Address("2001:db8::1", 65535)),
        ("http://d_0.svc:09001", Address("d_0.svc", 9001)),
    ],
)
def test_good_urls(url, address):
    assert parse_url(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must begin with http://"),
        ("host:9001", "must begin with http://"),
        ("ftp://host", "not 'ftp://'"),
        ("http:/host", "must begin with http://"),
        ("http://", "no host"),
        ("http://host:", "the port '' is not a number"),
        ("http://host:-1", "the port '-1' is not a number"),
        ("http://host:+1", "the port '+1' is not a number"),
        ("http://host:\u0661", "is not a number"),
        ("http://host:" + "9" * 5000, "is not in 1..65535"),
        ("http://host:1:2", "stands in brackets"),
        ("http://[::1", "not closed"),
        ("http://[::1]9001", "not closed"),
        ("http://[10.0.0.1]:1", "not an IPv6 address"),
        ("http://[fe80::1%eth0]:1", "must not have a zone"),
        ("http://a?b", "no path, query"),
        ("http://a#b", "no path, query"),
        ("http://a\\b", "no path, query"),
        ("http://user@a", "user name"),
        ("http://a b", "spaces"),
        ("http://a\r\nb: c", "spaces"),
        ("http://ho*st", "not a host name"),
        ("http://-host", "not a host name"),
        ("http://a..b", "not a host name"),
        ("http://bücher", "not a host name"),
        ("http://1.2.3", "not an IPv4 address"),
        ("http://" + "a." * 200 + "a", "not a host name"),
    ],
)
def test_bad_urls(url, reason):
    with pytest.raises(Refusal, match=r".*") as caught:
        parse_url(url)
    assert reason in caught.value.reason
    assert "\n" not in str(caught.value)


def test_a_scheme_is_proposed_only_where_the_rest_is_right():
    with pytest.raises(Refusal) as caught:
        parse_url("[::1]:9001")
    assert caught.value.hint == "did you mean 'http://[::1]:9001'?"
    with pytest.raises(Refusal) as caught:
        parse_url("[::1]:http")
    assert caught.value.hint is None


@given(st.text(max_size=40) | st.text("ht:/[]1.a@%", max_size=30).map(lambda text: "http://" + text))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse_url(text)
    except Refusal:
        return
    assert 1 <= address.port <= 65535
    assert host_of(address.host) == address.host
    assert parse_url(f"http://{address.netloc}") == Address(address.host, address.port)
