"""How engines are spoken to, as the configuration says: certificates and keys by address."""

import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from coordinator.config import EngineTls, InstanceSettings, Settings, parse_url, read_secret
from coordinator.config.errors import KeyPath
from coordinator.core.instance import Address
from coordinator.security.tls import TlsError, engine_context, files_of
from coordinator.transport.peers import Peer

FILES: Final = ("ca_file", "cert_file", "key_file")
PAIR: Final = FILES[1:]
TLS_KEYS: Final = (*FILES, "server_name")
KEY_KEYS: Final = ("engine_key_env", "engine_key_file")
_AS_SYSTEM: Final = EngineTls()

Problem = tuple[KeyPath, str]
"""A key path and what is wrong there, in words."""


class Outbound(NamedTuple):
    """How those are spoken to that have nothing of their own, and those that have."""

    default: Peer
    of: Mapping[Address, Peer]


class OutboundReader:
    """Reads certificates and keys for engines; each file set once.

    Attributes:
        problems: what is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._contexts: dict[EngineTls, ssl.SSLContext | None] = {_AS_SYSTEM: None}
        self.problems: list[Problem] = []

    def read(self) -> Outbound:
        """Read all there is; where there are `problems` the result is of no use."""
        settings = self._settings
        tls, auth = settings.tls.engines, settings.auth
        default = Peer(self._context(tls, ("tls", "engines")), tls.server_name, self._secret(auth, ("auth",)))
        of: dict[Address, Peer] = {}
        for position, entry in enumerate(settings.cluster.instances):
            path: KeyPath = ("cluster", "instances", position)
            peer, address = self._peer(entry, default, path), parse_url(entry.url)
            if of.setdefault(address, peer) != peer:
                self.problems.append((path, "another instance at this address has another key or certificate"))
        return Outbound(default, {address: peer for address, peer in of.items() if peer != default})

    def _peer(self, entry: InstanceSettings, default: Peer, path: KeyPath) -> Peer:
        own = {name: value for name in TLS_KEYS if (value := getattr(entry, name)) is not None}
        key = self._secret(entry, path) or default.key
        if not own:
            return default if key == default.key else Peer(default.context, default.server_name, key)
        if not entry.url.lower().startswith("https://"):
            self.problems.append(((*path, "url"), f"must begin with https://, since {next(iter(own))} is set"))
        elif ("cert_file" in own) is not ("key_file" in own):
            alone, missing = ("cert_file", "key_file") if "cert_file" in own else ("key_file", "cert_file")
            self.problems.append(((*path, alone), f"needs {missing} beside it"))
        else:
            tls = self._settings.tls.engines.model_copy(update=own)
            return Peer(self._context(tls, path), tls.server_name, key)
        return default

    def _context(self, given: EngineTls, path: KeyPath) -> ssl.SSLContext | None:
        """The context for these files; what is checked is the same for all names."""
        given = given.model_copy(update={"server_name": None})
        if given not in self._contexts:
            try:
                self._contexts[given] = engine_context(given)
            except TlsError as error:
                self.problems.append(((*path, error.key), error.reason))
                return None
        return self._contexts[given]

    def _secret(self, holder: Any, path: KeyPath) -> bytes:
        variable, file = (getattr(holder, name) for name in KEY_KEYS)
        if variable is not None and file is not None:
            self.problems.append(((*path, KEY_KEYS[0]), f"{KEY_KEYS[0]} and {KEY_KEYS[1]} exclude each other"))
            return b""
        try:
            return read_secret(variable, file)
        except ValueError as error:
            self.problems.append(((*path, KEY_KEYS[0] if variable is not None else KEY_KEYS[1]), str(error)))
            return b""


def outbound_files(settings: Settings) -> Iterator[str]:
    """The files that certificates and keys for engines come from."""
    yield from files_of(settings.tls.engines)
    holders: tuple[Any, ...] = (settings.auth, *settings.cluster.instances)
    for holder in holders:
        yield from filter(None, (getattr(holder, name, None) for name in (*FILES, "engine_key_file")))
    for own in settings.engines.values():
        yield from (file for name in FILES if isinstance(file := own.get(name), str))


def tls_settings(given: EngineTls, own: Mapping[str, object]) -> dict[str, object]:
    """What `tls.engines` says in the terms of an engine whose settings have these names, where they say nothing."""
    names = (
        TLS_KEYS if not any(own.get(name) for name in PAIR) else tuple(name for name in TLS_KEYS if name not in PAIR)
    )
    return {name: value for name in names if name in own and own[name] is None and (value := getattr(given, name))}
