"""What is wrong with keys and certificates beyond the configuration file itself."""

from collections.abc import Iterator

from coordinator.config import ConfigError, Settings
from coordinator.security.certificates import read_ports
from coordinator.security.outbound import OutboundReader, Problem
from coordinator.security.places import data_keys, management_keys


def problems(settings: Settings) -> Iterator[Problem]:
    """Everything that would stop the start."""
    yield from _keys(settings)
    yield from read_ports(settings, ("data", "management"))[1]
    reader = OutboundReader(settings)
    reader.read()
    yield from reader.problems


def _keys(settings: Settings) -> Iterator[Problem]:
    for name, read in (("keys_file", data_keys), ("management_keys_file", management_keys)):
        try:
            read(settings.auth)
        except ConfigError as error:
            yield ("auth", name), "; ".join(str(error).splitlines())
