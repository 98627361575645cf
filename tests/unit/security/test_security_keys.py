"""Keys: made, kept as hashes, found again."""

import base64
import hashlib
import re

import pytest

from coordinator.core.errors import InvalidKey
from coordinator.security.keys import Key, Keyring, new_hash, new_key, presented, split_hash


def key(name, text, *, salted=False):
    salt, digest = split_hash(new_hash(text, salted=salted))
    return Key(0, name, digest, salt)


def bearer(text):
    return ((b"host", b"a"), (b"authorization", b"Bearer " + text.encode()))


def test_a_new_key_is_random_and_long():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"pd-[0-9a-f]{8}-[A-Za-z0-9_-]{43}", one) for one in keys)


def test_a_hash_is_what_sha256sum_prints():
    assert new_hash("secret-of-a-client-12") == f"sha256:{hashlib.sha256(b'secret-of-a-client-12').hexdigest()}"


def test_salted_hashes_of_one_key_differ_and_none_tells_the_key():
    hashes = {new_hash("my-own-key-of-old-days", salted=True) for _ in range(10)}
    assert len(hashes) == 10
    assert not any("my-own" in one for one in hashes)


@pytest.mark.parametrize("salted", [False, True])
def test_each_key_is_found_by_itself_and_by_nothing_else(salted):
    texts = {f"name-{i}": f"key-number-{i}-and-more" for i in range(20)}
    ring = Keyring([key(name, text, salted=salted) for name, text in texts.items()])
    for _ in range(2):  # the second time from memory
        for name, text in texts.items():
            assert ring.find(bearer(text)).name == name
            for wrong in (text[:-1], text + "x", text.upper(), new_hash(text)):
                with pytest.raises(InvalidKey):
                    ring.find(bearer(wrong))


def test_what_is_remembered_is_no_plain_text():
    ring = Keyring([key("a", "a-key-with-a-salt-012", salted=True)])
    ring.find(bearer("a-key-with-a-salt-012"))
    assert "a-key-with-a-salt" not in repr(vars(ring))


def test_strangers_leave_nothing_behind():
    ring = Keyring([key("a", "a-key-with-a-salt-012", salted=True)])
    for i in range(100):
        with pytest.raises(InvalidKey):
            ring.find(bearer(f"guess-{i}"))
    assert len(ring._found) == 0


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer k")], [(b"authorization", b"bearer k")], [(b"authorization", b"BEARER  k ")],
        [(b"x-api-key", b"k")], [(b"api-key", b"k")], [(b"api-key", b"other"), (b"x-api-key", b"k")],
        [(b"x-api-key", b"other"), (b"authorization", b"Bearer k")],
        [(b"authorization", b"Basic a"), (b"x-api-key", b"k")],
    ],
)  # fmt: skip
def test_where_a_key_may_stand(headers):
    assert presented(headers) == b"k"


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"")], [(b"authorization", b"Bearer")], [(b"authorization", b"Bearer ")],
     [(b"authorization", b"k")], [(b"authorization", b"Basic azpr")], [(b"x-api-key", b"")], [(b"cookie", b"k")]],
)  # fmt: skip
def test_where_there_is_none(headers):
    assert presented(headers) is None
    with pytest.raises(InvalidKey, match="an API key is needed"):
        Keyring([key("a", "k")]).find(headers)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"api-key"])
def test_a_header_that_stands_twice_is_refused(name):
    with pytest.raises(InvalidKey, match="twice"):
        presented([(name, b"Bearer k"), (name, b"Bearer k")])


def test_browsers_give_it_as_a_password():
    given = b"Basic " + base64.b64encode(b"anybody:a:k")
    assert presented([(b"authorization", given)], basic=True) == b"a:k"
    for wrong in (b"Basic !", b"Basic ", b"Basic " + base64.b64encode(b"nocolon"), b"Basic \xff\xff"):
        assert presented([(b"authorization", wrong)], basic=True) is None


def test_a_huge_key_is_not_even_hashed(monkeypatch):
    ring = Keyring([key("a", "k" * 600)])
    monkeypatch.setattr(hashlib, "sha256", lambda _: pytest.fail("hashed"))
    with pytest.raises(InvalidKey, match="not valid"):
        ring.find(bearer("k" * 600))


def test_messages_hold_no_key():
    with pytest.raises(InvalidKey) as caught:
        Keyring([key("a", "k")]).find(bearer("tell-nobody"))
    assert "tell-nobody" not in caught.value.message + caught.value.detail
