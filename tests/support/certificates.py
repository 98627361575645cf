"""Certificates for tests, made on the spot."""

import ssl
from pathlib import Path

import trustme


class Authority:
    """A certificate authority, and what it has issued, as files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._ca = trustme.CA(organization_name=name)
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str) -> "Issued":
        """A certificate for some hosts, and its key; files of this name are replaced, each at once."""
        made = self._ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")), common_name=name)
        issued = Issued(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        _replace(issued.cert, chain)
        _replace(issued.key, made.private_key_pem.bytes())
        return issued

    def trust(self, client: "Issued | None" = None) -> ssl.SSLContext:
        """A client's context that trusts this authority alone."""
        context = ssl.create_default_context(cafile=str(self.file))
        if client is not None:
            context.load_cert_chain(client.cert, client.key)
        return context


class Issued:
    """Where a certificate and its key are."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.cert = cert
        self.key = key

    @property
    def keys(self) -> dict[str, str]:
        """As the configuration names them."""
        return {"cert_file": str(self.cert), "key_file": str(self.key)}


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(data)
    fresh.replace(path)
