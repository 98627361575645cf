"""API keys: how they are made, what is kept of them, and how one is recognised.

Only hashes are kept. A key made here has 256 random bits, so SHA-256 is enough: nobody can try them all, and a slow
hash would let strangers keep the process busy. Why there are two forms of hashes: docs/adr/0017.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.core.errors import InvalidKey

MAX_KEY_BYTES: Final = 512
LEAST_CHARS: Final = 20
ORDER: Final = (b"authorization", b"x-api-key", b"api-key")
CREDENTIALS: Final = frozenset(ORDER)
"""Headers in which clients send a key: OpenAI's SDKs, TGI's and curl the first, gateways and Azure's SDK the others."""

_ID_BYTES = 4
_SECRET_BYTES = 32
_SALT_BYTES = 8
_BEARER = b"bearer "
_BASIC = b"basic "
_MISSING = "an API key is needed: send it as `Authorization: Bearer KEY`"
_WRONG = "the API key is not valid"

RawHeaders = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Key:
    """What is kept of one key.

    Attributes:
        slot: where its use is counted.
        name: for logs and metrics; never the key.
        digest: SHA-256 of the salt, if there is one, and the key.
        salt: empty for keys that are random themselves.
        requests_per_minute: None: no limit.
        max_in_flight: None: no limit.
    """

    slot: int
    name: str
    digest: bytes
    salt: bytes = b""
    requests_per_minute: int | None = None
    max_in_flight: int | None = None


def new_key() -> str:
    """A new key: `pd-`, 8 characters to tell keys apart by, and 256 random bits."""
    return f"pd-{secrets.token_hex(_ID_BYTES)}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def new_hash(key: str, *, salted: bool = False) -> str:
    """What the configuration keeps of a key; `salted` for one that was not made by `new_key`."""
    if not salted:
        return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    salt = secrets.token_hex(_SALT_BYTES)
    return f"sha256:{salt}:{_salted(salt.encode(), key.encode()).hex()}"


def split_hash(text: str) -> tuple[bytes, bytes]:
    """Salt and digest of a hash that the configuration has accepted."""
    _, *salt, digest = text.split(":")
    return "".join(salt).encode(), bytes.fromhex(digest)


def _salted(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + b"\0" + key).digest()


class Keyring:
    """The keys of one port.

    A key is found by its digest, in one look-up however many there are. Salted ones are tried one by one until they
    have come once; the digests of those that have are remembered, one for each. What is remembered is no plain text.

    How long a look-up takes tells nothing of a key: it compares digests, and nobody can make a key whose digest begins
    like that of another without knowing this one. They are compared in constant time all the same.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        keys = tuple(keys)
        self._found = {key.digest: (key.digest, key) for key in keys if not key.salt}
        self._salted = tuple(key for key in keys if key.salt)

    def find(self, headers: RawHeaders, *, basic: bool = False) -> Key:
        """The key that a request carries. Hot.

        Args:
            headers: names in lower case.
            basic: whether `Authorization: Basic` is taken as well, with the key as password: browsers know no other.

        Raises:
            InvalidKey: it has none, or a wrong one.
        """
        given = presented(headers, basic=basic)
        if given is None:
            raise InvalidKey(_MISSING)
        if len(given) > MAX_KEY_BYTES:
            raise InvalidKey(_WRONG)
        digest = hashlib.sha256(given).digest()
        known = self._found.get(digest)
        if known is not None and hmac.compare_digest(known[0], digest):
            return known[1]
        return self._search(given, digest)

    def _search(self, given: bytes, digest: bytes) -> Key:
        for key in self._salted:
            if hmac.compare_digest(_salted(key.salt, given), key.digest):
                self._found[digest] = (digest, key)
                return key
        raise InvalidKey(_WRONG)


def presented(headers: RawHeaders, *, basic: bool = False) -> bytes | None:
    """The key in the headers: a bearer token, else `x-api-key`, else `api-key`; None: there is none.

    Raises:
        InvalidKey: one of these headers stands twice: nobody can say which one counts.
    """
    name, value = b"", b""
    for one in headers:
        if one[0] in CREDENTIALS:
            if name:
                return _best(headers, basic=basic)
            name, value = one
    return _token(name, value, basic=basic)


def _token(name: bytes, value: bytes, *, basic: bool) -> bytes | None:
    """The key in one header."""
    if name != b"authorization":
        return value or None
    if value[: len(_BEARER)].lower() == _BEARER:
        return value[len(_BEARER) :].strip() or None
    if basic and value[: len(_BASIC)].lower() == _BASIC:
        return _password(value[len(_BASIC) :])
    return None


def _best(headers: RawHeaders, *, basic: bool) -> bytes | None:
    """The key where several headers may hold one."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in CREDENTIALS:
            if name in found:
                raise InvalidKey("a header with an API key stands twice")
            found[name] = value
    given = (_token(name, found[name], basic=basic) for name in ORDER if name in found)
    return next(filter(None, given), None)


def _password(text: bytes) -> bytes | None:
    """The password of basic credentials (RFC 7617 §2)."""
    try:
        return base64.b64decode(text.strip(), validate=True).partition(b":")[2] or None
    except ValueError:
        return None
