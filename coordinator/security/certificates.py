"""All TLS of one process: of its ports, and towards engines; made anew when settings or files change."""

import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from coordinator.config import ConfigError, Finding, ServerTls, Settings
from coordinator.security.outbound import Outbound, OutboundReader, Problem, outbound_files
from coordinator.security.tls import PortTls, TlsError, files_of, server_context
from coordinator.transport.peers import Peers

LOG = logging.getLogger("pd_coordinator.security")


class Certificates:
    """Keeps certificates, authorities and engines' keys as their files are.

    Args:
        settings: name the files.
        peers: is told how engines are spoken to.
        ports: those that this process listens on: `data`, `management`.

    Attributes:
        on_change: called when files have changed and are good.

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(self, settings: Settings, peers: Peers, *ports: str) -> None:
        self._settings = settings
        self._peers = peers
        self._names = ports
        self._ports: dict[str, PortTls] = {}
        self.on_change: Callable[[], None] | None = None
        contexts, outbound = self._read(settings)
        for name, context in contexts.items():
            self._ports[name] = PortTls(context)
        peers.take(*outbound)

    def context(self, port: str) -> ssl.SSLContext | None:
        """What a port listens with, for as long as the process runs; None: in plain text."""
        found = self._ports.get(port)
        return None if found is None else found.context

    def apply(self, settings: Settings) -> None:
        """Go by these settings; raises ConfigError, and nothing has changed."""
        self.prepare(settings)()

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Read all files that these settings name; the result, when called, goes by them. Raises ConfigError."""
        return partial(self._take, settings, *self._read(settings))

    def _take(self, settings: Settings, contexts: Mapping[str, ssl.SSLContext], outbound: Outbound) -> None:
        self._settings = settings
        for name in self._names:
            if (name in contexts) is not (name in self._ports):
                LOG.warning("tls.%s: whether the port has TLS is decided at the start; it stays as it is", name)
        for name, port in self._ports.items():
            if name in contexts:
                port.take(contexts[name])
        self._peers.take(*outbound)

    def files(self) -> Iterator[str]:
        """The files that all of this comes from."""
        for name in self._names:
            yield from files_of(_of_port(self._settings, name))
        yield from outbound_files(self._settings)

    def reread(self) -> None:
        """Read the files again; one that cannot be used changes nothing and is told in the log."""
        try:
            self.apply(self._settings)
        except ConfigError as error:
            LOG.error("certificates and keys not read again, those before stay in use: %s", error)
            return
        LOG.info("certificates and keys of engines read again")
        if self.on_change is not None:
            self.on_change()

    def _read(self, settings: Settings) -> tuple[dict[str, ssl.SSLContext], Outbound]:
        """The contexts of the ports, and how engines are spoken to."""
        contexts, problems = read_ports(settings, self._names)
        reader = OutboundReader(settings)
        outbound = reader.read()
        if found := [*problems, *reader.problems]:
            lines = settings.source.lines
            raise ConfigError(settings.source.name, [Finding(*problem).located(lines) for problem in found])
        return contexts, outbound


def read_ports(settings: Settings, names: tuple[str, ...]) -> tuple[dict[str, ssl.SSLContext], list[Problem]]:
    """A context for each of these ports that has TLS, and what is wrong with their files."""
    contexts: dict[str, ssl.SSLContext] = {}
    problems: list[Problem] = []
    for name in names:
        given = _of_port(settings, name)
        if given.cert_file is None:
            continue
        try:
            contexts[name] = server_context(given)
        except TlsError as error:
            problems.append((("tls", name, error.key), error.reason))
    return contexts, problems


def _of_port(settings: Settings, name: str) -> ServerTls:
    found: ServerTls = getattr(settings.tls, name)
    return found
