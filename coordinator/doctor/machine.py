"""This machine and this configuration: files, ports, certificates, what is allowed but may not be meant."""

import errno
import resource
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coordinator import config
from coordinator.config import Settings
from coordinator.core.instance import Instance
from coordinator.doctor.dates import Validity, validities, validity
from coordinator.doctor.findings import Finding, fault, note, ok, warning
from coordinator.doctor.shown import shown_certificate

SOON = timedelta(days=21)
RENEW = "put a new one in its place; files are read again when they change"


def check_notes(settings: Settings) -> Iterator[Finding]:
    """What `check` notes."""
    for found in config.notes(settings):
        yield note("configuration", "", found)


def check_files(settings: Settings, limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Whether as many files may be open as requests may need; `limits`: soft and hard, instead of this process's."""
    _, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.limits.wanted_files
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        allowed = "any number of" if hard == resource.RLIM_INFINITY else hard
        yield ok("files", "", f"{allowed} files may be open at once, {wanted} may be needed")
        return
    yield warning(
        "files",
        "",
        f"{hard} files may be open at once, limits.max_requests {settings.limits.max_requests} may need {wanted}: "
        "further clients will wait",
        f"raise the limit (ulimit -n {wanted}, LimitNOFILE={wanted} in systemd), or lower limits.max_requests to "
        f"{max(1, (hard - 256) // 3)}",
    )


def check_ports(settings: Settings, *, running: bool) -> Iterator[Finding]:
    """Whether our ports can be had; `running`: a coordinator has them already."""
    server = settings.server
    planes = (
        ("port", server.host, server.port),
        ("management_port", server.management_host, server.management_port),
        ("metrics_port", server.management_host, server.metrics_port),
        ("status_port", server.management_host, server.status_port),
    )
    for name, host, port in planes:
        if not port:
            continue
        problem = _bind_problem(host, port)
        where = f"server.{name}"
        if problem is None:
            yield ok("ports", where, f"{host} port {port} is free")
        elif running:
            yield ok("ports", where, f"{host} port {port} is the running coordinator's")
        else:
            yield fault("ports", where, f"{host} port {port}: {problem}", "end what has it, or take another port")


def _bind_problem(host: str, port: int) -> str | None:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return "another program listens there" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return None


# --- certificates


def check_own_certificates(settings: Settings) -> Iterator[Finding]:
    """The dates in every certificate file that the configuration names."""
    tls = settings.tls
    named: list[tuple[str, str | None]] = []
    for part in ("data", "management", "engines"):
        given = getattr(tls, part)
        named += (
            (f"tls.{part}.{key}", getattr(given, key, None)) for key in ("cert_file", "client_ca_file", "ca_file")
        )
    for at, entry in enumerate(settings.cluster.instances):
        named += ((f"cluster.instances[{at}].{key}", getattr(entry, key)) for key in ("cert_file", "ca_file"))
    seen: set[str] = set()
    for where, file in named:
        if file is None or file in seen:
            continue
        seen.add(file)
        try:
            dates = validities(Path(file).read_text())
        except (OSError, ValueError) as error:
            yield fault("certificates", where, f"{file} cannot be read: {error}", "put a PEM file in its place")
            continue
        if dates:
            # of a chain the weakest counts; of a bundle of authorities the newest, since any may do
            bundle = where.endswith("ca_file")
            yield _dated(where, (max if bundle else min)(dates, key=lambda found: found.until), RENEW)


async def check_instance_certificate(instance: Instance, within_s: float) -> Finding | None:
    """The dates in the certificate that an https instance shows, be it trusted or not; None: there is none to see."""
    if not instance.address.tls:
        return None
    der = await shown_certificate(instance.address, within_s)
    if der is None:
        return None  # that it cannot be reached is told elsewhere
    try:
        return _dated(instance.id, validity(der), "renew the instance's certificate")
    except ValueError as error:
        return warning("certificates", instance.id, f"its certificate cannot be read: {error}", "look at it by hand")


def _dated(subject: str, found: Validity, advice: str) -> Finding:
    now = datetime.now(UTC)
    until = f"{found.until:%Y-%m-%d %H:%M} UTC"
    if now > found.until:
        return fault("certificates", subject, f"the certificate expired on {until}", advice)
    if now < found.since:
        since = f"{found.since:%Y-%m-%d %H:%M} UTC"
        return fault("certificates", subject, f"the certificate is not valid before {since}", "is a clock wrong?")
    if now + SOON > found.until:
        return warning("certificates", subject, f"the certificate expires soon, on {until}", advice)
    return ok("certificates", subject, f"valid until {until}")
