"""Whether a coordinator runs with this configuration."""

import re
import ssl
import time
from pathlib import Path

from coordinator.config import Settings
from coordinator.core.instance import Address
from coordinator.doctor.shown import shown_certificate, unchecked
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.peers import Peer, Peers

RUNNING_S = 2.0
_FIRST = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


async def coordinator_runs(settings: Settings) -> bool:
    """Whether somebody on the management port answers as a coordinator does, be his certificate trusted or not.

    Where callers need a certificate of theirs nobody answers us: then it is whoever shows the one of the configuration.
    """
    server, tls = settings.server, settings.tls.management
    if not server.management_port:
        return False
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.management_host, server.management_host)  # noqa: S104
    address = Address(host, server.management_port, tls=tls.cert_file is not None)
    if tls.client_ca_file is not None and tls.cert_file is not None:
        shown = await shown_certificate(address, RUNNING_S)
        return shown is not None and shown == _own(Path(tls.cert_file))
    client = HttpClient(connect_s=RUNNING_S, peers=Peers(Peer(unchecked())))
    try:
        reply = await client.fetch(address, b"GET", "/v1/readiness", (), deadline_s=time.monotonic() + RUNNING_S)
    except TransportError:
        return False
    finally:
        await client.aclose()
    return b'"ready"' in reply.body


def _own(file: Path) -> bytes | None:
    """The certificate that stands first in a file; None where there is none."""
    try:
        found = _FIRST.search(file.read_text("ascii", "replace"))
        return None if found is None else ssl.PEM_cert_to_DER_cert(found[0])
    except (OSError, ValueError):
        return None
