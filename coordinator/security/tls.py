"""TLS contexts out of PEM files, and exchanging them while connections go on."""

import ssl
from collections.abc import Iterator
from typing import Final, NoReturn

from coordinator.config import EngineTls, ServerTls

PROTOCOLS: Final = ["http/1.1"]


class TlsError(ValueError):
    """A file that cannot be used.

    Attributes:
        key: the name of the key that names it.
        reason: in plain words, without the key.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


def server_context(given: ServerTls) -> ssl.SSLContext:
    """What one of our ports speaks TLS with: 1.2 and 1.3, HTTP/1.1.

    Raises:
        TlsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(PROTOCOLS)
    assert given.cert_file is not None  # whoever asks has looked
    _load_pair(context, given.cert_file, given.key_file)
    if given.client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, "client_ca_file", given.client_ca_file)
        # a ticket would let a client in again whose authority is no longer trusted
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def engine_context(given: EngineTls) -> ssl.SSLContext:
    """What engines are spoken to with.

    Raises:
        TlsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not given.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif given.ca_file is not None:
        _load_authorities(context, "ca_file", given.ca_file)
    else:
        context.load_default_certs()
    if given.cert_file is not None:
        _load_pair(context, given.cert_file, given.key_file)
    return context


def files_of(given: ServerTls | EngineTls) -> Iterator[str]:
    """The files that a context is made of."""
    yield from filter(None, (given.cert_file, given.key_file))
    yield from filter(None, (given.client_ca_file if isinstance(given, ServerTls) else given.ca_file,))


class PortTls:
    """The TLS of one port, which can be exchanged: new connections get what was made last, others live on.

    Attributes:
        context: for whoever accepts connections; always the same one.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        """Args: `context`: from `server_context`."""
        self.context = context
        self._current = context
        context.sni_callback = self._choose

    def take(self, fresh: ssl.SSLContext) -> None:
        """Let new connections get this one."""
        self._current = fresh
        # a connection begins with this context and asks for a certificate of the client as this one says; the
        # certificates and authorities that count are those of the context that is chosen for it
        self.context.verify_mode = fresh.verify_mode

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by OpenSSL for each handshake, whether the client names a host or not."""
        connection.context = self._current


def _load_pair(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "cert_file", cert)  # whose fault is it, if there is one
    try:
        context.load_cert_chain(cert, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError("key_file", "is not the key of the certificate in cert_file") from None
        raise TlsError("key_file", f"holds no private key that can be used: {_said(error)}") from None
    except _EncryptedKey:
        raise TlsError("key_file", "is encrypted with a password; there is nobody to ask for it") from None
    except OSError as error:
        raise TlsError("key_file", f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None


def _load_authorities(context: ssl.SSLContext, key: str, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise TlsError(key, f"holds no certificate that can be used: {_said(error)}") from None
    except OSError as error:
        raise TlsError(key, f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None


class _EncryptedKey(Exception):
    """OpenSSL wants a password; without this it would ask on the terminal."""


def _no_password() -> NoReturn:
    raise _EncryptedKey


def _said(error: ssl.SSLError) -> str:
    return (error.reason or "not in PEM form").lower().replace("_", " ")
